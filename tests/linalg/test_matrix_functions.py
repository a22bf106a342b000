"""matrix_exp, sqrtm, logm, solve_sylvester and polar: float64 and their own equations, on both sides of each plan."""

import pytest
import torch
from matrices import EPS, check_below
from opinfo import check_samples

import metalcore
from metalcore._core.registry import OPS

norm = torch.linalg.matrix_norm


def wide(x):
    return x.cpu().to(torch.complex128 if x.is_complex() else torch.float64)


def made(batch, n, is_complex, scale=1.0):
    A = torch.randn(batch, n, n, dtype=torch.complex64 if is_complex else torch.float32)
    return scale * A / n**0.5


def exponentials(n, is_complex):
    """Matrices by name, some of which are nilpotent, defective, or of a large spectrum left of zero."""
    A, B, C, D = made(4, n, is_complex)
    return {
        "random": 3 * A,
        "nilpotent": B.triu(1),
        "skew": 8 * (C - C.mH),
        "negative": -4 * (D @ D.mH) - 2 * torch.eye(n),
        "defective": torch.eye(n, dtype=A.dtype) + torch.diag(torch.ones(n - 1), 1),
        "tiny": 1e-6 * A,
        "zero": torch.zeros_like(A),
    }


@pytest.mark.parametrize("is_complex", [False, True])
@pytest.mark.parametrize("n", [1, 2, 8, 9, 16, 17, 32, 33, 64, 65])
def test_matrix_exp(device, n, is_complex):
    named = exponentials(n, is_complex)
    A = torch.stack(list(named.values()))
    on_device = A.to(device)
    limits = (16, 32) if is_complex else (32, 64)
    expected_variant = "simd" if n <= limits[0] else "block" if n <= limits[1] else "scaled"
    assert metalcore.explain("matrix_exp", on_device).variant == expected_variant
    found = metalcore.matrix_exp(on_device)
    assert found.is_contiguous() and found.dtype == A.dtype
    X = torch.linalg.matrix_exp(wide(A))
    # Each product rounds n eps of |exp(A / 2^s)|², which s squarings double. These norms are e^(a bit) for all named.
    squarings = 2 * norm(wide(A), 1).clamp(min=1)
    bound = 4 * max(n, 8) * EPS * squarings * norm(X).clamp(min=1)
    check_below(norm(wide(found) - X) / bound, 1.0, "exp(A)", list(named))
    assert torch.equal(found[-1].cpu(), torch.eye(n, dtype=A.dtype))


def test_matrix_exp_of_bad_matrices_spoils_no_other(device):
    A = made(5, 12, False)
    A[1, 3, 4], A[3, 0, 0] = torch.nan, torch.inf
    X = metalcore.matrix_exp(A.to(device)).cpu()
    good = [0, 2, 4]
    assert X[[1, 3]].isnan().all() and torch.equal(X[good], metalcore.matrix_exp(A[good].to(device)).cpu())
    large = torch.diag(torch.tensor([-3e38, 0.0, -1e38]))  # the scale is below the least normal number
    assert torch.equal(metalcore.matrix_exp(large.to(device)).cpu(), torch.diag(torch.tensor([0.0, 1.0, 0.0])))


def test_matrix_exp_as_pytorch_tests_it(device):
    check_samples(metalcore.matrix_exp, "matrix_exp", device, torch.float32, orders=2)
    with pytest.raises(RuntimeError, match="must be batches of square matrices"):
        metalcore.matrix_exp(torch.ones(2, 3, device=device))


@pytest.mark.parametrize("shape", [(0, 3, 3), (2, 0, 0), (0, 0)])
def test_empty(device, shape):
    A = torch.ones(shape, device=device)
    for function in (metalcore.matrix_exp, metalcore.sqrtm, metalcore.logm):
        assert function(A).shape == shape
    assert metalcore.solve_sylvester(A, A, A).shape == shape


