"""The derivatives of svd, svdvals, eigh, eigvalsh against PyTorch's, and the operators under PyTorch's tracing tools.

The formulas are tested in float64, through the operators' CPU kernels, whose singular vectors are PyTorch's except for
signs. On the device the tests look at values that do not depend on signs.
"""

import pytest
import torch
from matrices import EPS
from references import check_operator, derivatives
from spectral import unique_eigh, unique_svd, well_separated

import metalcore

SHAPES = [(4, 4), (6, 3), (3, 6), (2, 3, 5, 4), (1, 1), (1, 4), (4, 1), (3, 0), (0, 3), (0, 3, 2), (0, 0)]
svd, eigh = torch.ops.metalcore.svd, torch.ops.metalcore.eigh


def assert_same(actual, expected, tolerance, condition=1.0):
    """Each derivative divides by the gaps once more; the reference's own values show how large that makes things."""
    for order, (ours, theirs) in enumerate(zip(actual, expected, strict=True), 1):
        assert ours.shape == theirs.shape
        scale = max([1.0, *theirs.abs().flatten().tolist()])
        torch.testing.assert_close(
            ours.cpu().double(), theirs.double(), rtol=0, atol=tolerance * condition**order * scale
        )


@pytest.mark.parametrize("parts", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)])
@pytest.mark.parametrize("full_matrices", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_svd_formula_is_torchs(shape, full_matrices, parts):
    A = well_separated(*shape, dtype=torch.float64)
    ours = derivatives(lambda A: svd(A, full_matrices, True), [A], 2, parts)
    theirs = derivatives(lambda A: torch.linalg.svd(A, full_matrices), [A], 2, parts)
    assert_same(ours, theirs, tolerance=1e-11)


@pytest.mark.parametrize("parts", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("shape", [(4, 4), (2, 3, 5, 5), (1, 1), (0, 0), (2, 0, 0), (0, 3, 3)])
def test_eigh_formula_is_torchs(shape, parts):
    A = torch.randn(shape, dtype=torch.float64)
    for UPLO in "LU":
        ours = derivatives(lambda A: eigh(A, UPLO, True), [A], 2, parts)
        theirs = derivatives(lambda A: torch.linalg.eigh(A, UPLO), [A], 2, parts)
        assert_same(ours, theirs, tolerance=1e-11)


def test_gradcheck_of_the_formulas():
    for shape in [(4, 4), (5, 3), (3, 5), (2, 3, 4)]:
        A = well_separated(*shape, dtype=torch.float64).requires_grad_()
        for full_matrices in (False, True):
            unique = lambda A: unique_svd(svd(A, full_matrices, True))  # noqa: E731
            assert torch.autograd.gradcheck(unique, (A,)) and torch.autograd.gradgradcheck(unique, (A,))
    A = torch.randn(2, 4, 4, dtype=torch.float64, requires_grad=True)
    unique = lambda A: unique_eigh(eigh(A + A.mT, "U", True))  # noqa: E731
    assert torch.autograd.gradcheck(unique, (A,)) and torch.autograd.gradgradcheck(unique, (A,))


@pytest.mark.parametrize("shape", [(6, 6), (9, 5), (5, 9), (2, 3, 6, 6), (40, 6)])
def test_on_the_device(device, shape):
    A = well_separated(*shape)
    condition = min(shape[-2:])  # the largest singular value over the gaps
    tolerance = 10 * max(8, *shape[-2:]) * EPS
    for full_matrices in (True, False):
        ours = derivatives(lambda A: unique_svd(metalcore.svd(A, full_matrices)), [A.to(device)], 2, range(4))
        theirs = derivatives(lambda A: unique_svd(torch.linalg.svd(A, full_matrices)), [A.double()], 2, range(4))
        assert_same(ours, theirs, tolerance, condition)
    ours = derivatives(metalcore.svdvals, [A.to(device)], 2, [0])
    assert_same(ours, derivatives(torch.linalg.svdvals, [A.double()], 2, [0]), tolerance, condition)
    if shape[-1] == shape[-2]:
        A = A @ A.mT  # eigenvalues 1, 4, 9 …
        ours = derivatives(lambda A: unique_eigh(metalcore.eigh(A)), [A.to(device)], 2, range(2))
        theirs = derivatives(lambda A: unique_eigh(torch.linalg.eigh(A)), [A.double()], 2, range(2))
        assert_same(ours, theirs, tolerance, condition**2 / 3)
        ours = derivatives(metalcore.eigvalsh, [A.to(device)], 2, [0])
        assert_same(ours, derivatives(torch.linalg.eigvalsh, [A.double()], 2, [0]), tolerance, condition**2 / 3)


def test_gradients_of_parts_that_are_not_unique_are_constants(device):
    A = well_separated(5, 3).to(device).requires_grad_()
    U = metalcore.svd(A).U
    assert not torch.autograd.grad(U[:, 3:].sum(), A)[0].any()
    wide = A.detach().mT.requires_grad_()
    assert not torch.autograd.grad(metalcore.svd(wide).Vh[3:].sum(), wide)[0].any()


@pytest.mark.parametrize("scale", [2.0**-100, 2.0**100])
def test_no_square_overflows(device, scale):
    """For A times a power of two, U's derivative is A's divided by the power."""
    A = well_separated(6, 4)
    for parts in [(0,), (2,), (0, 2), (1,)]:
        expected = derivatives(lambda A: metalcore.svd(A, False), [A.to(device)], 1, parts)[0]
        found = derivatives(lambda A: metalcore.svd(A, False), [(A * scale).to(device)], 1, parts)[0]
        found = found if parts == (1,) else found * scale
        assert_same([found], [expected.cpu()], 10 * 8 * EPS, 4)


@pytest.mark.parametrize("parts", [(0,), (1,), (2,), (0, 1, 2)])
@pytest.mark.parametrize("values", [(1, 1, 1), (3, 2, 2), (2, 1, 0), (2, 0, 0), (0, 0, 0)])
@pytest.mark.parametrize("rows", [3, 5])
def test_repeated_singular_values(rows, values, parts):
    """Derivatives are infinite or NaN where PyTorch's are, and finite where those are: S's always are."""
    A = torch.zeros(rows, 3, dtype=torch.float64)
    A.diagonal().copy_(torch.tensor(values))
    ours = derivatives(lambda A: svd(A, False, True), [A], 1, parts)[0]
    theirs = derivatives(lambda A: torch.linalg.svd(A, False), [A], 1, parts)[0]
    assert torch.equal(ours.isfinite(), theirs.isfinite())
    assert ours.isfinite().all() or parts != (1,)
    torch.testing.assert_close(ours[ours.isfinite()], theirs[theirs.isfinite()])


@pytest.mark.parametrize("parts", [(0,), (1,)])
def test_repeated_eigenvalues(parts):
    A = torch.diag(torch.tensor([2.0, 1, 1, 0], dtype=torch.float64))
    ours = derivatives(lambda A: eigh(A, "L", True), [A], 1, parts)[0]
    theirs = derivatives(torch.linalg.eigh, [A], 1, parts)[0]
    assert torch.equal(ours.isfinite(), theirs.isfinite())
    assert ours.isfinite().all() == (parts == (0,))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_has_gradients(device, dtype):
    A = well_separated(5, 4).to(dtype)
    tolerance = 10 * 8 * torch.finfo(dtype).eps
    for ours, theirs in [
        (metalcore.svdvals, torch.linalg.svdvals),
        (lambda A: metalcore.svd(A, False), lambda A: torch.linalg.svd(A, False)),
        (lambda A: metalcore.eigvalsh(A.mT @ A), lambda A: torch.linalg.eigvalsh(A.mT @ A)),
    ]:
        part = [1] if len(ours(A.to(device))) == 3 else [0]
        found = derivatives(ours, [A.to(device)], 1, part)
        assert found[0].dtype == dtype
        assert_same(found, derivatives(theirs, [A.double()], 1, part), tolerance, 4**2)


def test_values_alone_compute_no_vectors(device):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function in (svd.default, eigh.default):
                seen.append(args[-1])
            return function(*args, **(kwargs or {}))

    A, seen = torch.randn(3, 3, device=device), []
    with Calls():
        metalcore.svdvals(A), metalcore.eigvalsh(A)
        metalcore.svdvals(A.requires_grad_()), metalcore.eigvalsh(A)
        with torch.no_grad():
            metalcore.svdvals(A), metalcore.eigvalsh(A)
        metalcore.matrix_rank(A), metalcore.matrix_rank(A, hermitian=True)
    assert seen == [False, False, True, True, False, False, False, False]


def test_operators_without_vectors_have_no_derivative(device):
    A = torch.randn(3, 3, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match="use compute_uv=True"):
        svd(A, False, False)[1].sum().backward()
    with pytest.raises(RuntimeError, match="use compute_v=True"):
        eigh(A, "L", False)[0].sum().backward()


@pytest.mark.parametrize(
    "where, shape", [("cpu", (2, 3, 3)), ("device", (4, 3)), ("device", (2, 3, 3)), ("device", (2, 0, 0))]
)
def test_opcheck(device, where, shape):
    A = torch.randn(shape, device=device if where == "device" else "cpu")
    for full_matrices in (True, False):
        check_operator(svd, A.clone().requires_grad_(), full_matrices, True)
    check_operator(svd, A, False, False)
    if shape[-1] == shape[-2]:
        for UPLO in "LU":
            check_operator(eigh, A.clone().requires_grad_(), UPLO, True)
            check_operator(eigh, A, UPLO, False)


@pytest.mark.parametrize(
    "name, function",
    [
        ("svd", lambda A: metalcore.svd(A, False)),
        ("svd, all of U", lambda A: metalcore.svd(A)),
        ("svdvals", lambda A: (metalcore.svdvals(A),)),
        ("eigh", lambda A: metalcore.eigh(A @ A.mT)),
        ("eigvalsh", lambda A: (metalcore.eigvalsh(A @ A.mT, "U"),)),
    ],
)
def test_compile(device, name, function):
    torch.compiler.reset()  # what it compiled for the other functions counts against this one

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(A):
        return tuple(result + 1 for result in function(A * 2))

    A = torch.randn(3, 5, 4, device=device, requires_grad=True)
    expected = [result + 1 for result in function(A * 2)]
    with torch.no_grad():
        assert [x.shape for x in compiled(A)] == [x.shape for x in expected]
    found = compiled(A)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
    values = {"svd": 1, "svd, all of U": 1}.get(name, 0)
    torch.testing.assert_close(*(torch.autograd.grad(results[values].sum(), A)[0] for results in (found, expected)))


ORTHOGONAL = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))[0]
REPEATED = torch.tensor([3.0, 3.0, 3.0, 1.0, 1.0, 1.0], dtype=torch.float64)
WEIGHTS = torch.linspace(-1, 1, 36, dtype=torch.float64).view(6, 6)


