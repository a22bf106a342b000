"""lstsq as a replacement for torch.linalg.lstsq: full rank as LAPACK's gels, and the drivers that find the rank."""

import pytest
import torch
from matrices import EPS, norm, of_spectrum
from opinfo import check_samples
from references import assert_same_error, derivatives

import metalcore

# The kernels hold 64, 128, 256, 512 and 1024 rows of up to 128, 128, 64, 32 and 16 columns of A and B together.
SHAPES = [
    (1, 1),
    (5, 3),
    (3, 5),
    (8, 8),
    (40, 12),
    (12, 40),
    (33, 33),
    (100, 64),
    (64, 100),
    (1200, 20),
    (150, 140),
    (64, 20),
    (65, 20),
]
SHAPES += [(128, 120), (129, 60), (256, 57), (257, 20), (512, 25), (513, 9), (1024, 9), (1025, 9), (3000, 2), (900, 62)]
SHAPES += [(300, 63), (130, 65)]


def is_of_full_rank(input, args, kwargs):
    return kwargs.get("driver") == "gels" and 0 not in input.shape


@pytest.mark.parametrize("columns", [1, 7])
@pytest.mark.parametrize("m, n", SHAPES)
def test_against_float64(device, m, n, columns):
    A = of_spectrum(torch.linspace(1, 2, min(m, n)), max(m, n))
    A = (A if m >= n else A.mT).float()
    B = torch.randn(m, columns)
    found = metalcore.lstsq(A.to(device), B.to(device))
    expected = torch.linalg.lstsq(A.double(), B.double(), driver="gels")
    assert isinstance(found, torch.return_types.linalg_lstsq)
    # The residual is about B's norm, so the square of the condition number, 2, counts (Higham, 20.1).
    bound = 4 * 10 * max(m, n) * EPS * norm(B)
    assert norm(found.solution.cpu().double() - expected.solution) <= bound
    assert found.residuals.shape == expected.residuals.shape
    torch.testing.assert_close(
        found.residuals.cpu().double(), expected.residuals, rtol=0, atol=(bound * norm(B)).item()
    )
    for ours, theirs in zip(found[2:], expected[2:]):
        assert ours.shape == theirs.shape == (0,) and ours.device.type == device
    assert found.rank.dtype == torch.int64


