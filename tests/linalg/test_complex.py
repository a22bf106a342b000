"""complex64 matrices: the bounds of real ones, PyTorch's gradients, and what goes to PyTorch's op."""

import pytest
import torch
from matrices import EPS, check_below, matrices, positive_definite, symmetric
from references import derivatives
from rows import tuned

import metalcore

WIDE = torch.complex128


def phases(n):
    return torch.polar(torch.ones(n), 6.28 * torch.rand(n))


def turned(named, Hermitian=False):
    """The matrices with rows and columns times numbers of magnitude one, which change no singular value. Hermitian
    matrices stay so."""
    result = {}
    for name, A in named.items():
        rows = phases(A.shape[-2])
        result[name] = A * rows[:, None] * (rows.conj() if Hermitian else phases(A.shape[-1]))
    return torch.stack(list(result.values())), list(result)


def hard(named, n):
    """All of the matrices, or some of large ones."""
    return named if n <= 17 else {name: named[name] for name in list(named)[:: len(named) // 3]}


def norm(x):
    return torch.linalg.matrix_norm(x)


def unit(A):
    """A in complex128, each matrix divided by its largest magnitude, and these magnitudes."""
    largest = A.to(WIDE).abs().amax((-2, -1), keepdim=True).clamp(min=1e-300)
    return A.to(WIDE) / largest, largest


def size_of(A):
    return norm(A).clamp(min=1e-300)


def check_unitary(Q, bound, what, names):
    check_below(norm(Q.mH @ Q - torch.eye(Q.shape[-1])), bound, what, names)


QR = {
    "simd": [(1, 1), (2, 3), (8, 8), (9, 5), (17, 16), (32, 32)],
    "block": [(33, 32), (40, 64), (65, 65), (128, 20), (257, 32), (1024, 16)],
}


@pytest.mark.parametrize("variant, m, n", [(variant, *shape) for variant, shapes in QR.items() for shape in shapes])
def test_qr(device, variant, m, n):
    A, names = turned(hard(matrices(m, n), max(m, n)))
    bound = 10 * max(m, n) * EPS
    with tuned("baseline"):
        assert metalcore.explain("qr", A.to(device)).variant == variant
        Q, R = (x.cpu().to(WIDE) for x in metalcore.qr(A.to(device)))
        packed, tau = metalcore.geqrf(A.to(device))
        product = metalcore.householder_product(packed[..., : min(m, n)], tau)
    a, largest = unit(A)
    assert not R.tril(-1).any() and not R.diagonal(dim1=-2, dim2=-1).imag.any()
    check_unitary(Q, bound, "QᴴQ = I", names)
    check_below(norm(a - Q @ R / largest) / size_of(a), bound, "A = QR", names)
    # geqrf has the same R and reflectors, and householder_product forms the same Q.
    assert torch.equal(packed.cpu().triu()[..., : min(m, n), :].to(WIDE), R)
    assert torch.equal(product.cpu().to(WIDE), Q)


def test_qr_modes_and_signs_are_lapacks(device):
    A = torch.randn(3, 20, 7, dtype=torch.complex64)
    expected = torch.linalg.qr(A.to(WIDE), "complete")
    Q, R = (x.cpu() for x in metalcore.qr(A.to(device), "complete"))
    none, only_R = metalcore.qr(A.to(device), "r")
    assert none.shape == (0,) and torch.equal(only_R.cpu(), R[:, :7])
    torch.testing.assert_close(R.to(WIDE), expected.R, rtol=0, atol=1e-4)
    torch.testing.assert_close(Q[..., :7].to(WIDE), expected.Q[..., :7], rtol=0, atol=1e-4)
    check_unitary(Q.to(WIDE), 200 * EPS, "QᴴQ = I", ["random"] * 3)


SVD = {
    "simd": [(1, 1), (3, 5), (8, 8), (16, 9), (16, 16)],
    "block": [(17, 3), (32, 32), (33, 20), (20, 40), (64, 64), (100, 40), (90, 5), (65, 65), (70, 90), (128, 128)],
}


@pytest.mark.parametrize("variant, m, n", [(variant, *shape) for variant, shapes in SVD.items() for shape in shapes])
def test_svd(device, variant, m, n):
    A, names = turned(hard(matrices(m, n), max(m, n)))
    full = max(m, n) < 40
    with tuned("baseline"):
        assert metalcore.explain("svd", A.to(device), full_matrices=full).variant in (variant, "simd")
        U, S, Vh = (x.cpu() for x in metalcore.svd(A.to(device), full))
        values = metalcore.svdvals(A.to(device)).cpu()
    bound, k = 10 * max(8, m, n) * EPS, min(m, n)
    a, largest = unit(A)
    U, Vh, S = U.to(WIDE), Vh.to(WIDE), S.double() / largest[..., 0]
    assert values.dtype == torch.float32 and U.shape[-1] == (m if full else k)
    check_unitary(U, bound, "UᴴU = I", names)
    check_unitary(Vh.mH, bound, "VᴴV = I", names)
    check_below(norm(a - (U[..., :k] * S[..., None, :]) @ Vh[..., :k, :]) / size_of(a), bound, "A = U S Vᴴ", names)
    expected = torch.linalg.svdvals(a)
    for found in (S, values.double() / largest[..., 0]):
        errors = (found - expected).abs().amax(-1) / expected.amax(-1).clamp(min=1e-300)
        check_below(errors, bound / 2, "the values", names)


EIGH = [
    *(("simd", n, 1) for n in (1, 8, 9, 16)),
    *(("block", n, 1) for n in (17, 33, 65, 128)),
    *(("tridiagonal", n, 1) for n in (129, 130)),
    # A simdgroup takes matrices of 17 to 32 rows where there are many.
    *(("block", 17, 400), ("simd", 17, 401), ("simd", 32, 401)),
]


@pytest.mark.parametrize("variant, n, least", EIGH)
@pytest.mark.parametrize("UPLO", "LU")
def test_eigh(device, variant, n, least, UPLO):
    A, names = turned(hard(symmetric(n), n), Hermitian=True)
    copies = -(-least // len(A))
    A, names = A.repeat(copies, 1, 1)[: max(least, len(A))], (names * copies)[: max(least, len(A))]
    given = (A.tril() if UPLO == "L" else A.triu()) + torch.diag(torch.full((n,), 1j))  # which nothing reads
    with tuned("baseline"):
        assert metalcore.explain("eigh", A.to(device)).variant == variant
        L, V = (x.cpu() for x in metalcore.eigh(given.to(device), UPLO))
        values = metalcore.eigvalsh(given.to(device), UPLO).cpu()
    bound = 10 * max(8, n) * EPS
    a, largest = unit(A)
    V, L = V.to(WIDE), L.double() / largest[..., 0]
    check_unitary(V, bound, "VᴴV = I", names)
    check_below(norm(a @ V - V * L[..., None, :]) / size_of(a), bound, "A V = V L", names)
    expected = torch.linalg.eigvalsh((a + a.mH) / 2)
    for found in (L, values.double() / largest[..., 0]):
        errors = (found - expected).abs().amax(-1) / expected.abs().amax(-1).clamp(min=1e-300)
        check_below(errors, bound / 2, "the values", names)


@pytest.mark.parametrize("variant, n", [*(("simd", n) for n in (1, 4, 9, 32)), *(("block", n) for n in (33, 65, 128))])
@pytest.mark.parametrize("upper", [False, True])
def test_cholesky(device, variant, n, upper):
    A, names = turned(hard(positive_definite(n), n), Hermitian=True)
    B = torch.randn(len(A), n, 3, dtype=A.dtype)
    with tuned("baseline"):
        assert metalcore.explain("cholesky", A.to(device)).variant == variant
        L, info = metalcore.cholesky_ex((A.triu() if upper else A.tril()).to(device), upper=upper)
        X = metalcore.cholesky_solve(B.to(device), L, upper).cpu().to(WIDE)
    L = L.cpu().to(WIDE)
    F = L.mH if upper else L
    assert not info.any() and not F.triu(1).any() and (F.diagonal(dim1=-2, dim2=-1).real > 0).all()
    root = A.to(WIDE).diagonal(dim1=-2, dim2=-1).real.sqrt()
    scaled = F / root[..., None]
    residual = scaled @ scaled.mH - A.to(WIDE) / root[..., None] / root[..., None, :]
    check_below(residual.abs().amax((-2, -1)), 10 * n * EPS, "A = L Lᴴ", names)
    a, largest = unit(A)
    errors = norm((F / largest.sqrt()) @ ((F.mH / largest.sqrt()) @ (X * largest)) - B)
    check_below(errors / (norm(a) * norm(X * largest) + norm(B)), 10 * n * EPS, "L Lᴴ X = B", names)


def test_cholesky_tells_what_is_not_positive(device):
    A = torch.eye(40, dtype=torch.complex64).repeat(3, 1, 1)
    A[1, 35, 35], A[2, 2, 2] = -1, float("nan")
    L, info = metalcore.cholesky_ex(A.to(device))
    assert info.tolist() == [0, 36, 3] and torch.equal(L[0].cpu(), A[0])
    with pytest.raises(torch.linalg.LinAlgError, match="leading minor of order 36"):
        metalcore.cholesky(A[:2].to(device))


@pytest.mark.parametrize("n", [1, 8, 16, 17, 32, 33, 70])
@pytest.mark.parametrize("columns", [1, 9, 33])
def test_triangular_systems(device, n, columns):
    A = torch.randn(2, n, n, dtype=torch.complex64) / n**0.5 / 2 + (1 + 0.5j) * torch.eye(n)
    for left, upper, unit in ((True, False, False), (True, True, True), (False, False, True), (False, True, False)):
        B = torch.randn(2, n, columns, dtype=A.dtype)
        B = B if left else B.mT
        options = {"upper": upper, "left": left, "unitriangular": unit}
        X = metalcore.solve_triangular(A.to(device), B.to(device), **options).cpu().to(WIDE)
        T = (A.triu() if upper else A.tril()).to(WIDE)
        T = T - torch.diag_embed(T.diagonal(dim1=-2, dim2=-1) - 1) if unit else T
        errors = norm((T @ X if left else X @ T) - B) / norm(T) / norm(X)
        check_below(errors, 10 * n * EPS, "A X = B", [options] * 2)


LU = {"simd": [(1, 1), (2, 3), (8, 8), (9, 16), (17, 32), (32, 32)], "block": [(33, 20), (65, 65), (128, 128)]}


@pytest.mark.parametrize("variant, m, n", [(variant, *shape) for variant, shapes in LU.items() for shape in shapes])
@pytest.mark.parametrize("pivot", [True, False])
def test_lu(device, variant, m, n, pivot):
    named = hard(matrices(m, n), max(m, n)) if pivot else {"dominant": torch.randn(m, n) / m + torch.eye(m, n)}
    A, names = turned(named, Hermitian=not pivot and m == n)
    with tuned("baseline"):
        assert metalcore.explain("lu_factor", A.to(device)).variant == variant
        packed, pivots, info = metalcore.lu_factor_ex(A.to(device), pivot=pivot)
        P, L, U = (x.cpu().to(WIDE) for x in metalcore.lu(A.to(device), pivot=pivot))
    k = min(m, n)
    packed = packed.cpu().to(WIDE)
    assert torch.equal(packed.triu()[..., :k, :], U) and torch.equal(packed.tril(-1)[..., :k], L.tril(-1))
    a, largest = unit(A)
    product = L @ (U / largest)
    check_below(norm(a - (P @ product if pivot else product)) / size_of(a), 10 * max(m, n) * EPS, "A = P L U", names)
    if pivot:  # |re| + |im| chooses the pivot
        assert (L.abs() <= 2**0.5 * (1 + 8 * EPS)).all()
        zeros = U.diagonal(dim1=-2, dim2=-1) == 0
        first = torch.where(zeros.any(-1), zeros.int().argmax(-1) + 1, 0)
        assert torch.equal(info.cpu().long(), first)
        assert ((pivots.cpu() > torch.arange(k)) & (pivots.cpu() <= m)).all()


@pytest.mark.parametrize("n", [1, 3, 8, 16, 20, 33, 70])
@pytest.mark.parametrize("left", [True, False])
def test_solutions(device, n, left):
    A = torch.randn(3, n, n, dtype=torch.complex64) + 2 * torch.eye(n)
    B = torch.randn(3, n, 18, dtype=A.dtype)
    B = B if left else B.mT
    wide, a, b = A.to(WIDE), A.to(device), B.to(device)

    def check(X, A, what):
        X = X.cpu().to(WIDE)
        errors = norm((A @ X if left else X @ A) - B) / (norm(A) * norm(X) + norm(B))
        check_below(errors, 10 * n * EPS, what, ["random"] * 3)

    X, info = metalcore.solve_ex(a, b, left=left)
    assert not info.any()
    check(X, wide, "A X = B")
    factors = metalcore.lu_factor(a)
    check(metalcore.lu_solve(*factors, b, left=left), wide, "A X = B from factors")
    check(metalcore.lu_solve(*factors, b, left=left, adjoint=True), wide.mH, "Aᴴ X = B")
    if left:
        inverse = metalcore.inv(a).cpu().to(WIDE)
        condition = norm(wide) * norm(inverse)
        check_below(norm(wide @ inverse - torch.eye(n)) / condition, 10 * n * EPS, "A A⁻¹ = I", ["random"] * 3)
        expected = torch.linalg.slogdet(wide)
        sign, logarithm = (x.cpu() for x in metalcore.slogdet(a))
        bound = float(10 * n * EPS * torch.linalg.cond(wide).max())
        torch.testing.assert_close(sign.to(WIDE), expected.sign, rtol=0, atol=bound)
        torch.testing.assert_close(logarithm.double(), expected.logabsdet, rtol=0, atol=bound)
        wide = wide[..., :20, :20]  # a larger one's determinant leaves float32's range
        bound = float(10 * n * EPS * torch.linalg.cond(wide).max())
        found, expected = metalcore.det(a[..., :20, :20]).cpu().to(WIDE), torch.linalg.det(wide)
        assert ((found - expected).abs() <= bound * expected.abs()).all()


def test_determinants_out_of_range(device):
    A = torch.diag_embed(torch.tensor([[1e30j, 1e30, 1e-30, 1e-30j], [1e30, 1e30, 1, 1], [1, 2, 0, 3]]))
    found = metalcore.det(A.to(torch.complex64).to(device)).cpu()
    torch.testing.assert_close(found[0], torch.tensor(-1 + 0j), rtol=1e-5, atol=1e-5)
    assert found[1].real.isinf() and found[2] == 0
    sign, logarithm = metalcore.slogdet(A.to(torch.complex64).to(device))
    assert sign[2].item() == 0 and logarithm[2].item() == -float("inf")


CALLS = {
    "qr": lambda m, A: m.qr(A),
    "svd": lambda m, A: m.svd(A, full_matrices=False),
    "eigh": lambda m, A: m.eigh(A + A.mH),
    "cholesky_ex": lambda m, A: m.cholesky_ex(A @ A.mH)[:1],
    "lu_factor_ex": lambda m, A: m.lu_factor_ex(A)[:1],
    "inv_ex": lambda m, A: m.inv_ex(A)[:1],
    "solve_ex": lambda m, A: m.solve_ex(A, A[..., :2])[:1],
    "det": lambda m, A: (m.det(A),),
}


@pytest.mark.parametrize("n", [5, 20, 40])
@pytest.mark.parametrize("name", CALLS)
def test_a_bad_matrix_spoils_its_own_batch_entry_only(device, name, n):
    A = torch.randn(3, n, n, dtype=torch.complex64)
    good = CALLS[name](metalcore, A.to(device))
    A[1, n - 1, 0] = complex(1, float("nan"))
    for bad, expected in zip(CALLS[name](metalcore, A.to(device)), good):
        assert torch.equal(bad[::2], expected[::2]) and not bad[1].isfinite().all()


@pytest.mark.parametrize("name", CALLS)
def test_strides_and_sizes(device, name):
    A = torch.randn(3, 7, 12, 12, dtype=torch.complex64)
    whole = CALLS[name](metalcore, A.to(device))
    other = CALLS[name](metalcore, A.to(device).mT.contiguous().mT[1:, 2])
    for one, expected in zip(other, whole):
        assert torch.equal(one, expected[1:, 2]) and one.is_contiguous()
    conjugate = CALLS[name](metalcore, A.to(device).conj())
    resolved = CALLS[name](metalcore, A.to(device).conj().resolve_conj())
    assert all(torch.equal(x, y) for x, y in zip(conjugate, resolved))
    for shape in ((0, 3, 3), (2, 0, 0)):
        for found, expected in zip(
            CALLS[name](metalcore, torch.empty(shape, dtype=A.dtype, device=device)),
            CALLS[name](torch.linalg, torch.empty(shape, dtype=A.dtype)),
        ):
            assert found.shape == expected.shape and found.dtype == expected.dtype


def _spaces(m, A):
    """What does not depend on phases."""
    U, S, Vh = m.svd(A, full_matrices=False)
    L, V = m.eigh(A[..., :5, :] + A[..., :5, :].mH)
    phaseless = torch.sin(torch.arange(5.0, device=A.device))
    return S, U @ (phaseless[:, None] * Vh), V @ (phaseless[:, None] * V.mH), L


def _reflected(m, A):
    """Products with Q and Qᴴ from both sides. PyTorch's are made of a square matrix of reflectors."""
    reflectors, tau = A / 8, A[..., 0, :] / 8 + 1
    if m is metalcore:
        return m.ormqr(reflectors, tau, A), m.ormqr(reflectors, tau, A.mT, left=False, transpose=True)
    whole = torch.nn.functional.pad(reflectors, (0, 2))
    Q = m.householder_product(whole, torch.nn.functional.pad(tau, (0, 2)))
    return Q @ A, A.mT @ Q.mH


GRADIENTS = {
    "qr": (lambda m, A: m.qr(A), (7, 5)),
    "qr, wide": (lambda m, A: m.qr(A), (5, 7)),
    "spaces": (_spaces, (7, 5)),
    "cholesky": (lambda m, A: m.cholesky(A @ A.mH + 4 * torch.eye(5, device=A.device)), (5, 5)),
    "cholesky_solve": (lambda m, A: (torch if m is torch.linalg else m).cholesky_solve(A[..., :2], A.tril()), (5, 5)),
    "solve_triangular": (lambda m, A: m.solve_triangular(A.triu(), A[..., :2].mT, upper=True, left=False), (5, 5)),
    "lu": (lambda m, A: m.lu(A)[1:], (7, 5)),
    "lu_solve": (lambda m, A: m.lu_solve(*m.lu_factor(A), A[..., :2], adjoint=True), (5, 5)),
    "solve": (lambda m, A: m.solve(A, A[..., :2] * A[..., 1:3]), (5, 5)),
    "solve, from the right": (lambda m, A: m.solve(A, A[..., :2, :] * A[..., 1:3, :], left=False), (40, 40)),
    "inv": (lambda m, A: m.inv(A), (5, 5)),
    "det": (lambda m, A: m.det(A), (5, 5)),
    "slogdet": (lambda m, A: m.slogdet(A), (5, 5)),
    "householder_product": (lambda m, A: m.householder_product(A / 8, A[..., 0, :] / 8 + 1), (7, 5)),
    "lstsq": (lambda m, A: m.lstsq(A, A[..., :2] * A[..., 1:3])[:1], (7, 5)),
    "lstsq, wide": (lambda m, A: m.lstsq(A, A[..., :2] * A[..., 1:3])[:1], (5, 7)),
    "pinv": (lambda m, A: m.pinv(A), (7, 5)),
    "pinv, wide": (lambda m, A: m.pinv(A), (5, 7)),
    "pinv, Hermitian": (lambda m, A: m.pinv(A + A.mH, hermitian=True), (5, 5)),
    "cond": (lambda m, A: m.cond(A), (7, 5)),
    "cond, by the inverse": (
        lambda m, A: m.matrix_norm(A, 1) * m.matrix_norm(m.inv(A), 1) if m is torch.linalg else m.cond(A, 1),
        (5, 5),
    ),
    "ormqr": (_reflected, (7, 5)),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_pytorchs(device, name):
    function, shape = GRADIENTS[name]
    generator = torch.Generator().manual_seed(3)
    A = torch.randn(2, *shape, dtype=WIDE, generator=generator) / 4 + 3 * torch.eye(*shape)
    A = A + torch.diag(torch.arange(shape[1]))[: shape[0]] if shape[0] <= 7 and shape[1] == 5 and shape[0] == 5 else A
    orders = 1 if name in ("spaces", "householder_product", "lstsq, wide") else 2
    found = derivatives(lambda A: function(metalcore, A), [A.to(torch.complex64).to(device)], orders)
    expected = derivatives(lambda A: function(torch.linalg, A), [A], orders)
    for ours, theirs in zip(found, expected, strict=True):
        error = (ours.cpu().to(WIDE) - theirs).abs().max() / theirs.abs().max()
        assert error <= 2000 * EPS, f"{error:.2g}"


@pytest.mark.parametrize("m, n", [(1, 1), (20, 7), (7, 20), (40, 33), (90, 16)])
@pytest.mark.parametrize("driver", ["gels", "gelsy", "gelsd"])
def test_lstsq(device, m, n, driver):
    A, B = torch.randn(3, m, n, dtype=torch.complex64), torch.randn(3, m, 2, dtype=torch.complex64)
    if driver != "gels" and min(m, n) > 5:  # of rank 5, whose solution of least norm is asked for
        A = A[..., :5] @ A[..., :5, :] / 5
    A[1] *= 1e30
    B[1] *= 1e20
    expected = torch.linalg.lstsq(A.to(WIDE), B.to(WIDE), rcond=1e-4, driver="gelsd")
    found = metalcore.lstsq(A.to(device), B.to(device), rcond=1e-4, driver=driver)
    condition = torch.linalg.cond(A.to(WIDE), 2) if min(m, n) <= 5 or driver == "gels" else torch.tensor(30.0)
    error = norm(found.solution.cpu().to(WIDE) - expected.solution) / norm(expected.solution)
    check_below(error / condition.clamp(min=1) ** 2, 10 * max(m, n) * EPS, "X", ["random"] * 3)
    if driver == "gels" and m > n:
        squares = (A.to(WIDE) @ expected.solution - B).abs().square().sum(-2)
        torch.testing.assert_close(found.residuals.cpu()[::2], squares[::2].float(), rtol=1e-3, atol=1e-3)
    assert driver == "gels" or torch.equal(found.rank.cpu(), torch.full((3,), min(m, n, 5 if min(m, n) > 5 else m)))


@pytest.mark.parametrize("m, n", [(5, 5), (20, 7), (7, 20), (40, 33)])
def test_what_follows_from_singular_values(device, m, n):
    A = torch.randn(3, m, n, dtype=torch.complex64)
    A[2] = A[2, :, :1] * A[2, :1]  # of rank 1
    wide = A.to(WIDE)
    assert metalcore.matrix_rank(A.to(device), rtol=1e-4).tolist() == [min(m, n), min(m, n), 1]
    Hermitian = (A @ A.mH).to(device)
    assert metalcore.matrix_rank(Hermitian, hermitian=True, rtol=1e-4).tolist() == [min(m, n), min(m, n), 1]
    condition = torch.linalg.cond(wide[:2])
    found = metalcore.cond(A[:2].to(device)).cpu()
    assert found.dtype == torch.float32
    check_below((found - condition).abs() / condition, float(10 * max(m, n) * EPS * condition.max()), "cond", "AB")
    P, expected = metalcore.pinv(A.to(device), rtol=1e-4).cpu().to(WIDE), torch.linalg.pinv(wide, rtol=1e-4)
    bound = float(20 * max(m, n) * EPS * condition.max())
    check_below(norm(P - expected) / norm(expected), bound, "pinv", "ABC")
    P = metalcore.pinv(Hermitian, rtol=1e-4, hermitian=True).cpu().to(WIDE)
    expected = torch.linalg.pinv(Hermitian.cpu().to(WIDE), rtol=1e-4, hermitian=True)
    check_below(norm(P - expected) / norm(expected), bound * float(condition.max()), "pinv, Hermitian", "ABC")
    U, P = (x.cpu().to(WIDE) for x in metalcore.polar(A.to(device)))
    assert torch.equal(P, P.mH)
    check_below(norm(U @ P - wide) / norm(wide), 10 * max(m, n) * EPS, "A = U P", "ABC")


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("transpose", [True, False])
def test_ormqr_and_herk(device, left, transpose):
    A, C = torch.randn(2, 20, 7, dtype=torch.complex64), torch.randn(2, 20, 20, dtype=torch.complex64)
    a, tau = torch.geqrf(A.to(WIDE))
    expected = torch.ormqr(a, tau, C.to(WIDE), left, transpose)
    found = metalcore.ormqr(a.to(A).to(device), tau.to(A).to(device), C.to(device), left, transpose).cpu()
    check_below(norm(found.to(WIDE) - expected) / norm(expected), 200 * EPS, "ormqr", "AB")
    expected = 0.5 * (A.mH @ A if transpose else A @ A.mH).tril() + 2 * (C[..., :7, :7] if transpose else C).tril()
    C = C[..., :7, :7] if transpose else C
    found = metalcore.herk(A.to(device), C.to(device), alpha=0.5, beta=2, transpose=transpose, triangle="lower").cpu()
    check_below(norm(found - expected) / norm(expected), 200 * EPS, "herk", "AB")


def test_what_no_kernel_holds_goes_to_the_cpu(device):
    for name, shape in (("eigh", (2049, 2049)), ("svd", (129, 129)), ("svd", (2000, 40)), ("cholesky", (129, 129))):
        A = torch.empty(1, *shape, dtype=torch.complex64, device=device)
        with tuned("baseline"):
            assert metalcore.explain(name, A).variant == "cpu"
    A = torch.randn(2, 130, 130, dtype=torch.complex64)
    with tuned("baseline"):
        Q, R = metalcore.qr(A.to(device))
        inverse = metalcore.inv(A.to(device))
    A = A.to(device) if device == "cuda" else A  # whose own op PyTorch has
    expected = torch.linalg.qr(A)
    assert torch.equal(Q.cpu(), expected.Q.cpu()) and torch.equal(R.cpu(), expected.R.cpu())
    assert torch.equal(inverse.cpu(), torch.linalg.inv(A).cpu())