def tall():
    """A 6x4 matrix with two singular values of 2 and two of 1."""
    return ORTHOGONAL[:, :4] * torch.tensor([2.0, 2.0, 1.0, 1.0], dtype=torch.float64) @ ORTHOGONAL[:4, :4].T


def symmetric():
    return ORTHOGONAL * REPEATED @ ORTHOGONAL.T


def by_svd(A, weights, broadening):
    """It depends on the space of the larger singular values only, and on its share of A."""
    U, S, Vh = metalcore.svd(A, full_matrices=False, broadening=broadening)
    return (weights[: A.shape[-2], : A.shape[-2]] * (U[..., :2] @ U[..., :2].mT)).sum() + (
        weights[:4, :4] * (Vh[..., :2, :].mT @ (S[..., :2, None] * Vh[..., :2, :]))
    ).sum()


def by_eigh(A, weights, broadening):
    L, V = metalcore.eigh((A + A.mT) / 2, broadening=broadening)
    return (weights * (V[..., :3] @ (L[..., :3].sum() * V[..., :3]).mT)).sum()


@pytest.mark.parametrize("call, matrix", [(by_svd, tall), (by_eigh, symmetric)])
def test_functions_of_invariant_spaces(device, call, matrix):
    """A broadening of b changes the factor of a gap g by (b * largest / g)² of it: 9e-12 at most here."""
    A = matrix().requires_grad_()
    assert torch.autograd.gradcheck(lambda A: call(A, WEIGHTS, 1e-6), (A,), atol=1e-6, rtol=1e-6)
    (expected,) = torch.autograd.grad(call(A, WEIGHTS, 1e-6), A)
    ours = A.detach().float().to(device).requires_grad_()
    (found,) = torch.autograd.grad(call(ours, WEIGHTS.float().to(device), 1e-4), ours)
    # (1e-4 * 3)² of broadening, and rounding of n eps over the gap of 1, for terms of up to 20.
    torch.testing.assert_close(found.cpu().double(), expected, rtol=0, atol=20 * (9e-8 + 6 * 6e-8))


