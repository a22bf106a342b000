"""Dtypes that no kernel has, autocast, forward-mode derivatives and traces, for all of linear algebra."""

import warnings

import pytest
import torch
from references import wide
from rows import tuned
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves, tree_map

import metalcore
from metalcore._core.registry import OPS

LINALG = {name: op for name, op in OPS.items() if op.family == "linalg"}


def arguments(op, dtype, device):
    """The arguments of an op's first sample of each set of options."""
    samples = {str(sample.options): sample for sample in reversed(list(op.samples()))}
    for sample in samples.values():
        yield sample.arguments(*sample.make(device, dtype)), sample.options


def outcome(op, function, given, options):
    """Tensors, or the error."""
    torch.manual_seed(0)
    try:
        return [leaf for leaf in tree_leaves(op.call(function, *given, **options)) if isinstance(leaf, torch.Tensor)]
    except torch.linalg.LinAlgError as error:
        return str(error)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LINALG)
def test_half_precision_is_computed_in_float32(device, dtype, name):
    op = LINALG[name]
    for given, options in arguments(op, dtype, device):
        wide = tree_map(lambda x: x.float() if isinstance(x, torch.Tensor) and x.dtype == dtype else x, given)
        found, expected = (outcome(op, op.function, each, options) for each in (given, wide))
        for ours, theirs in zip(found, expected, strict=True):
            narrow = theirs.is_floating_point() and tree_leaves(given)[0].dtype == dtype  # some samples are complex
            assert ours.dtype == (dtype if narrow else theirs.dtype)
            assert torch.equal(ours, theirs.to(ours.dtype))


# lstsq has the default of GPUs, gels, also on the CPU, where PyTorch's is gelsy. PyTorch's lobpcg takes no complex A.
OTHERS = [name for name, op in LINALG.items() if op.namesake and name not in ("lstsq", "lobpcg")]


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize("name", OTHERS)
def test_other_input_goes_to_torch(dtype, name):
    op = LINALG[name]
    for given, options in arguments(op, dtype, "cpu"):
        found, expected = (outcome(op, each, given, options) for each in (op.function, op.pytorch))
        if isinstance(expected, str):
            assert found == expected
        else:
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def low_rank(A):
    torch.manual_seed(0)
    return metalcore.svd_lowrank(A, q=3)


def block_reflector(A):
    a, tau = A.tril(-1), A[:, 0]
    return metalcore.larfb(a, metalcore.larft(a, tau), A)


AUTOCAST = {
    "svd": metalcore.svd,
    "eigh": lambda A: metalcore.eigh(A + A.mT),
    "cholesky": metalcore.cholesky,
    "lu": metalcore.lu,
    "lu_solve": lambda A: metalcore.lu_solve(*metalcore.lu_factor_ex(A)[:2], A),
    "solve": lambda A: metalcore.solve(A, A.mT),
    "inv": metalcore.inv,
    "det": metalcore.det,
    "solve_triangular": lambda A: metalcore.solve_triangular(A, A, upper=True),
    "lstsq": lambda A: metalcore.lstsq(A[:, :4], A)[:2],
    "pinv": lambda A: metalcore.pinv(A[:, :4]),
    "pinv, hermitian": lambda A: metalcore.pinv(A + A.mT, hermitian=True),
    "cond": lambda A: metalcore.cond(A, "fro"),
    "qr": metalcore.qr,
    "householder_product": lambda A: metalcore.householder_product(A, A[:, 0]),
    "ormqr": lambda A: metalcore.ormqr(A, A[:, 0], A),
    "larfb": block_reflector,
    "syrk": metalcore.syrk,
    "svd_lowrank": low_rank,
}
# These record PyTorch's products for autograd, which follow autocast where the backward pass is inside of it.
RECORDED = {"lstsq", "larfb", "svd_lowrank"}


def flat(results):
    return [results] if isinstance(results, torch.Tensor) else list(results)


def matrix(device):
    A = torch.randn(6, 6) / 4
    return (A + A.mT + torch.diag(torch.arange(3.0, 9))).to(device)


@pytest.mark.parametrize("name", AUTOCAST)
def test_results_under_autocast(device, name):
    A = matrix(device)
    expected = flat(AUTOCAST[name](A))
    with torch.autocast(device, dtype=torch.bfloat16):
        found = flat(AUTOCAST[name](A))
    for ours, theirs in zip(found, expected):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


