"""Which tensors the kernels take on a machine with a GPU, and which go to PyTorch."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import metalcore

CALLS = {
    "silu": (metalcore.silu, F.silu),
    "gelu": (metalcore.gelu, F.gelu),
    "softmax": (lambda x: metalcore.softmax(x, -1), lambda x: F.softmax(x, -1)),
    "rms_norm": (lambda x: metalcore.rms_norm(x, (8,)), lambda x: F.rms_norm(x, (8,))),
    "qr": (lambda x: metalcore.qr(x)[1], lambda x: torch.linalg.qr(x)[1]),
}
each_call = pytest.mark.parametrize("name", CALLS)


class Operators(TorchDispatchMode):
    """Collects the metalcore operators that run."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "metalcore":
            self.seen.add(function._schema.name.removeprefix("metalcore::"))
        return function(*args, **(kwargs or {}))


@each_call
def test_cuda_tensors_take_the_kernels(name):
    with Operators() as operators:
        CALLS[name][0](torch.randn(4, 8, device="cuda"))
    assert operators.seen == {name}


@each_call
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(4, 8),
        lambda: torch.randn(4, 8).pin_memory(),
        lambda: torch.randn(4, 8, dtype=torch.float64, device="cuda"),
    ],
    ids=["CPU", "pinned", "float64"],
)
def test_other_tensors_go_to_pytorch(name, make):
    x = make()
    ours, theirs = CALLS[name]
    with Operators() as operators:
        found = ours(x)
    assert not operators.seen
    assert found.device == x.device and torch.equal(found, theirs(x))


@each_call
def test_managed_by_another_library(name):
    """Ops take tensors that come through DLPack."""
    x = torch.randn(4, 8, device="cuda")
    shared = torch.from_dlpack(torch.utils.dlpack.to_dlpack(x))
    assert torch.equal(CALLS[name][0](shared), CALLS[name][0](x))


def test_no_op_makes_the_host_wait():
    """PyTorch raises where it would wait for the device. Waits that bypass PyTorch make the capture of a graph fail."""
    x = torch.randn(64, 32, device="cuda", requires_grad=True)
    parameter = torch.nn.Parameter(torch.ones(5, device="cuda"))
    parameter.grad = torch.ones_like(parameter)
    optimizers = [metalcore.optim.AdamW([parameter], capturable=capturable) for capturable in (False, True)]

    def everything():
        results = [
            metalcore.silu(x),
            metalcore.gelu(x),
            metalcore.softmax(x, 0),
            metalcore.log_softmax(x, -1),
            metalcore.rms_norm(x, (32,)),
            metalcore.add_rms_norm(x, x)[0],
        ]
        torch.autograd.grad(results, x, [torch.ones_like(result) for result in results])
        metalcore.qr(x)
        for optimizer in optimizers:
            optimizer.step()

    everything()
    torch.cuda.set_sync_debug_mode("error")
    try:
        everything()
    finally:
        torch.cuda.set_sync_debug_mode("default")