@pytest.mark.parametrize(
    "A",
    [
        torch.eye(4),
        torch.zeros(4, 4),
        torch.zeros(6, 4),
        torch.ones(4, 6),
        torch.eye(6)[:, :3] * 1e30,
        torch.eye(4) * 1e-30,
    ],
    ids=["identity", "zeros", "tall zeros", "rank one", "large", "small"],
)
def test_no_derivative_overflows(device, A):
    """Without broadening all of them have NaN, infinity or nearly so. The bound: each factor is at most 1 / 2d."""
    for call in (metalcore.svd, metalcore.eigh)[: 1 + (A.shape[-2] == A.shape[-1])]:
        results = []
        for options in ({}, {"broadening": 1e-3}):
            B = A.to(device).requires_grad_()
            parts = call(B, **({"full_matrices": False} if call is metalcore.svd else {}), **options)
            # Weights, so that no term cancels.
            loss = sum(
                (part * torch.arange(1.0, part.numel() + 1, device=device).view(part.shape)).sum() for part in parts
            )
            results.append(torch.autograd.grad(loss, B)[0].cpu())
        largest = torch.linalg.matrix_norm(A.double(), 2).item() or 1.0
        assert results[1].isfinite().all()
        assert results[1].double().abs().max().item() <= 1e3 / largest * 24**2 * 6 + 24
        assert not (results[0].abs() < 1e30).all()  # a GPU's rounding errors may lie between equal values


