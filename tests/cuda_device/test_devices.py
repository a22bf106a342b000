"""Which GPU and which stream an op uses: its tensors' GPU, whichever is current; tensors of one GPU only; PyTorch's op
where kernels do not take a tensor; the current stream, where inputs come late."""

import pytest
import torch
import torch.nn.functional as F
from cases import CASES
from references import assert_same_error
from torch.utils._python_dispatch import TorchDispatchMode

import metalcore

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="takes two GPUs")


@two_gpus
@pytest.mark.parametrize("name", CASES)
def test_the_other_gpu(name):
    made = CASES[name].make("cuda:1")
    torch.cuda.set_device(0)
    found = made.run()
    assert torch.cuda.current_device() == 0
    assert all(value.device == torch.device("cuda:1") for value in found)
    for value, wanted in zip(found, CASES[name].make("cuda:0").run()):
        torch.testing.assert_close(value.cpu(), wanted.cpu(), rtol=1e-4, atol=1e-4)


@two_gpus
def test_the_other_gpus_current_stream():
    x = torch.zeros(1000, device="cuda:1")
    stream = torch.cuda.Stream(device="cuda:1")
    torch.cuda.synchronize(1)
    metalcore.silu(x)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        x.fill_(1)
        with torch.cuda.device(0):  # the current GPU has no effect
            y = metalcore.silu(x)
    stream.synchronize()
    torch.testing.assert_close(y.cpu(), torch.nn.functional.silu(torch.ones(1000)))


@two_gpus
def test_an_optimizer_of_parameters_on_both():
    params = [torch.nn.Parameter(torch.ones(5, device=device)) for device in ("cuda:0", "cuda:1", "cuda:0", "cpu")]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer = metalcore.optim.AdamW(params, lr=0.1, weight_decay=0.0)
    for _ in range(3):
        optimizer.step()
    for param in params:
        torch.testing.assert_close(param.detach().cpu(), torch.full((5,), 0.7))


OPERATORS = {
    "silu_backward": lambda a, b: torch.ops.metalcore.silu_backward(a, b),
    "softmax_backward": lambda a, b: torch.ops.metalcore.softmax_backward(a, b, -1, torch.float32),
    "rms_norm": lambda a, b: torch.ops.metalcore.rms_norm(a, 1, b[0], 1e-6, 0.0),
    "add_rms_norm": lambda a, b: torch.ops.metalcore.add_rms_norm(a, b, 1, None, 1e-6, 0.0),
    "adamw": lambda a, b: torch.ops.metalcore.adamw_(
        [a],
        [b],
        [a.clone()],
        [a.clone()],
        [],
        [torch.zeros(())],
        lr=0.1,
        beta1=0.9,
        beta2=0.99,
        weight_decay=0.0,
        eps=1e-8,
        maximize=False,
    ),
}


@pytest.mark.parametrize("other", ["cpu", pytest.param("cuda:1", marks=two_gpus)])
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_refuse_tensors_of_two_devices(name, other):
    a, b = torch.ones(3, 4, device="cuda:0"), torch.ones(3, 4, device=other)
    with pytest.raises(RuntimeError, match=r"metalcore::\w+: \w+ must be on the device"):
        OPERATORS[name](a, b)


@pytest.mark.parametrize("other", ["cpu", pytest.param("cuda:1", marks=two_gpus)])
def test_functions_leave_tensors_of_two_devices_to_pytorch(other):
    x, weight = torch.ones(3, 4, device="cuda:0"), torch.ones(4, device=other)
    for call in (lambda module: module.rms_norm(x, (4,), weight), lambda module: module.rms_norm(weight, (4,), x[0])):
        assert_same_error(lambda: call(metalcore), lambda: call(torch.nn.functional))


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


each_case = pytest.mark.parametrize("name", CASES)


def late():
    """Keeps the current stream busy for some milliseconds: launches on other streams then run first."""
    torch.cuda._sleep(20_000_000)


def assert_same(found, expected):
    for value, wanted in zip(found, expected):
        torch.testing.assert_close(value, wanted, rtol=1e-4, atol=1e-4)


def zero(tensors):
    with torch.no_grad():
        for tensor in tensors:
            tensor.zero_()


@each_case
def test_side_stream(name):
    made = CASES[name].make("cuda")
    expected, values = made.run(), made.values(0)
    zero(made.leaves)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late()
        with torch.no_grad():
            for leaf, value in zip(made.leaves, values):
                leaf.copy_(value)
        found = made.run()
    stream.synchronize()
    assert_same(found, expected)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.backward])
def test_backward_runs_on_the_stream_of_forward(name):
    """The caller of the backward pass is on another stream, where the gradients of the outputs come late."""
    made = CASES[name].make("cuda")
    expected, directions = made.run(), made.directions
    count = len(expected) - len(made.leaves)
    given = [torch.zeros_like(direction) for direction in directions]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        outputs = made.forward()
    late()
    for tensor, direction in zip(given, directions):
        tensor.copy_(direction)
    gradients = made.gradients(outputs, given)
    torch.cuda.current_stream().synchronize()
    assert_same(gradients, expected[count:])


@each_case
def test_many_streams_at_once(name):
    case = CASES[name]
    made = [case.make("cuda", seed=seed) for seed in range(4)]
    expected = [one.run() for one in made]
    torch.cuda.synchronize()
    streams, found = [torch.cuda.Stream() for _ in made], [None] * len(made)
    for _ in range(3):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found[i] = made[i].run()
    torch.cuda.synchronize()
    for values, wanted in zip(found, expected):
        assert_same(values, wanted)
