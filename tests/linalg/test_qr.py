"""qr's factors against float64, in every variant; its derivatives against PyTorch's."""

import pytest
import torch
from matrices import EPS, check_below, matrices, norm, unit
from opinfo import check_samples
from references import assert_same_error, check_operator, derivatives
from rows import FAMILIES, changes, tuned

import metalcore

# variant -> shapes (m, n) below, at and above its boundaries
SHAPES = {
    "simd": [
        (1, 1),
        (2, 3),
        (7, 8),
        (8, 8),
        (8, 9),
        (9, 5),
        (16, 16),
        (17, 16),
        (3, 17),
        (32, 32),
        (33, 32),
        (64, 32),
        (64, 1),
    ],
    "block": [
        (65, 1),
        (64, 33),
        (33, 33),
        (20, 128),
        (64, 64),
        (65, 65),
        (128, 128),
        (129, 64),
        (256, 64),
        (257, 32),
        (512, 32),
        (513, 16),
        (1024, 16),
    ],
    "tall": [(2049, 16), (2049, 1), (2049, 17), (2049, 33), (2049, 64), (2500, 36), (4200, 60)],
    "blocked": [
        (20, 129),
        (129, 65),
        (129, 129),
        (140, 300),
        (257, 65),
        (530, 70),
        (1040, 66),
        (1025, 16),
        (1025, 1),
        (513, 17),
        (257, 33),
        (2048, 64),
        (2060, 65),
    ],
}
COMPLETE_SHAPES = {
    "simd": [(8, 3), (9, 9), (20, 32), (32, 1)],
    "block": [(33, 1), (64, 32), (128, 100), (40, 128)],
    "blocked": [(129, 2), (130, 130), (200, 20), (130, 160)],
}


def plan(family, m, n, mode):
    """The variant and the kernels that an m x n matrix takes on GPUs of a family."""
    with tuned(family):
        explanation = metalcore.explain("qr", (m, n), mode=mode)
    return explanation.variant, explanation.kernels


def boundaries(family, mode):
    """Shapes (m, n) on both sides of each change of plan, from short to tall, for some widths."""
    shapes = []
    tallest = 600 if mode == "complete" else 5000
    for n in (1, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129):
        for below, above in changes(lambda m: plan(family, m, n, mode), 1, tallest):
            shapes += [(below, n), (above, n)]
    return shapes


# These matrices and LAPACK's choice of signs determine each entry of R well.
DETERMINED = ["random", "zero", "identity", "triangular", "all about 1e30", "all about 1e-30"]


def check_factors(A, Q, R, mode, names):
    """Q's columns are orthonormal, Q R is A, R is upper triangular with LAPACK's signs. Batch entry i is names[i]."""
    m, n = A.shape[-2:]
    k = min(m, n)
    bound = 10 * max(m, n) * EPS
    A, largest = unit(A)
    Q, R = Q.double(), R.double() / largest
    rows = m if mode == "complete" else k
    assert R.shape == (*A.shape[:-2], rows, n)
    assert not R.tril(-1).any()
    if mode == "r":
        assert Q.shape == (0,)
        residual = norm(R.mT @ R - A.mT @ A) / norm(A).square().clamp(min=1e-300)
        check_below(residual, 2 * bound, "RᵀR = AᵀA", names)
    else:
        assert Q.shape == (*A.shape[:-2], m, rows)
        check_below(norm(Q.mT @ Q - torch.eye(rows)), bound, "QᵀQ = I", names)
        check_below(norm(A - Q @ R) / norm(A).clamp(min=1e-300), bound, "A = QR", names)
    expected = torch.linalg.qr(A, mode)
    for i, name in enumerate(names):
        if name in DETERMINED:
            # R's error is the residual's times QR's condition number. That is at most cond(A), which is about n for
            # random matrices.
            difference = norm(R[i] - expected.R[i]) / norm(A[i]).clamp(min=1e-300)
            assert difference <= bound * max(m, n), f"{name}: R differs by {difference:.2g}"
        if name in ("zero", "identity") and mode != "r":
            torch.testing.assert_close(Q[i], expected.Q[i], rtol=0, atol=0)


CASES = [(variant, m, n, mode) for mode in ("reduced", "r") for variant, shapes in SHAPES.items() for m, n in shapes]
CASES += [(variant, m, n, "complete") for variant, shapes in COMPLETE_SHAPES.items() for m, n in shapes]


def check(device, m, n, mode, only=None):
    cases = matrices(m, n)
    cases = {name: cases[name] for name in only or cases}
    A = torch.stack(list(cases.values()))
    Q, R = metalcore.qr(A.to(device), mode)
    assert Q.device.type == R.device.type == torch.device(device).type
    check_factors(A, Q.cpu(), R.cpu(), mode, list(cases))