def test_second_derivatives_and_16_bits(device):
    A = torch.eye(4, device=device).requires_grad_()
    (first,) = torch.autograd.grad(metalcore.svd(A, broadening=0.1).U.square().sum(), A, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum() + first.sum(), A)
    assert second.isfinite().all()
    half = torch.eye(4, device=device, dtype=torch.bfloat16).requires_grad_()
    (gradient,) = torch.autograd.grad(metalcore.eigh(half, broadening=0.1).eigenvectors.float().exp().sum(), half)
    assert gradient.dtype == torch.bfloat16 and gradient.isfinite().all()


def test_without_repeated_values_it_is_pytorchs_derivative(device):
    A = torch.randn(3, 5, 4, dtype=torch.float64)
    A = A + 3 * torch.eye(5, 4)
    expected = torch.autograd.grad(by_svd(A.requires_grad_(), WEIGHTS, 0.0), A)[0]
    found = torch.autograd.grad(by_svd(A, WEIGHTS, 1e-9), A)[0]
    torch.testing.assert_close(found, expected)
    assert not metalcore.svd(A.detach().float().to(device), broadening=1e-3).S.requires_grad


@pytest.mark.parametrize("call", [metalcore.svd, metalcore.eigh])
def test_errors(device, call):
    A = torch.eye(3, device=device)
    for wrong in (-1.0, float("inf"), float("nan"), True, "1"):
        with pytest.raises(ValueError, match=f"metalcore.{call.__name__}: broadening must be a finite number"):
            call(A, broadening=wrong)
    with pytest.raises(ValueError, match="broadening is for real matrices, and A is torch.complex64"):
        call(torch.eye(3, dtype=torch.complex64), broadening=0.1)
