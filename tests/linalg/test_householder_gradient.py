"""Derivatives of householder_product, ormqr, larft and larfb, and the operators under tracing tools."""

import pytest
import torch
from opinfo import check_samples, tensors
from references import assert_same_error, check_operator

import metalcore

ops = torch.ops.metalcore
SHAPES = [((4, 4), 4), ((5, 3), 3), ((6, 4), 2), ((2, 3, 4, 2), 2), ((3, 3), 1)]


def double(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("shape, count", SHAPES)
def test_gradcheck_of_householder_product(shape, count):
    inputs = double(*shape), double(*shape[:-2], count)
    assert torch.autograd.gradcheck(ops.householder_product, inputs)
    assert torch.autograd.gradgradcheck(ops.householder_product, inputs)


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("shape", [(4, 4), (5, 3), (2, 3, 2)])
def test_gradcheck_of_ormqr(shape, left, transpose):
    other = (*shape[:-2], shape[-2], 3) if left else (*shape[:-2], 3, shape[-2])
    inputs = double(*shape), double(*shape[:-2], shape[-1]), double(*other)

    def ormqr(*inputs):
        return ops.ormqr(*inputs, left, transpose)

    assert torch.autograd.gradcheck(ormqr, inputs)
    assert torch.autograd.gradgradcheck(ormqr, inputs)


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("left", [True, False])
def test_gradcheck_of_block_reflectors(left, transpose):
    V, tau, C = double(5, 3), double(3), double(5, 2) if left else double(2, 5)

    def product(V, tau, C):
        return metalcore.larfb(V, metalcore.larft(V, tau), C, left, transpose)

    assert torch.autograd.gradcheck(product, (V, tau, C))
    assert torch.autograd.gradgradcheck(product, (V, tau, C))


@pytest.mark.parametrize("needed", [(True, False, False), (False, True, False), (False, False, True)])
def test_gradients_for_those_that_need_one(device, needed):
    inputs = [
        torch.randn(shape, device=device).requires_grad_(wanted)
        for shape, wanted in zip(((6, 4), (4,), (6, 3)), needed)
    ]
    metalcore.ormqr(*inputs).square().sum().backward()
    assert [tensor.grad is not None for tensor in inputs] == list(needed)


def test_opinfo_samples(device):
    # PyTorch's derivative of an empty matrix is None, ours is empty.
    for function, name in ((metalcore.householder_product, "linalg.householder_product"), (metalcore.ormqr, "ormqr")):
        check_samples(function, name, device, torch.float32, orders=0)
        check_samples(
            function,
            name,
            device,
            torch.float32,
            select=lambda *sample: all(given.numel() for given in tensors(sample)),
        )
    check_samples(metalcore.geqrf, "geqrf", device, torch.float32, orders=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_has_gradients(device, dtype):
    A, tau = (x.to(dtype) for x in torch.geqrf(torch.randn(6, 4)))
    inputs = [x.to(device).requires_grad_() for x in (A, tau)]
    wide = [x.double().requires_grad_() for x in (A, tau)]
    actual = torch.autograd.grad(metalcore.householder_product(*inputs).sum(), inputs)
    expected = torch.autograd.grad(torch.linalg.householder_product(*wide).sum(), wide)
    for ours, theirs in zip(actual, expected):
        assert ours.dtype == dtype
        bound = 10 * 6 * torch.finfo(dtype).eps * theirs.abs().max().item()
        torch.testing.assert_close(ours.cpu().double(), theirs, rtol=0, atol=bound)


def test_geqrf_has_no_derivative(device):
    assert_same_error(
        lambda: metalcore.geqrf(torch.randn(3, 3, device=device).requires_grad_()).a.sum().backward(),
        lambda: torch.geqrf(torch.randn(3, 3, requires_grad=True)).a.sum().backward(),
    )


@pytest.mark.parametrize("where, batch", [("cpu", (2,)), ("device", (2,)), ("device", (0,))])
def test_opcheck(device, where, batch):
    place = device if where == "device" else "cpu"
    A, tau, C = (torch.randn(*batch, *shape, device=place).requires_grad_() for shape in ((5, 3), (3,), (5, 2)))
    check_operator(ops.geqrf, A.detach())
    check_operator(ops.householder_product, A, tau)
    check_operator(ops.ormqr, A, tau, C, True, False)


def test_compile(device):
    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(A, tau, C):
        return metalcore.ormqr(A, tau, C) + metalcore.householder_product(A * 2, tau)

    inputs = [torch.randn(shape, device=device, requires_grad=True) for shape in ((6, 4), (4,), (6, 4))]
    result = compiled(*inputs)
    expected = metalcore.ormqr(*inputs) + metalcore.householder_product(inputs[0] * 2, inputs[1])
    assert torch.equal(result, expected)
    for ours, theirs in zip(torch.autograd.grad(result.sum(), inputs), torch.autograd.grad(expected.sum(), inputs)):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    "function",
    [
        lambda A: metalcore.larft(A, A[0]),
        lambda A: torch.autograd.grad(metalcore.householder_product(A, A[0]).sum(), A),
        lambda A: torch.autograd.grad(metalcore.qr(A).Q[0].sum(), A),
    ],
    ids=["larft", "the gradient of householder_product", "the gradient of qr"],
)
def test_triangular_systems_are_solved_by_our_kernel(device, function):
    """metalcore's operator gives the same bits on every run; LAPACK's on the simulated device does not."""
    A = torch.randn(5, 5, device=device, requires_grad=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function(A)
    ran = {event.key for event in profile.key_averages()}
    assert "metalcore::solve_triangular" in ran and "aten::linalg_solve_triangular" not in ran