@pytest.mark.parametrize("variant, m, n, mode", CASES)
def test_factors(device, variant, m, n, mode):
    with tuned("baseline"):
        assert metalcore.explain("qr", (m, n), mode=mode).variant == variant
        check(device, m, n, mode)


@pytest.mark.parametrize("mode", ["reduced", "complete", "r"])
@pytest.mark.parametrize("family", FAMILIES[1:])
def test_where_other_gpus_take_other_kernels(device, family, mode):
    """Shapes below and above the boundaries of a family's plans that differ from the baseline's; one for PyTorch."""
    tried = set()
    for m, n in boundaries(family, mode):
        chosen = plan(family, m, n, mode)
        if chosen != plan("baseline", m, n, mode) and chosen not in tried:
            with tuned(family):
                check(device, m, n, mode, only=["random", "rank-deficient", "columns from 1e-30 to 1e30"])
        tried |= {chosen} if chosen[0] == "torch" else set()


@pytest.mark.parametrize("m, n", [(5, 5), (64, 20), (70, 40), (300, 20), (1300, 12), (150, 140)])
def test_as_lapack_entry_by_entry(device, m, n):
    A = torch.randn(3, m, n)
    for mode in ("reduced", "r", "complete")[: 3 if m <= 150 else 2]:
        actual, expected = metalcore.qr(A.to(device), mode), torch.linalg.qr(A.double(), mode)
        assert norm(actual.R.cpu() - expected.R).max() <= 10 * m * n * EPS * norm(A).max()
        if mode == "reduced":  # the other columns of "complete" are not unique
            assert norm(actual.Q.cpu() - expected.Q).max() <= 10 * m * n * EPS * n**0.5
        if mode == "complete":
            assert norm(actual.Q.cpu() - expected.Q).max() <= 10 * m * n * EPS * m**0.5


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("m, n", [(5, 4), (16, 16), (60, 30), (100, 50), (400, 20), (1500, 10), (200, 150)])
def test_a_bad_matrix_spoils_its_own_batch_entry_only(device, m, n, bad):
    A = torch.randn(5, m, n)
    A[2, m - 1, 1] = bad
    Q, R = (x.cpu() for x in metalcore.qr(A.to(device)))
    assert not Q[2].isfinite().all() and not R[2].isfinite().all()
    good = [0, 1, 3, 4]
    check_factors(A[good], Q[good], R[good], "reduced", ["random"] * 4)


@pytest.mark.parametrize("batch", [7, 130])
@pytest.mark.parametrize("m, n", [(6, 5), (12, 12), (30, 20), (64, 32), (40, 40)])
def test_many_matrices(device, m, n, batch):
    A = torch.randn(batch, m, n)
    Q, R = (x.cpu() for x in metalcore.qr(A.to(device)))
    check_factors(A, Q, R, "reduced", ["random"] * batch)


def test_a_large_matrix(device):
    n = 1100  # several threadgroups share a panel above 1024 rows
    A = torch.randn(n, n)
    Q, R = (x.cpu().double() for x in metalcore.qr(A.to(device)))
    bound = 10 * n * EPS
    assert not R.tril(-1).any()
    assert norm(Q.mT @ Q - torch.eye(n)) <= bound
    assert norm(A - Q @ R) <= bound * norm(A)
    assert torch.equal(R.diagonal().sign(), torch.linalg.qr(A.double(), "r").R.diagonal().sign())


@pytest.mark.parametrize("m, n", [(4000, 36), (100000, 8)])
def test_tall_and_thin_takes_no_square_of_the_height(device, m, n):
    A = torch.randn(m, n)
    Q, R = (x.cpu() for x in metalcore.qr(A.to(device)))
    check_factors(A[None], Q[None], R[None], "reduced", ["random"])
    plan = metalcore.explain("qr", (m, n))
    assert plan.variant == "tall"
    # A dispatch has at most as many threads as the matrix has entries, times the values that a lane's registers hold.
    for step in plan.steps:
        assert step.grid[0] * step.threadgroup[0] <= 8 * m * n


def test_opinfo_samples(device):
    # Gradients: test_derivatives, with modes and shapes that have one.
    check_samples(metalcore.qr, "linalg.qr", device, torch.float32, orders=0)


def test_what_goes_to_torch(device):
    A = torch.randn(2100, 70)
    with tuned("hopper"):
        for mode in ("reduced", "r"):
            assert metalcore.explain("qr", (2100, 70), mode=mode).variant == "torch"
            Q, R = (x.cpu() for x in metalcore.qr(A.to(device), mode))
            assert Q.is_contiguous() and R.is_contiguous()
            check_factors(A[None], Q[None] if mode != "r" else Q, R[None], mode, ["random"])