def test_the_tree_and_the_path_with_a_gradient_agree(device):
    """Batches, strides, broadcasting, and a last block of one row."""
    for a, b in (((2, 1, 40, 6), (1, 3, 40, 2)), ((2, 6, 1025), (2, 3, 1025)), ((1, 3000, 9), (2, 3000, 4))):
        A, B = torch.randn(a, device=device), torch.randn(b, device=device)
        A, B = (x.mT if x.shape[-1] > 1000 else x for x in (A, B))
        found, expected = metalcore.lstsq(A, B), metalcore.lstsq(A.clone().requires_grad_(), B)
        for ours, theirs in zip(found[:2], expected[:2]):
            torch.testing.assert_close(ours, theirs.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("m, n", [(40, 5), (3000, 5)])
def test_columns_of_any_magnitude(device, m, n):
    """Each column of A and B has a scale of its own in each block."""
    torch.manual_seed(0)
    A, B = torch.randn(m, n), torch.randn(m, 3)
    A[: m // 2] *= 2.0**-40  # blocks differ as well
    powers, sides = 2.0 ** torch.tensor([60.0, -60.0, 0.0, 30.0, -50.0]), 2.0 ** torch.tensor([0.0, 50.0, -50.0])
    X = metalcore.lstsq((A * powers).to(device), (B * sides).to(device))
    expected = metalcore.lstsq(A.to(device), B.to(device))
    factors = (sides / powers[:, None].double()).to(device, torch.float32)
    torch.testing.assert_close(X.solution / factors, expected.solution, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(X.residuals / (sides**2).to(device), expected.residuals, rtol=1e-5, atol=0)


def test_nan_stays_in_its_matrix(device):
    A, B = torch.randn(3, 2000, 4, device=device), torch.randn(3, 2000, 2, device=device)
    expected = metalcore.lstsq(A, B).solution
    A[1, 1999, 2] = torch.nan
    found = metalcore.lstsq(A, B).solution
    assert found[1].isnan().all() and torch.equal(found[::2], expected[::2])


@pytest.mark.parametrize(
    "a, b",
    [
        ((2, 5, 3), (2, 5)),
        ((5, 3), (5,)),
        ((3, 5), (3,)),
        ((2, 3, 5), (2, 3)),
        ((3, 5, 3), (1, 5, 2)),
        ((1, 3, 5), (4, 3, 2)),
        ((2, 1, 4, 3), (1, 5, 4, 2)),
        ((0, 3), (0, 2)),
        ((5, 3), (5, 0)),
        ((0, 5, 3), (0, 5, 2)),
        ((0, 0), (0, 0)),
        ((3, 0), (3, 2)),
        ((2, 0, 3), (2, 0)),
        ((4, 4), (4, 2)),
    ],
)
def test_shapes(device, a, b):
    A, B = torch.randn(a), torch.randn(b)
    found = metalcore.lstsq(A.to(device), B.to(device))
    expected = torch.linalg.lstsq(A.double(), B.double(), driver="gels")
    assert [x.shape for x in found] == [x.shape for x in expected]
    scale = 1 + expected.solution.abs().max().item() ** 2 if expected.solution.numel() else 1
    torch.testing.assert_close(found.solution.cpu().double(), expected.solution, rtol=0, atol=1e-4 * scale)


def test_opinfo_samples(device):
    check_samples(
        metalcore.lstsq,
        "linalg.lstsq",
        device,
        torch.float32,
        select=is_of_full_rank,
        orders=0,
        results=lambda output: output[:2],
    )


@pytest.mark.parametrize(
    "a, b", [((5, 3), (5, 2)), ((3, 5), (3, 2)), ((4, 4), (4, 1)), ((2, 5, 3), (2, 5)), ((3, 5, 3), (1, 5, 2))]
)
def test_derivatives(device, a, b):
    A, B = torch.randn(a), torch.randn(b)
    found = derivatives(lambda A, B: metalcore.lstsq(A, B)[:2], [A.to(device), B.to(device)], 2)
    # The reference is PyTorch's derivative of the same problem, pinv(A) B.
    expected = derivatives(by_pinv, [A.double(), B.double()], 2)
    # Solutions depend on the square of A's condition number; each derivative multiplies by it once more.
    condition = torch.linalg.cond(A.double()).max().item() ** 2
    for order, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        tolerance = 10 * 8 * EPS * condition ** (1 + order // 2) * max(1, theirs.abs().max().item())
        torch.testing.assert_close(ours.cpu().double(), theirs, rtol=0, atol=tolerance)


def by_pinv(A, B):
    B = B.unsqueeze(-1) if B.dim() < A.dim() else B
    X = torch.linalg.pinv(A) @ B
    residuals = (A @ X - B).square().sum(-2) if A.shape[-2] > A.shape[-1] else A.new_empty(0)
    return (X.squeeze(-1) if X.shape[-1] == 1 and A.dim() > 2 and B.shape[-1] == 1 else X), residuals


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(device, dtype):
    A, B = torch.randn(6, 3, device=device).to(dtype), torch.randn(6, 2, device=device).to(dtype)
    found, expected = metalcore.lstsq(A, B), metalcore.lstsq(A.float(), B.float())
    assert found.singular_values.dtype == found.residuals.dtype == dtype
    assert torch.equal(found.solution, expected.solution.to(dtype))


def test_other_input_goes_to_torch():
    A, B = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    for ours, theirs in zip(metalcore.lstsq(A, B, driver="gelsd"), torch.linalg.lstsq(A, B, driver="gelsd")):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    "call",
    [
        lambda lstsq, device: lstsq(torch.randn(3, device=device), torch.randn(3, device=device)),
        lambda lstsq, device: lstsq(torch.randn(3, 3, device=device), torch.tensor(1.0, device=device)),
        lambda lstsq, device: lstsq(torch.randn(3, 3, device=device), torch.randn(4, 2, device=device)),
        lambda lstsq, device: lstsq(torch.randn(3, 3, device=device), torch.randn(2, 3, 2, device=device)),
        lambda lstsq, device: lstsq(torch.randn(3, 2, 5, device=device), torch.randn(3, 5, device=device)),
        lambda lstsq, device: lstsq(torch.randn(2, 5, 3, device=device), torch.randn(5, device=device)),
        lambda lstsq, device: lstsq(torch.randn(3, 3, device=device), torch.randn(3, 2, device=device), driver="x"),
    ],
)
def test_errors_are_torchs(device, call):
    assert_same_error(lambda: call(metalcore.lstsq, device), lambda: call(torch.linalg.lstsq, "cpu"))


def test_compile(device):
    compiled = torch.compile(lambda A, B: metalcore.lstsq(A, B).solution + 1, backend="aot_eager", fullgraph=True)
    A, B = torch.randn(2, 6, 3, device=device, requires_grad=True), torch.randn(2, 6, 2, device=device)
    found, expected = compiled(A, B), metalcore.lstsq(A, B).solution + 1
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(x.sum(), A)[0] for x in (found, expected)))


def test_the_operator_itself_has_the_derivative(device):
    """What calls it past `metalcore.lstsq` gets its gradients, of any order."""
    A, B = (torch.randn(2, *shape, device=device).requires_grad_() for shape in ((12, 5), (12, 3)))
    for results in (
        lambda f: f(A, B)[:2],
        lambda f: [torch.autograd.grad(f(A, B)[0].pow(3).sum(), A, create_graph=True)[0]],
    ):
        weights = [torch.randn_like(x) for x in results(metalcore.lstsq)]
        found, expected = (
            torch.autograd.grad(results(f), (A, B), weights) for f in (torch.ops.metalcore.lstsq, metalcore.lstsq)
        )
        for ours, theirs in zip(found, expected):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3 * theirs.abs().max().item())


