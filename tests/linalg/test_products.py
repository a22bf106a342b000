"""Compositions: matrix_power, multi_dot, vander, matrix_norm, tensorinv, tensorsolve, eigh with B, lobpcg."""

import pytest
import torch
from matrices import EPS, check_below
from opinfo import check_samples

import metalcore

norm = torch.linalg.matrix_norm
NAMES = ["matrix_power", "multi_dot", "vander", "matrix_norm", "tensorinv", "tensorsolve"]


@pytest.mark.parametrize("name", NAMES)
def test_as_pytorch_tests_it(device, name):
    conditions = {"matrix_power": 200.0, "tensorinv": 20.0, "tensorsolve": 20.0, "vander": 30.0}
    check_samples(
        getattr(metalcore, name),
        f"linalg.{name}",
        device,
        torch.float32,
        orders=1,
        condition=lambda *_: conditions.get(name, 1.0),
    )


@pytest.mark.parametrize("name", NAMES)
def test_16_bits_are_computed_in_float32(device, name):
    op = metalcore._core.registry.OPS[name]
    sample = op.smallest_sample()
    tensors = sample.make("cpu", torch.bfloat16)
    (found,) = op.compute(sample, [tensor.to(device) for tensor in tensors])
    (expected,) = op.compute(sample, [tensor.to(device).float() for tensor in tensors])
    assert found.dtype == torch.bfloat16 and torch.equal(found, expected.bfloat16())


@pytest.mark.parametrize("power", [-5, -1, 0, 1, 2, 7])
def test_powers(device, power):
    A = torch.randn(3, 8, 8) / 4 + torch.eye(8)
    found = metalcore.matrix_power(A.to(device), power).cpu()
    expected = torch.linalg.matrix_power(A.double(), power)
    # Each of up to seven products and the inverse adds n eps times the condition, which is below 30 each.
    assert norm(found - expected).amax() <= 8 * 30 * 8 * EPS * norm(expected).amax()


def test_norms(device):
    A = torch.randn(2, 5, 3, 4)
    for ord in (2, -2, "nuc", "fro", 1):
        for dim, keepdim in (((1, 3), True), ((-1, 0), False)):
            expected = torch.linalg.matrix_norm(A, ord, dim, keepdim)
            torch.testing.assert_close(metalcore.matrix_norm(A.to(device), ord, dim, keepdim).cpu(), expected)
    assert metalcore.matrix_norm(A.to(device), 2, dtype=torch.complex64).dtype == torch.float32


@pytest.mark.parametrize("is_complex", [False, True])
@pytest.mark.parametrize("n", [1, 5, 33])
@pytest.mark.parametrize("UPLO", ["L", "U"])
def test_generalized_eigenvalues(device, n, is_complex, UPLO):
    A, B = torch.randn(2, 3, n, n, dtype=torch.complex64 if is_complex else torch.float32)
    A, B = A + A.mH, B[:1] @ B[:1].mH / n + torch.eye(n)
    half = torch.tril if UPLO == "L" else torch.triu
    L, V = (x.cpu() for x in metalcore.eigh(half(A).to(device), UPLO, B=half(B).to(device)))
    cond = torch.linalg.cond(B).amax()
    residual = norm(A @ V - B @ V * L.unsqueeze(-2)) / (norm(A) * norm(V))
    check_below(residual, 10 * max(n, 8) * EPS * cond, "A V = B V L", "012")
    check_below(norm(V.mH @ B @ V - torch.eye(n)), 10 * max(n, 8) * EPS * cond, "VᴴB V = I", "012")
    assert (L.diff() >= 0).all()


def test_generalized_eigenvalues_of_bad_matrices_and_their_gradient(device):
    A, B = torch.eye(3, device=device).repeat(2, 1, 1), torch.eye(3, device=device).repeat(2, 1, 1)
    B[1, 2, 2] = -1
    L, V = metalcore.eigh(A, B=B)
    assert not L[0].isnan().any() and L[1].isnan().all() and V[1].isnan().all()
    with pytest.raises(RuntimeError, match=r"metalcore.eigh: A and B must be \(\*, n, n\), not .*\(2, 3\)"):
        metalcore.eigh(A, B=B[0, :2])
    with pytest.raises(TypeError, match="metalcore.eigh: B must be a tensor, not int"):
        metalcore.eigh(A, B=1)
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    a, b = a + a.mT, b @ b.mT + torch.eye(4)

    def values(a, b):
        L = torch.linalg.cholesky(b)
        C = torch.linalg.solve_triangular(L, torch.linalg.solve_triangular(L, a, upper=False).mT, upper=False)
        return torch.linalg.eigvalsh((C + C.mT) / 2)

    leaves = [x.to(device).requires_grad_() for x in (a, b)]
    wide = [x.double().requires_grad_() for x in (a, b)]
    weights = torch.arange(4.0)
    found = torch.autograd.grad(metalcore.eigh(leaves[0], B=leaves[1]).eigenvalues, leaves, weights.to(device))
    for ours, theirs in zip(found, torch.autograd.grad(values(*wide), wide, weights.double())):
        theirs = (theirs + theirs.mT) / 2
        torch.testing.assert_close(((ours + ours.mT) / 2).cpu().double(), theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("with_B", [True, False])
def test_lobpcg(device, largest, with_B):
    torch.manual_seed(0)
    A, B = torch.randn(2, 2, 40, 40)
    A, B = A + A.mT + torch.diag(torch.arange(40.0)), B @ B.mT / 40 + torch.eye(40)
    options = {"B": B.to(device)} if with_B else {}
    E, X = (x.cpu() for x in metalcore.lobpcg(A.to(device), 3, tol=1e-5, largest=largest, **options))
    wide_B = B.double() if with_B else torch.eye(40, dtype=torch.float64)
    values = torch.linalg.eigvals(torch.linalg.solve(wide_B, A.double())).real
    expected = values.sort(-1, descending=largest)[0][..., :3]
    torch.testing.assert_close(E.double(), expected, rtol=1e-4, atol=1e-4)
    residual = norm(A.double() @ X.double() - wide_B @ X.double() * E.unsqueeze(-2))
    assert (residual <= 2e-5 * 3 * (norm(A) + E.abs().amax(-1) * norm(wide_B)) * norm(X)).all()


def test_lobpcg_arguments(device):
    A = torch.diag(torch.arange(1.0, 31.0)).to(device)
    with pytest.raises(ValueError, match=r"A rows \(=8\) is smaller than 3 x"):
        metalcore.lobpcg(A[:8, :8], 3)
    exact = torch.eye(30, device=device)[:, -2:]
    E, X = metalcore.lobpcg(A, X=exact, niter=0)
    assert E.round().tolist() == [30.0, 29.0] and X.shape == (30, 2)
    preconditioned, _ = metalcore.lobpcg(A, 2, largest=False, iK=torch.diag(1 / A.diagonal()), tol=1e-5)
    assert preconditioned.cpu().round().tolist() == [1.0, 2.0]
