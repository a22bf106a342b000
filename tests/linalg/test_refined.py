"""Refined linear algebra: backward errors against float64 and exact references, and what happens where it fails."""

import warnings

import mpmath
import pytest
import torch

from metalcore.double import Double
from metalcore.linalg import refined

BOUND = 1e-13
CONDITIONS = (1e0, 1e3, 1e5, 1e6)


def made(m, n, condition=1e3, batch=2, seed=0):
    """Matrices with singular values from 1 down to 1 / condition."""
    generator = torch.Generator().manual_seed(seed)
    k = min(m, n)
    u, v = (
        torch.linalg.qr(torch.randn(batch, size, k, generator=generator, dtype=torch.float64))[0] for size in (m, n)
    )
    return (u * float(condition) ** -torch.linspace(0, 1, k, dtype=torch.float64)) @ v.mT


def right(m, k, batch=2):
    return torch.randn(batch, m, k, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def norm(x):
    return torch.linalg.matrix_norm(x)


def check_system(A, X, B):
    size = A.abs().sum(-1).amax(-1)[..., None]
    assert ((B - A @ X).abs().amax(-2) <= BOUND * (size * X.abs().amax(-2) + B.abs().amax(-2))).all()


def orthogonal(Q):
    identity = torch.eye(Q.shape[-1], dtype=torch.float64)
    return (norm(identity - Q.mT @ Q) <= 1.1 * BOUND * Q.shape[-1] ** 0.5).all()  # and this product's roundings


@pytest.fixture(autouse=True)
def no_fallback():
    """Nothing but the tests of the fallback may take it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", refined.RefinementWarning)
        yield


@pytest.mark.parametrize("condition", CONDITIONS)
def test_systems(device, condition):
    A, B = made(30, 30, condition), right(30, 4)
    X, by_device = refined.solve(A, B, device=device, return_refined=True)
    assert by_device.all() and X.dtype == torch.float64
    check_system(A, X, B)
    check_system(A, refined.inv(A, device=device), torch.eye(30, dtype=torch.float64).expand(2, 30, 30))
    L = torch.linalg.cholesky(made(30, 30, condition**0.5) @ made(30, 30, condition**0.5).mT)
    for upper, factor in ((False, L), (True, L.mT)):
        check_system(L @ L.mT, refined.cholesky_solve(B, factor, upper, device=device), B)


@pytest.mark.parametrize("condition", CONDITIONS)
def test_least_squares(device, condition):
    A, B = made(40, 10, condition), right(40, 3)
    X = refined.lstsq(A, B, device=device)
    rest = B - A @ X
    size = norm(A)[:, None]
    most = torch.linalg.vector_norm(rest, dim=-2) + size * torch.linalg.vector_norm(X, dim=-2)
    assert (torch.linalg.vector_norm(A.mT @ rest, dim=-2) <= 2 * BOUND * size * most).all()
    exact = A @ right(10, 3)  # a residual of zero
    check_system(A, refined.lstsq(A, exact, device=device), exact)


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("m, n", [(30, 30), (50, 20), (20, 33)])
def test_factors(device, condition, m, n):
    A = made(m, n, condition)
    Q, R = refined.qr(A, device=device)
    assert orthogonal(Q) and (norm(A - Q @ R) <= 1.1 * BOUND * norm(A)).all() and (R.tril(-1) == 0).all()
    U, S, Vh = refined.svd(A, device=device)
    assert orthogonal(U) and orthogonal(Vh.mT) and (norm(A - U @ (S[..., None] * Vh)) <= 4 * BOUND * norm(A)).all()
    # By Weyl's theorem a value is off by the backward error, and both factors' loss of orthogonality.
    assert ((S - torch.linalg.svdvals(A)).abs() <= 3 * BOUND * norm(A)[:, None]).all() and (S.diff(dim=-1) <= 0).all()


@pytest.mark.parametrize("kind", ["random", "graded", "clusters", "identity", "zero", "one"])
def test_eigenvalues(device, kind):
    vectors = torch.linalg.qr(right(24, 24))[0]
    values = {
        "random": torch.randn(24, dtype=torch.float64, generator=torch.Generator().manual_seed(3)),
        "graded": torch.logspace(0, -14, 24, dtype=torch.float64),
        "clusters": torch.arange(24, dtype=torch.float64) // 8 + 1e-10 * torch.arange(24),
        "identity": torch.ones(24, dtype=torch.float64),
        "zero": torch.zeros(24, dtype=torch.float64),
        "one": torch.nn.functional.one_hot(torch.tensor(5), 24).double(),
    }[kind]
    A = (vectors * values) @ vectors.mT
    A = (A + A.mT) / 2
    L, X = refined.eigh(A, device=device)
    assert orthogonal(X) and (norm(A @ X - X * L[:, None]) <= 2 * BOUND * norm(A)).all()
    assert ((L - torch.linalg.eigvalsh(A)).abs() <= 3 * BOUND * norm(A)[:, None]).all() and (L.diff(dim=-1) >= 0).all()
    upper = refined.eigh(A.triu(), "U", device=device)[0]
    torch.testing.assert_close(upper, L, rtol=0, atol=4 * BOUND * float(norm(A).max()))
    U, S, Vh = refined.svd(A, device=device)
    assert orthogonal(U) and orthogonal(Vh.mT) and (norm(A - U @ (S[..., None] * Vh)) <= 4 * BOUND * norm(A)).all()


def exactly(function, *arguments):
    """A function of mpmath's of matrices, with 50 digits, as float64 tensors."""
    with mpmath.workdps(50):
        results = function(*(mpmath.matrix(x.tolist()) for x in arguments))
        results = results if isinstance(results, tuple) else (results,)
        return [torch.tensor([[float(x) for x in row] for row in r.tolist()], dtype=torch.float64) for r in results]


@pytest.mark.parametrize("condition", CONDITIONS)
def test_exact_references(device, condition):
    """A result is off by its backward error times the condition number."""
    n = 8
    A, B = made(n, n, condition, batch=1)[0], right(n, 2, batch=1)[0]
    tall = made(n + 4, n, condition, batch=1)[0]
    positive = A @ A.mT + A.abs().max() / condition * torch.eye(n, dtype=torch.float64)
    L = torch.linalg.cholesky(positive)
    bound = 4 * n * BOUND

    def close(found, wanted, size):
        assert (found - wanted).abs().max() <= bound * size * wanted.abs().max()

    def solution(a, b):
        return mpmath.inverse(a) * b

    close(refined.solve(A, B, device=device), *exactly(solution, A, B), condition)
    close(refined.inv(A, device=device), *exactly(mpmath.inverse, A), condition)
    (X,) = exactly(lambda a, b: solution(a.T * a, a.T * b), tall, torch.cat((B, B[:4])))
    close(refined.lstsq(tall, torch.cat((B, B[:4])), device=device), X, condition**2)
    (X,) = exactly(lambda factor, b: solution(factor * factor.T, b), L, B)
    close(refined.cholesky_solve(B, L, device=device), X, torch.linalg.cond(positive))
    values, _ = exactly(mpmath.eigsy, A + A.mT)
    close(refined.eigh(A + A.mT, device=device)[0], values[:, 0], 1)
    _, S, _ = exactly(lambda x: mpmath.svd_r(x, full_matrices=False), tall)
    close(refined.svd(tall, device=device)[1], S[:, 0], 1)
    Q, R = exactly(lambda x: mpmath.qr(x, mode="skinny"), tall)
    found = refined.qr(tall, device=device)
    signs = torch.sign(found[1].diagonal() * R.diagonal())
    close(found[0] * signs, Q, condition)
    close(found[1] * signs[:, None], R, 1)


def test_doubles_stay_on_the_device(device):
    a, b = made(20, 20), right(20, 2)
    A, B = Double(a, device), Double(b, device)
    X = refined.solve(A, B)
    assert isinstance(X, Double) and X.device.type == torch.device(device).type
    check_system(a, X.double(), b)
    L, V = refined.eigh(A + A.mT)
    assert orthogonal(V.double()) and L.shape == (2, 20)
    for factor in refined.svd(A):
        assert isinstance(factor, Double)


def test_scales_and_batches(device):
    """Powers of two bring magnitudes into float32's range; batches broadcast, and vectors are right sides."""
    A = made(12, 12, batch=3) * torch.tensor([1e-200, 1.0, 1e250], dtype=torch.float64)[:, None, None]
    B = right(12, 2)[0]
    X = refined.solve(A, B, device=device)
    assert X.shape == (3, 12, 2)
    check_system(A, X, B)
    assert refined.solve(A[0], B[:, 0], device=device).shape == (12,)
    L, _ = refined.eigh(A + A.mT, device=device)
    torch.testing.assert_close(L, torch.linalg.eigvalsh(A + A.mT), rtol=1e-10, atol=0)
    assert [part.shape for part in refined.qr(torch.ones(0, 3, 2, dtype=torch.float64), device=device)] == [
        (0, 3, 2),
        (0, 2, 2),
    ]


@pytest.mark.parametrize("name", ["solve", "inv", "lstsq", "qr", "eigh", "svd"])
def test_nan_stays_in_its_matrix(device, name):
    A = made(16, 16, batch=3)
    A = A + A.mT if name == "eigh" else A
    A[1, 3, 2] = torch.nan
    arguments = (A, right(16, 2, 3)) if name in ("solve", "lstsq") else (A,)
    *parts, by_device = refined.__dict__[name](*arguments, device=device, return_refined=True)
    assert by_device.tolist() == [True, False, True]
    parts = parts[0] if isinstance(parts[0], (tuple, list)) else parts
    for part in parts:
        assert part[1].isnan().all() and part[0].isfinite().all() and part[2].isfinite().all()


@pytest.mark.parametrize("name", ["solve", "lstsq", "qr"])
def test_lapack_takes_what_does_not_converge(device, name):
    A = torch.cat((made(20, 20, 1e3, 1), made(20, 20, 1e13, 1)))
    arguments = (A, A @ right(20, 2)) if name != "qr" else (A,)
    with pytest.warns(refined.RefinementWarning, match=rf"refined.{name}: 1 of 2 matrices did not converge; LAPACK"):
        *parts, by_device = refined.__dict__[name](*arguments, device=device, return_refined=True)
    assert by_device.tolist() == [True, False]
    if name == "qr":
        assert orthogonal(parts[0]) and (norm(A - parts[0] @ parts[1]) <= BOUND * norm(A)).all()
    else:
        check_system(A, parts[0], arguments[1])


def test_errors(device):
    A = torch.ones(3, 3, dtype=torch.float64)
    with pytest.raises(TypeError, match="refined.solve: A must be a float64 tensor on the CPU or a Double"):
        refined.solve(A.float(), A)
    with pytest.raises(TypeError, match="refined.solve: B must be a Double, as the first argument is"):
        refined.solve(Double(A, device), A)
    with pytest.raises(RuntimeError, match="refined.eigh: A must be square, not 2x3"):
        refined.eigh(A[:2], device=device)
    with pytest.raises(RuntimeError, match="refined.solve: B has 2 rows, and A has 3"):
        refined.solve(A, A[:2], device=device)
    with pytest.raises(RuntimeError, match="refined.lstsq: A must have at least as many rows"):
        refined.lstsq(A[:2], A[:2], device=device)
    warnings.simplefilter("ignore")
    with pytest.raises(torch.linalg.LinAlgError):
        refined.solve(torch.zeros(2, 2, dtype=torch.float64), A[:2, :1], device=device)