DRIVERS = ["gelsy", "gelsd", "gelss"]


def deficient(m, n, rank, batch=()):
    """Matrices whose first `rank` singular values go from 2 to 1, and whose others are 0."""
    k = min(m, n)
    values = torch.zeros(*batch, k, dtype=torch.float64)
    values[..., :rank] = torch.linspace(2, 1, rank, dtype=torch.float64)
    A = of_spectrum(values, max(m, n))
    return (A if m >= n else A.mT).float()


def compare(device, A, B, driver, rcond=None, tolerance=1.0):
    found = metalcore.lstsq(A.to(device), B.to(device), rcond, driver=driver)
    # The rank of what float32 holds, and not of its rounding.
    rcond = max(A.shape[-2:]) * EPS if rcond is None else rcond
    expected = torch.linalg.lstsq(A.double(), B.double(), rcond, driver=driver)
    assert [x.shape for x in found] == [x.shape for x in expected]
    assert [x.dtype for x in found] == [torch.float32, torch.float32, torch.int64, torch.float32]
    assert torch.equal(found.rank.cpu(), expected.rank)
    bound = tolerance * 40 * max(A.shape[-2:]) * EPS * norm(B.double().reshape(1, -1)).item()
    for ours, theirs in zip((found.solution, found.singular_values), (expected.solution, expected.singular_values)):
        torch.testing.assert_close(ours.cpu().double(), theirs, rtol=0, atol=bound)
    atol = bound * norm(B.double().reshape(1, -1)).item()
    torch.testing.assert_close(found.residuals.cpu().double(), expected.residuals, rtol=0, atol=atol)
    return found


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize(
    "m, n, rank", [(6, 4, 4), (6, 4, 2), (4, 6, 2), (5, 5, 3), (1, 1, 0), (40, 12, 1), (12, 40, 12), (90, 70, 35)]
)
def test_rank_against_float64(device, m, n, rank, driver):
    compare(device, deficient(m, n, rank), torch.randn(m, 3), driver)


