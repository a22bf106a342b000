"""pinv as a replacement for torch.linalg.pinv: the Moore-Penrose conditions, tolerances, derivatives, errors."""

import pytest
import torch
from matrices import EPS, matrices, norm, symmetric, unit
from opinfo import check_samples
from spectral import same_error, well_separated

import metalcore


def condition(A, *_):
    return torch.linalg.cond(A.detach().double()).max().item() if A.numel() else 1.0


def without_tensors(A, args, kwargs):
    """The samples' tensors of tolerances would be differentiated, which torch refuses."""
    return not any(isinstance(value, torch.Tensor) for value in kwargs.values())


@pytest.mark.parametrize("shape", [(1, 1), (6, 6), (9, 4), (4, 9), (3, 2, 5, 7), (40, 70), (5, 64, 64)])
def test_conditions_of_moore_and_penrose(device, shape):
    A = well_separated(*shape)
    P = metalcore.pinv(A.to(device)).cpu().double()
    A, k = A.double(), min(shape[-2:])
    assert P.shape == A.mT.shape
    # The products' errors are those of P, k * n * eps, times the singular values of A, which are 1 to k.
    bound = 10 * max(8, *shape[-2:]) * EPS * k
    assert norm(A @ P @ A - A).max() <= bound * norm(A).max() and norm(P @ A @ P - P).max() <= bound * norm(P).max()
    assert norm((A @ P).mT - A @ P).max() <= bound * k**0.5 and norm((P @ A).mT - P @ A).max() <= bound * k**0.5


@pytest.mark.parametrize("m, n", [(12, 12), (20, 9), (9, 20)])
def test_of_hard_matrices(device, m, n):
    """The rank is clear: no singular value is near the tolerance."""
    told = 0
    for name, A in matrices(m, n).items():
        scaled, largest = unit(A)  # neither overflows in float64
        tolerance = max(m, n) * EPS
        most, least = (torch.linalg.matrix_rank(scaled, rtol=factor * tolerance) for factor in (0.1, 10))
        if most == least:
            P = metalcore.pinv(A.to(device)).cpu().double() * largest
            expected = torch.linalg.pinv(scaled, rtol=tolerance)
            size = torch.linalg.matrix_norm(expected, 2)
            assert norm(P - expected) <= 10 * tolerance * norm(scaled) * size**2, name
            told += 1
    assert told >= 8


def test_hermitian(device):
    for n in (5, 33):
        cases = symmetric(n)
        for name in ("random", "rank-deficient", "identity", "plus and minus one", "two clusters", "zero"):
            A = cases[name]
            lower = A + torch.triu(torch.randn(n, n), 1)  # only the lower triangle is read
            P = metalcore.pinv(lower.to(device), hermitian=True).cpu().double()
            expected = torch.linalg.pinv(A.double(), hermitian=True, rtol=n * EPS)
            size = torch.linalg.matrix_norm(expected, 2)
            assert norm(P - expected) <= 10 * max(8, n) * EPS * norm(A) * size**2, name


def test_is_the_namesake(device):
    assert metalcore.pinv is metalcore.linalg.pinv
    A = torch.diag(torch.tensor([4.0, 2, 1, 1e-9])).to(device)
    kept = lambda **kwargs: int((metalcore.pinv(A, **kwargs) != 0).sum())  # noqa: E731
    assert kept() == 3
    assert kept(rcond=0.3) == kept(rtol=0.3) == kept(rtol=torch.tensor(0.3, device=device)) == 2
    assert metalcore.pinv(A, 0.3, True).count_nonzero() == 2
    assert kept(atol=1.5) == kept(atol=torch.tensor(1.5, device=device)) == kept(atol=1.5, rtol=0.3) == 2
    assert kept(atol=1.5, rtol=0.6) == kept(atol=2.5, rtol=0.3) == 1
    assert kept(atol=1e-12) == 4 and kept(atol=0.0) == 3  # an atol above 0 takes rtol's default away
    assert kept(atol=torch.tensor(1e-12, device=device)) == 4 and kept(atol=torch.tensor(0.0, device=device)) == 3