@pytest.mark.only_on("simulator")
@pytest.mark.parametrize(
    "shape, mode",
    [
        ((3, 4, 5), "reduced"),
        ((40, 20), "complete"),
        ((2, 60, 40), "reduced"),
        ((1030, 3), "reduced"),
        ((150, 140), "r"),
        ((2060, 66), "r"),
    ],
)
def test_kernels_are_clean_in_checking_mode(device, shape, mode):
    A = torch.randn(shape)
    with metalcore.simulator.checking():
        R = metalcore.qr(A.to(device), mode).R
    expected = torch.linalg.qr(A.double(), mode)
    assert norm(R.cpu() - expected.R).max() <= 10 * max(shape) ** 2 * EPS * norm(A).max()


DIFFERENTIABLE = [
    ((4, 4), "reduced"),
    ((7, 4), "reduced"),
    ((4, 7), "reduced"),
    ((4, 4), "complete"),
    ((4, 7), "complete"),
    ((2, 3, 20, 12), "reduced"),
    ((70, 40), "reduced"),
    ((1100, 5), "reduced"),
    ((3, 0), "reduced"),
    ((0, 3), "reduced"),
]


@pytest.mark.parametrize("parts", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("shape, mode", DIFFERENTIABLE)
def test_derivatives(device, shape, mode, parts):
    A = torch.randn(shape)
    actual = derivatives(lambda A: metalcore.qr(A, mode), [A.to(device)], 2, parts)
    expected = derivatives(lambda A: torch.linalg.qr(A, mode), [A.double()], 2, parts)
    # Each order multiplies by R⁻¹ once more; the reference's own values show how large that makes things.
    condition = torch.linalg.cond(A[..., : min(shape[-2:])].double()).max().item() if 0 not in shape else 1.0
    for order, (ours, theirs) in enumerate(zip(actual, expected), 1):
        assert ours.shape == theirs.shape
        scale = max([1.0, *theirs.abs().flatten().tolist()])
        tolerance = 10 * max(8, *shape) * EPS * condition**order * scale
        torch.testing.assert_close(ours.cpu().double(), theirs, rtol=0, atol=tolerance)


@pytest.mark.parametrize("shape, mode", [((4, 4), "r"), ((5, 3), "r"), ((5, 3), "complete")])
def test_without_a_derivative(device, shape, mode):
    def gradient(qr, A):
        results = qr(A.requires_grad_(), mode)
        assert results.R.requires_grad
        results.R.sum().backward()

    assert_same_error(
        lambda: gradient(metalcore.qr, torch.randn(shape).to(device)),
        lambda: gradient(torch.linalg.qr, torch.randn(shape)),
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_has_gradients(device, dtype):
    A = torch.randn(6, 4).to(dtype)
    gradient = derivatives(lambda A: metalcore.qr(A, "reduced"), [A.to(device)], 1, (0, 1))[0]
    expected = derivatives(lambda A: torch.linalg.qr(A, "reduced"), [A.double()], 1, (0, 1))[0]
    assert gradient.dtype == dtype
    tolerance = 10 * 6 * torch.finfo(dtype).eps * torch.linalg.cond(A.double()).item() * expected.abs().max().item()
    torch.testing.assert_close(gradient.cpu().double(), expected, rtol=0, atol=tolerance)


def test_gradcheck_of_the_formulas():
    # The operator on CPU tensors: the same derivative, in float64.
    qr = torch.ops.metalcore.qr
    for shape, mode in [((4, 4), "reduced"), ((5, 3), "reduced"), ((3, 5), "reduced"), ((2, 3, 4), "complete")]:
        A = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(lambda A: qr(A, mode), (A,))
        assert torch.autograd.gradgradcheck(lambda A: qr(A, mode), (A,))


@pytest.mark.parametrize("mode", ["reduced", "complete", "r"])
@pytest.mark.parametrize(
    "where, shape", [("cpu", (2, 4, 3)), ("device", (2, 4, 3)), ("device", (3, 4)), ("device", (0, 3))]
)
def test_opcheck(device, where, shape, mode):
    A = torch.randn(shape, device=device if where == "device" else "cpu")
    differentiable = mode != "r" and not (mode == "complete" and shape[-2] > shape[-1])
    check_operator(torch.ops.metalcore.qr, A.requires_grad_(differentiable), mode)


@pytest.mark.parametrize("mode", ["reduced", "complete", "r"])
def test_compile(device, mode):
    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(A):
        Q, R = metalcore.qr(A * 2, mode)
        return Q + 1, R

    A = torch.randn(3, 5, 6, device=device, requires_grad=mode != "r")
    Q, R = compiled(A)
    expected = metalcore.qr(A.detach() * 2, mode)
    assert torch.equal(Q, expected.Q + 1) and torch.equal(R, expected.R)
    if mode != "r":
        R.sum().backward()
        gradient, A.grad = A.grad, None
        metalcore.qr(A * 2, mode).R.sum().backward()
        torch.testing.assert_close(gradient, A.grad)
