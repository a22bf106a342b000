"""capture() of functions that torch.compile made, and the places of values in an arena."""

import random

import pytest
import torch

import metalcore
import metalcore.programs
from metalcore._core.arena import ALIGNMENT, peak, place
from metalcore.replay import CaptureError

pytestmark = pytest.mark.only_on("simulator", "mps")


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def chain(x):
    return torch.softmax(x * 2 + 1, -1)


def check(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=0, atol=16 * torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_programs_of_torch_compile_are_recorded(device, fullgraph):
    x, other = torch.randn(4, 16, device=device), torch.randn(4, 16, device=device)
    captured = metalcore.capture(torch.compile(chain, backend="metalcore", fullgraph=fullgraph), x)
    check(captured(other), chain(other))
    assert not captured.torch_operators
    assert any(kernel.startswith("pointwise") for kernel in captured.kernels)


def test_gradients_of_compiled_functions_are_recorded(device):
    compiled = torch.compile(chain, backend="metalcore", fullgraph=True)

    def gradient(x, function=compiled):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(function(x)[:, 0].sum(), x)[0]

    x, other = torch.randn(4, 16, device=device), torch.randn(4, 16, device=device)
    captured = metalcore.capture(gradient, x, segments=True)
    check(captured(other), gradient(other, chain))
    assert any(kernel.startswith("softmax_backward") for kernel in captured.kernels)


def test_code_of_inductor_is_refused(device):
    from torch._inductor.output_code import CompiledFxGraph

    call = CompiledFxGraph.__call__
    x = torch.randn(4, 16, device=device)
    compiled = torch.compile(lambda x: x * 2 + 1)
    with pytest.raises(CaptureError, match='what Inductor compiled .* backend="metalcore"'):
        metalcore.capture(compiled, x, segments=True)
    assert CompiledFxGraph.__call__ is call
    check(compiled(x), x * 2 + 1)


def test_indices_in_tensors_are_recorded_and_masks_are_refused(device):
    x, at = torch.randn(4, 16, device=device), torch.tensor([2, 0], device=device)
    captured = metalcore.capture(lambda x: x[at], x, segments=True)
    torch.testing.assert_close(captured(-x), -x[at], rtol=0, atol=0)
    with pytest.raises(CaptureError, match="aten::index"):
        metalcore.capture(lambda x: x[x > 0], x, segments=True)


def test_what_a_program_runs_on_the_cpu_is_refused_by_its_name(device):
    """The caller reads nothing of the device, and the message must not say so."""
    model = torch.nn.Linear(4, 4).to(device)
    compiled = torch.compile(lambda x: torch.linalg.svdvals(model(x)), backend="metalcore")
    optimizer = metalcore.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(3, 4, device=device)
    step = metalcore.compile_train_step(compiled, torch.sum, optimizer, x, warmup=1)
    step(x)
    with pytest.raises(CaptureError, match="aten::_linalg_svd runs.* no kernel of such an operator for mps") as refused:
        step(x)
    assert ".item()" not in str(refused.value)


def test_values_that_meet_are_apart():
    rng = random.Random(0)
    for count in (0, 1, 7, 60):
        lives = [(first, first + rng.randrange(9), rng.randrange(1, 3000)) for first in rng.choices(range(40), k=count)]
        offsets, size = place(lives)
        assert peak(lives) <= size <= sum(nbytes + ALIGNMENT for *_, nbytes in lives)
        for i in range(count):
            assert offsets[i] % ALIGNMENT == 0 and offsets[i] + lives[i][2] <= size
            for j in range(i):
                apart = offsets[i] + lives[i][2] <= offsets[j] or offsets[j] + lives[j][2] <= offsets[i]
                assert apart or lives[i][1] < lives[j][0] or lives[j][1] < lives[i][0]


def test_a_chain_takes_two_places():
    assert place([(i, i + 1, 512) for i in range(50)])[1] == peak([(i, i + 1, 512) for i in range(50)]) == 1024