def test_tolerances_for_each_matrix(device):
    A = torch.diag(torch.tensor([4.0, 2, 1])).expand(3, 3, 3).to(device)
    rtol = torch.tensor([0.1, 0.3, 0.6], device=device)
    assert metalcore.pinv(A, rtol=rtol).count_nonzero(dim=(1, 2)).tolist() == [3, 2, 1]
    assert metalcore.pinv(A, atol=rtol, rtol=rtol).count_nonzero(dim=(1, 2)).tolist() == [3, 2, 1]
    assert metalcore.pinv(A, atol=4 * rtol.half()).count_nonzero(dim=(1, 2)).tolist() == [3, 2, 1]
    # More tolerances than matrices.
    one = A[0].clone().requires_grad_()
    P = metalcore.pinv(one, rtol=rtol)
    assert torch.equal(P, metalcore.pinv(A, rtol=rtol))
    gradient = torch.autograd.grad(P.sum(), one)[0]
    each = [torch.autograd.grad(metalcore.pinv(one, rtol=r).sum(), one)[0] for r in rtol.tolist()]
    torch.testing.assert_close(gradient, sum(each))


@pytest.mark.parametrize(
    "call",
    [
        lambda linalg, device: linalg.pinv(torch.randn(3, device=device)),
        lambda linalg, device: linalg.pinv(torch.randn(3, 4, device=device), hermitian=True),
        lambda linalg, device: linalg.pinv(torch.ones(3, 3, dtype=torch.int32, device=device)),
        lambda linalg, device: linalg.pinv(torch.ones(3, 3, device=device), rtol=torch.tensor(1j).to(device)),
        lambda linalg, device: linalg.pinv(
            torch.ones(3, 3, device=device), out=torch.empty(0, dtype=torch.int32, device=device)
        ),
        lambda linalg, device: linalg.pinv(
            torch.ones(3, 3, device=device).requires_grad_(), out=torch.empty(0, device=device)
        ),
        lambda linalg, device: linalg.pinv(torch.ones(3, 3, device=device), rcond=0.1, atol=0.1),
        lambda linalg, device: linalg.pinv(torch.ones(3, 3, device=device), rtol="x"),
        lambda linalg, device: linalg.pinv(
            torch.ones(3, 3, device=device), rtol=torch.ones((), device=device).requires_grad_()
        ),
    ],
)
def test_errors_are_torchs(device, call):
    same_error(call, metalcore, torch.linalg, device)


def test_opinfo_samples(device):
    check_samples(metalcore.pinv, "linalg.pinv", device, torch.float32, select=without_tensors, condition=condition)


def test_opinfo_samples_of_hermitian(device):
    check_samples(metalcore.pinv, "linalg.pinv", device, torch.float32, variant="hermitian", condition=condition)


def test_opinfo_samples_of_singular(device):
    # These are products of two orthonormal factors: the condition number of their nonzero part is 1.
    check_samples(lambda a, b: metalcore.pinv(a @ b.mT), "linalg.pinv", device, torch.float32, variant="singular")


@pytest.mark.parametrize(
    "shape, rank", [((4, 4), 4), ((6, 3), 3), ((3, 6), 3), ((6, 5), 2), ((5, 6), 2), ((2, 4, 4), 1)]
)
def test_formula_is_torchs(device, shape, rank):
    """Factors keep the rank, as the derivative assumes; in float64 the formula is applied to torch's pseudoinverse."""
    from metalcore.linalg._rank import _gradient

    *batch, m, n = shape
    A = torch.randn(*batch, m, rank, dtype=torch.float64) @ torch.randn(*batch, rank, n, dtype=torch.float64)
    A.requires_grad_()
    P = torch.linalg.pinv(A)
    G = torch.randn(P.shape, dtype=torch.float64)
    expected = torch.autograd.grad(P, A, G)[0]
    torch.testing.assert_close(_gradient(A.detach(), P.detach(), G), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "call, same",
    [
        (("pinv", (5, 30, 20)), ("svd", (5, 30, 20), {"full_matrices": False})),
        (("pinv", (5, 20, 20), {"hermitian": True}), ("eigh", (5, 20, 20), {})),
        (("matrix_rank", (5, 20, 20), {"hermitian": True}), ("eigvalsh", (5, 20, 20), {})),
        (("matrix_rank", (30, 20)), ("svdvals", (30, 20), {})),
        (("cond", (30, 20)), ("svdvals", (30, 20), {})),
    ],
)
def test_explain_tells_of_the_decomposition(call, same):
    name, shape, *options = call
    plan = metalcore.explain(name, shape, **(options[0] if options else {}))
    expected = metalcore.explain(same[0], same[1], **same[2])
    assert plan.op == name and plan.kernels == expected.kernels and plan.why == expected.why
    assert ("values" in plan.kernels[0]) == (name != "pinv")


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(device, dynamic):
    torch.compiler.reset()

    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=dynamic)
    def compiled(A):
        return metalcore.pinv(A * 2) + 1

    A = torch.randn(3, 5, 4, device=device, requires_grad=True)
    expected = metalcore.pinv(A * 2) + 1
    found = compiled(A)
    assert torch.equal(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(result.sum(), A)[0] for result in (found, expected)))
