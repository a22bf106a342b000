"""lstsq as a replacement for torch.linalg.lstsq, for matrices of full rank: what LAPACK's gels is for.
tests/linalg/test_lstsq_rank.py has the other drivers."""

import pytest
import torch
from derivatives import derivatives
from matrices import EPS, norm, of_spectrum
from opinfo import check_samples
from references import assert_same_error

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