@pytest.mark.parametrize("is_complex", [False, True])
@pytest.mark.parametrize("n", [1, 3, 32, 33])
def test_roots_and_logarithms(device, n, is_complex):
    A, B = made(2, n, is_complex)
    named = {
        "random": A,  # real ones have negative eigenvalues
        "positive": B @ B.mH + torch.eye(n),
        "near one": torch.eye(n) + 0.1 * A,
        "graded": torch.diag(torch.logspace(-2, 3, n)).to(A.dtype) + 0.01 * B.triu(1),
        "defective": 2 * torch.eye(n, dtype=A.dtype) + torch.diag(torch.ones(n - 1), 1),
    }
    given, names = torch.stack(list(named.values())), list(named)
    X = metalcore.sqrtm(given.to(device))
    root = wide(X)
    # A Schur form and a root that are backward stable: |X X - A| is at most a multiple of n eps |X|².
    check_below(norm(root @ root - wide(given)) / norm(root) ** 2, 4 * max(n, 8) * EPS, "X X = A", names)
    assert (torch.linalg.eigvals(root).real >= -1e-3).all()
    L = wide(metalcore.logm(given.to(device)))
    # An error of the logarithm is multiplied by exp's derivative, at most |exp(L)| (Frobenius) for most of them.
    size = norm(wide(given)) * (1 + norm(L))
    check_below(norm(torch.linalg.matrix_exp(L) - wide(given)) / size, 10 * max(n, 8) * EPS, "exp(L) = A", names)
    real = given[1:].to(device)
    assert metalcore.sqrtm(real).dtype == metalcore.logm(real).dtype == given.dtype


def test_negative_eigenvalues_give_complex_results(device):
    A = torch.tensor([[[-4.0, 0.0], [0.0, 9.0]], [[0.0, -2.0], [2.0, 0.0]]], device=device)
    X, L = metalcore.sqrtm(A), metalcore.logm(A)
    assert X.dtype == L.dtype == torch.complex64
    torch.testing.assert_close(X[0].cpu(), torch.tensor([[2j, 0], [0, 3]]))
    torch.testing.assert_close(L[0].cpu(), torch.tensor([-4.0 + 0j, 9.0]).log().diag())
    torch.testing.assert_close(metalcore.sqrtm(A[1]).cpu(), torch.tensor([[1.0, -1.0], [1.0, 1.0]]))


def test_bad_matrices_spoil_no_other(device):
    A = torch.eye(5) + 0.1 * made(4, 5, False)
    A[2, 1, 1] = torch.nan
    good = [0, 1, 3]
    for function in (metalcore.sqrtm, metalcore.logm):
        X = function(A.to(device)).cpu()
        assert X[2].isnan().any() and torch.equal(X[good].real, function(A[good].to(device)).cpu().real)
    X = metalcore.solve_sylvester(A.to(device), A[[*good, 0]].to(device), A[[*good, 0]].to(device)).cpu()
    assert X[2].isnan().any() and not X[good].isnan().any()


@pytest.mark.parametrize("is_complex", [False, True])
@pytest.mark.parametrize("m, n", [(1, 4), (7, 5), (32, 3), (33, 2)])
def test_sylvester(device, m, n, is_complex):
    A, B, Q = made(2, m, is_complex), made(1, n, is_complex)[0], made(3, max(m, n), is_complex)[:, None, :m, :n]
    X = metalcore.solve_sylvester(A.to(device), B.to(device), Q.to(device))
    assert X.dtype == A.dtype and X.shape == (3, 2, m, n)
    residual = wide(A) @ wide(X) + wide(X) @ wide(B) - wide(Q)
    size = (norm(wide(A)) + norm(wide(B))) * norm(wide(X)) + norm(wide(Q))
    check_below((norm(residual) / size).flatten(), 4 * max(m, 8) * EPS, "A X + X B = Q", "012345")


@pytest.mark.parametrize("name", ["sqrtm", "logm", "solve_sylvester"])
@pytest.mark.parametrize("is_complex", [False, True])
def test_gradients_of_first_and_second_order(device, name, is_complex):
    op = metalcore._core.registry.OPS[name]
    leaves = [
        (2 * torch.eye(4) + 0.7 * made(1, 4, is_complex)[0]) for _ in range(3 if name == "solve_sylvester" else 1)
    ]
    direction, second = made(2, 4, is_complex)

    def derivatives(function, place):
        inputs = [place(leaf).requires_grad_() for leaf in leaves]
        first = torch.autograd.grad(function(*inputs), inputs, place(direction), create_graph=True)
        return first, torch.autograd.grad(first, inputs, [place(second)] * len(inputs))

    found = derivatives(op.function, lambda x: x.to(device))
    expected = derivatives(op.reference, wide)
    for order, (ours, theirs) in enumerate(zip(found, expected)):
        for gradient, wanted in zip(ours, theirs):
            error = (wide(gradient) - wanted).abs().max() / wanted.abs().max()
            assert error < 64 * 4**order * 8 * EPS, (order, error)