@pytest.mark.parametrize("name", sorted(set(AUTOCAST) - RECORDED))
def test_a_backward_pass_inside(device, name):
    A = matrix(device).requires_grad_()
    with tuned("baseline"):  # no function is PyTorch's, whose derivatives follow autocast
        results = [result for result in flat(AUTOCAST[name](A)) if result.requires_grad]
    directions = [torch.randn_like(result) for result in results]
    (expected,) = torch.autograd.grad(results, A, directions, retain_graph=True)
    with torch.autocast(device, dtype=torch.bfloat16):
        (found,) = torch.autograd.grad(results, A, directions)
    assert torch.equal(found, expected)


def dominant(A):
    return A + 6 * torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)


FUNCTIONS = {
    "svdvals": lambda of, A: of.svdvals(A),
    "eigvalsh": lambda of, A: of.eigvalsh(A + A.mT),
    "cholesky": lambda of, A: of.cholesky(dominant(A @ A.mT)),
    "qr": lambda of, A: of.qr(dominant(A)).R,
    "lu": lambda of, A: of.lu(dominant(A)).U,
    "lu_factor_ex": lambda of, A: of.lu_factor_ex(dominant(A)).LU,
    "solve": lambda of, A: of.solve(dominant(A), A),
    "inv": lambda of, A: of.inv(dominant(A)),
    "det": lambda of, A: of.det(A),
    "slogdet": lambda of, A: of.slogdet(A).logabsdet,
    "solve_triangular": lambda of, A: of.solve_triangular(dominant(A), A, upper=True),
    "lstsq": lambda of, A: of.lstsq(dominant(A), A).solution,
    "pinv": lambda of, A: of.pinv(dominant(A)),
    "cond": lambda of, A: of.cond(dominant(A)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_tangents(device, name):
    A, direction = torch.randn(2, 3, 4, 4, device=device)

    def tangent(of, A, direction):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(FUNCTIONS[name](of, forward_ad.make_dual(A, direction))).tangent

    found, expected = tangent(metalcore, A, direction), tangent(torch.linalg, wide(A), wide(direction))
    torch.testing.assert_close(wide(found), expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item())


CALLS = {
    "pinv": lambda A: metalcore.pinv(A),
    "pinv rtol": lambda A: metalcore.pinv(A, rtol=0.3),
    "pinv atol": lambda A: metalcore.pinv(A, atol=0.5),
    "pinv rcond": lambda A: metalcore.pinv(A, 0.3),
    "pinv of tensors": lambda A: metalcore.pinv(A, rtol=torch.tensor([0.1, 0.5, 0.3], device=A.device)),
    "pinv hermitian": lambda A: metalcore.pinv(A @ A.mT, hermitian=True),
    "rank": lambda A: metalcore.matrix_rank(A),
    "rank rtol": lambda A: metalcore.matrix_rank(A, rtol=0.3),
    "rank atol": lambda A: metalcore.matrix_rank(A, atol=0.5),
    "rank of a tensor": lambda A: metalcore.matrix_rank(A, atol=torch.tensor(0.5, device=A.device)),
    "rank of tensors": lambda A: metalcore.matrix_rank(A, atol=torch.tensor([0.0, 0.5, 3.0], device=A.device)),
    "rank tol": lambda A: metalcore.matrix_rank(A, 0.5),
    "rank hermitian": lambda A: metalcore.matrix_rank(A @ A.mT, hermitian=True),
    "cond": lambda A: metalcore.cond(A),
    "lstsq": lambda A: metalcore.lstsq(A, A[..., :2]).solution,
}


def traced(call, A):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)  # sizes and options are part of the trace
        return torch.jit.trace(call, A, check_trace=False)


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_a_trace_is_right_for_other_matrices(device, name, gradient):
    call = CALLS[name]
    trace = traced(call, torch.randn(3, 5, 4, device=device).requires_grad_(gradient))
    low_rank = torch.randn(3, 5, 2) @ torch.randn(3, 2, 4)
    scaled = torch.randn(3, 5, 4) * torch.tensor([1.0, 0.01, 100.0])[:, None, None]
    for A in (low_rank, scaled, torch.zeros(3, 5, 4)) if "lstsq" not in name else (scaled,):
        A = A.to(device).requires_grad_(gradient)
        found, expected = trace(A), call(A)
        assert torch.equal(found.nan_to_num(-1), expected.nan_to_num(-1))
        if gradient and expected.requires_grad and "hermitian" not in name and A is not low_rank:
            ours, theirs = (torch.autograd.grad(value.sum(), A)[0] for value in (found, expected))
            torch.testing.assert_close(ours, theirs, equal_nan=True)