@pytest.mark.parametrize("driver", DRIVERS)
def test_each_matrix_has_its_rank(device, driver):
    """Batches, broadcasting, vectors, and strides."""
    A = torch.stack([deficient(8, 5, rank) for rank in (5, 0, 3)])
    found = compare(device, A, torch.randn(3, 8, 2), driver)
    assert found.rank.tolist() == [5, 0, 3] and not found.solution[1].any()
    compare(device, A[:, None], torch.randn(1, 4, 8, 2), driver)
    compare(device, A, torch.randn(3, 8), driver)
    compare(device, A.mT.contiguous().mT[::2], torch.randn(1, 8, 2), driver)


def test_many_threadgroups_share_the_columns(device):
    A = torch.stack([deficient(260, 300, 140), deficient(260, 300, 260)])
    assert metalcore.lstsq(A.to(device), A[..., :2].to(device), driver="gelsy").rank.tolist() == [140, 260]
    compare(device, A[:1], torch.randn(1, 260, 2), "gelsy")


@pytest.mark.parametrize("driver", DRIVERS)
def test_rcond(device, driver):
    """It decides between singular values of 1 and 1e-3, and R's estimated condition number is within a factor of 4."""
    A = of_spectrum(torch.tensor([1.0, 1.0, 1e-3, 1e-3], dtype=torch.float64), 7).float()
    B = torch.randn(7, 2)
    for rcond, rank in ((None, 4), (1e-4, 4), (1e-2, 2), (torch.tensor(1e-2), 2)):
        assert compare(device, A, B, driver, None if rcond is None else float(rcond), 1e3).rank.item() == rank
    assert metalcore.lstsq(A.to(device), B.to(device), -1.0, driver=driver).rank.item() == 4


def test_the_estimate_sees_what_the_diagonal_hides(device):
    """Kahan's matrix: R's diagonal stays large while its smallest singular value vanishes."""
    n, c = 30, 0.4
    s = (1 - c * c) ** 0.5
    R = (torch.eye(n) - c * torch.ones(n, n).triu(1)) * s ** torch.arange(n)[:, None] * (1 - 1e-5 * torch.arange(n))
    least = torch.linalg.svdvals(R.double())[-1].item() / torch.linalg.svdvals(R.double())[0].item()
    assert least < R[-1, -1].item() / R[0, 0].item() / 100
    assert metalcore.lstsq(R.to(device), R[:, :1].to(device), 30 * least, driver="gelsy").rank.item() < n


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("scale", [2.0**120, 2.0**-120])
def test_scale(device, driver, scale):
    A, B = deficient(9, 5, 3), torch.randn(9, 2)
    found = metalcore.lstsq((A * scale).to(device), B.to(device), driver=driver)
    expected = metalcore.lstsq(A.to(device), B.to(device), driver=driver)
    assert torch.equal(found.rank, expected.rank)
    torch.testing.assert_close(found.solution * scale, expected.solution, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize(
    "a, b",
    [
        ((0, 3), (0, 2)),
        ((3, 0), (3, 2)),
        ((0, 0), (0, 0)),
        ((0, 5, 3), (0, 5, 2)),
        ((2, 0, 3), (2, 0)),
        ((5, 3), (5, 0)),
    ],
)
def test_empty(device, a, b, driver):
    found = metalcore.lstsq(torch.randn(a, device=device), torch.randn(b, device=device), driver=driver)
    assert not found.solution.any()
    if b == (5, 0):  # which PyTorch's gelsd and gelss do not survive
        assert found.solution.shape == (3, 0) and found.rank.item() == 3
        return
    expected = torch.linalg.lstsq(torch.randn(a), torch.randn(b), driver=driver)
    assert [x.shape for x in found] == [x.shape for x in expected]
    assert torch.equal(found.rank.cpu(), expected.rank)


@pytest.mark.parametrize("driver", [None, *DRIVERS])
@pytest.mark.parametrize("shape", [(2, 5, 3), (4, 4), (3, 5), (2, 5, 0), (0, 3), (0, 5, 3)])
def test_dtypes_of_results(device, shape, driver):
    """Residuals and singular values are real where the matrices are complex, also where there are none."""
    A = torch.randn(shape, dtype=torch.complex64)
    expected = torch.linalg.lstsq(A, A, driver=driver or "gels")
    found = metalcore.lstsq(A.to(device), A.to(device), driver=driver)
    assert [(x.dtype, x.shape) for x in found] == [(x.dtype, x.shape) for x in expected]


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("m, n, rank", [(6, 4, 4), (4, 6, 4), (6, 4, 2), (4, 6, 2)])
def test_derivatives_below_full_rank(device, m, n, rank, driver):
    """The reference is the derivative of pinv(A) B for the constant rank. Directions that raise the rank have none, so
    that A's gradient is compared as it is, by the same formula in float64."""
    A, B = deficient(m, n, rank), torch.randn(m, 2)
    rcond = 1e-4

    def ours(A, B):
        return metalcore.lstsq(A, B, rcond, driver=driver).solution

    def by_pinv(A, B):
        return torch.linalg.pinv(A, rtol=rcond) @ B

    found = derivatives(ours, [A.to(device), B.to(device)], 2)
    expected = derivatives(by_pinv, [A.double(), B.double()], 2)
    for mine, theirs in zip(found, expected, strict=True):
        # Condition number 2, of which the second derivative takes the fourth power.
        atol = 10 * 16 * max(m, n) * EPS * max(1, theirs.abs().max().item())
        torch.testing.assert_close(mine.cpu().double(), theirs, rtol=0, atol=atol)


def test_derivatives_of_residuals_and_broadcasting(device):
    A, B = torch.randn(3, 1, 6, 4), torch.randn(1, 2, 6, 2)
    results = []
    for a, b, call in ((A.to(device), B.to(device), metalcore.lstsq), (A.double(), B.double(), torch.linalg.lstsq)):
        a, b = a.clone().requires_grad_(), b.clone().requires_grad_()
        loss = call(a, b, driver="gelsd").residuals.sum()
        results.append([g.cpu().double() for g in torch.autograd.grad(loss, (a, b))])
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3 * theirs.abs().max().item())