def test_errors(device):
    A = torch.eye(3, device=device)
    for function in (metalcore.sqrtm, metalcore.logm):
        name = function.__name__
        with pytest.raises(
            TypeError, match=rf"{name}: A must be a float32 or complex64 tensor on a GPU, not torch.float64"
        ):
            function(torch.eye(3, dtype=torch.float64))
        with pytest.raises(RuntimeError, match=rf"{name}: A must be \(\*, n, n\), not \(2, 3\)"):
            function(A[:2])
    with pytest.raises(RuntimeError, match=r"A, B and Q must be .* not \(3, 3\), \(3, 3\) and \(2, 3\)"):
        metalcore.solve_sylvester(A, A, A[:2])
    with pytest.raises(RuntimeError, match="B must have the dtype of A, torch.float32, not torch.complex64"):
        metalcore.solve_sylvester(A, A.cfloat(), A)
    with pytest.raises(TypeError, match="Q must be a tensor, not int"):
        metalcore.solve_sylvester(A, A, 1)
    with pytest.raises(RuntimeError, match="A may have up to 1024 rows, and has 1025"):
        metalcore.sqrtm(torch.zeros(1025, 1025, device=device))


reference = OPS["polar"].reference
POLAR_SHAPES = ((3, 5, 5), (2, 40, 6), (2, 3, 7), (1, 1), (70, 70))
each_side = pytest.mark.parametrize("side", ("right", "left"))


def matrices(*shape, dtype=torch.float32):
    """Random matrices of full rank."""
    a = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return (a + 2 * torch.eye(*shape[-2:], dtype=a.dtype) * max(shape[-2:]) ** 0.5).to(dtype)


@each_side
@pytest.mark.parametrize("shape", POLAR_SHAPES, ids=str)
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16), ids=str)
def test_values(device, side, shape, dtype):
    A = matrices(*shape, dtype=dtype)
    U, P = metalcore.polar(A.to(device), side=side)
    expected = reference(A.double(), side=side)
    eps = 8 * max(shape[-2:]) * torch.finfo(torch.float32).eps + 2 * torch.finfo(dtype).eps
    for value, wanted in zip((U, P), expected):
        assert value.dtype is dtype and value.device.type == torch.device(device).type
        torch.testing.assert_close(value.cpu().double(), wanted, rtol=0, atol=eps * float(wanted.abs().max()))


@each_side
@pytest.mark.parametrize("shape", POLAR_SHAPES[:3], ids=str)
@pytest.mark.parametrize("dtype", (torch.float64, torch.complex128), ids=str)
def test_derivatives(side, shape, dtype):
    A = torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=dtype)[..., :4, :5].requires_grad_()

    def parts(A):
        return tuple(metalcore.polar(A, side=side))

    assert torch.autograd.gradcheck(parts, A)
    if dtype is torch.float64:
        assert torch.autograd.gradgradcheck(parts, A)


@each_side
def test_gradients_on_the_device(device, side):
    A = matrices(3, 9, 5)
    leaves = A.to(device).requires_grad_(), A.double().requires_grad_()
    for leaf, function in zip(leaves, (metalcore.polar, reference)):
        U, P = function(leaf, side=side)
        (U.sin().sum() + P.sin().sum()).backward()
    torch.testing.assert_close(leaves[0].grad.cpu().double(), leaves[1].grad, rtol=1e-4, atol=1e-5)


def test_equal_singular_values(device):
    """The gradient does not divide by their differences: that of U at the identity is the antisymmetric part."""
    A = torch.eye(6, device=device).expand(2, 6, 6).clone().requires_grad_()
    U, _ = metalcore.polar(A)
    direction = torch.randn(2, 6, 6, generator=torch.Generator().manual_seed(0)).to(device)
    (gradient,) = torch.autograd.grad(U, A, direction)
    torch.testing.assert_close(gradient, (direction - direction.mT) / 2, rtol=1e-5, atol=1e-6)


def test_empty_and_batches(device):
    for shape in ((0, 3, 3), (2, 0, 3), (2, 3, 0)):
        U, P = metalcore.polar(torch.zeros(shape, device=device))
        assert U.shape == shape and P.shape == (shape[0], shape[2], shape[2])
    A = matrices(4, 6, 6).to(device)
    for i, (U, P) in enumerate(zip(*metalcore.polar(A))):
        torch.testing.assert_close(U @ P, A[i], rtol=1e-5, atol=1e-4)


def test_errors_of_polar(device):
    A = torch.zeros(3, 3, device=device)
    for call, error, text in (
        (lambda: metalcore.polar(None), TypeError, "A must be a tensor"),
        (lambda: metalcore.polar(A[0]), RuntimeError, "A must have at least 2 dimensions, not 1"),
        (lambda: metalcore.polar(A, side="both"), ValueError, "side must be 'left' or 'right', not 'both'"),
    ):
        with pytest.raises(error, match=text):
            call()