@pytest.mark.parametrize("driver", DRIVERS)
def test_16_bits_and_nan(device, driver):
    A, B = torch.randn(2, 6, 3, device=device).bfloat16(), torch.randn(2, 6, 2, device=device).bfloat16()
    found, expected = (metalcore.lstsq(*pair, driver=driver) for pair in ((A, B), (A.float(), B.float())))
    assert found.solution.dtype == found.singular_values.dtype == torch.bfloat16 and found.rank.dtype == torch.int64
    assert torch.equal(found.solution, expected.solution.bfloat16())
    A[0, 1, 1] = torch.nan
    found = metalcore.lstsq(A.float(), B.float(), driver=driver).solution
    assert found[0].isnan().all() and torch.equal(found[1], expected.solution[1])


def test_the_cpus_kernel_agrees(device):
    A = torch.cat([deficient(5, 7, 3)[None], torch.randn(1, 5, 7), torch.zeros(1, 5, 7)])
    A = torch.cat([A, torch.randn(3, 5, 2)], -1)
    theirs = torch.ops.metalcore.qr_pivoted(A, 7, 1e-5)
    ours = [x.cpu() for x in torch.ops.metalcore.qr_pivoted(A.to(device), 7, 1e-5)]
    assert ours[2].tolist() == theirs[2].tolist() == [3, 5, 0]
    for matrix, rank in enumerate(ours[2].tolist()):
        assert torch.equal(ours[1][matrix, :rank], theirs[1][matrix, :rank])
        R, S = (  # the columns behind the pivots are in A's order
            torch.cat([W[matrix].mT[:rank, :7].triu()[:, order[matrix].argsort()], W[matrix].mT[:rank, 7:]], -1)
            for W, order, _ in (ours, theirs)
        )
        torch.testing.assert_close(R, S, rtol=0, atol=1e-5)
    torch.library.opcheck(torch.ops.metalcore.qr_pivoted.default, (A.to(device), 7, 1e-5))
    torch.library.opcheck(torch.ops.metalcore.lstsq.default, (A[1:2, :, 4:7].to(device), A[1:2, :, 7:].to(device)))
