"""svd of matrices larger than a threadgroup holds: blocked one-sided Jacobi."""

import pytest
import torch
from matrices import EPS, check_below, matrices, norm, of_spectrum, unit
from rows import tuned

import metalcore
from metalcore import _C

ops = torch.ops.metalcore


def check_svd(device, A, names, full_matrices=False):
    m, n = A.shape[-2:]
    U, S, Vh = (x.cpu().double() for x in ops.svd(A.to(device), full_matrices, True))
    k = min(m, n)
    assert U.shape[-2:] == (m, m if full_matrices else k) and Vh.shape[-2:] == (n if full_matrices else k, n)
    D, largest = unit(A)
    S = S / largest[..., 0]
    expected = torch.linalg.svdvals(D)
    size = expected[..., 0].clamp(min=1e-300)
    bound = 10 * max(m, n) * EPS
    check_below((S - expected).abs().amax(-1) / size, bound / 2, "singular values", names)
    check_below(norm(U.mT @ U - torch.eye(U.shape[-1])), bound, "orthogonality of U", names)
    check_below(norm(Vh @ Vh.mT - torch.eye(Vh.shape[-2])), bound, "orthogonality of V", names)
    back = (U[..., :k] * S[..., None, :]) @ Vh[..., :k, :]
    check_below(norm(back - D) / norm(D).clamp(min=1e-300), bound, "residual", names)
    assert (S.diff() <= 0).all()


@pytest.mark.parametrize("m, n", [(129, 129), (300, 140), (140, 300)])
def test_hard_matrices(device, m, n):
    cases = matrices(m, n)
    check_svd(device, torch.stack(list(cases.values())), list(cases))


@pytest.fixture
def wide(device):
    """Blocks are wide in all matrices of the blocked variant."""
    _C.use_measured(device, _C.gpu_family(device), [("jacobi", "wide_columns", [1])])
    yield
    _C.use_measured(device, _C.gpu_family(device), [])


def test_wide_blocks(device, wide):
    """Two pairs of wide blocks, in a batch of which one matrix has a NaN at the end."""
    n = 129
    A = torch.randn(2, n, n)
    A[1] *= 10.0 ** torch.linspace(8, -8, n)[:, None]
    check_svd(device, A, ["random", "graded rows"])
    A[1, 3, 4] = float("nan")
    values = ops.svd(A.to(device), False, True)[1].cpu()
    assert values[1].isnan().all() and values[0].isfinite().all()


def test_more_pairs_of_wide_blocks(device, wide):
    check_svd(device, torch.randn(1, 257, 257), ["random"])
    assert "jacobi_wide_apply" in metalcore.explain("svd", (1, 257, 257)).kernels


def test_full_matrices(device):
    check_svd(device, torch.randn(2, 170, 133), ["random"] * 2, full_matrices=True)
    check_svd(device, torch.randn(2, 133, 170), ["random"] * 2, full_matrices=True)


@pytest.mark.parametrize("n", [130, 143, 144, 145, 161, 192, 193])
def test_sizes(device, n):
    """Both sides of each boundary between blocks, odd numbers of which leave one without a partner, and sizes within
    a block."""
    check_svd(device, torch.randn(1, n, n), ["random"])


def test_rows_shared_by_threadgroups(device):
    """The plan of GPUs for which one matrix has too few pairs of blocks."""
    for family in ("baseline", "hopper"):
        with tuned(family):
            check_svd(device, matrices(150, 150)["random"][None], ["random"])


def test_values_alone(device):
    A = torch.randn(2, 150, 150)
    S = ops.svd(A.to(device), False, False)[1].cpu().double()
    assert (S - torch.linalg.svdvals(A.double())).abs().max() <= 5 * 150 * EPS * S.max()


def test_small_singular_values_of_graded_columns(device):
    """Relative accuracy is high; a method with errors relative to the norm of the whole matrix does not have it."""
    n = 150
    A = torch.randn(n, n) * 10.0 ** torch.linspace(0, -15, n)
    S = ops.svd(A.to(device), False, False)[1].cpu().double()
    # Jacobi in float64 on the scaled columns: relative errors are below n eps times their condition number.
    scale = A.double().norm(dim=0)
    condition = torch.linalg.cond(A.double() / scale)
    expected = reference_of_graded(A.double())
    assert ((S - expected).abs() / expected).max() <= n * EPS * condition


def reference_of_graded(A):
    """Singular values by one-sided Jacobi in float64."""
    X = A.mT.clone()
    n = len(X)
    for _ in range(12):
        for step in range(1, 1 << (n - 1).bit_length()):
            p = torch.tensor([i for i in range(n) if i < i ^ step < n])
            if len(p) == 0:
                continue
            q = p ^ step
            x, y = X[p], X[q]
            a, b, c = (x * x).sum(1), (y * y).sum(1), (x * y).sum(1)
            zeta = (b - a) / (2 * torch.where(c == 0, 1.0, c))
            t = torch.where(c == 0, 0.0, zeta.sign() / (zeta.abs() + (1 + zeta * zeta).sqrt()))
            cosine = 1 / (1 + t * t).sqrt()
            X[p], X[q] = cosine[:, None] * (x - t[:, None] * y), cosine[:, None] * (y + t[:, None] * x)
    return X.norm(dim=1).sort(descending=True).values


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_matrix_spoils_its_own_batch_entry_only(device, bad):
    A = torch.randn(3, 140, 140)
    spoilt = A.clone()
    spoilt[1, 70, 3] = bad
    for expected, actual in zip(ops.svd(A.to(device), False, True), ops.svd(spoilt.to(device), False, True)):
        assert actual[1].isnan().all()
        assert torch.equal(actual[[0, 2]], expected[[0, 2]])


def test_the_same_bits(device):
    A = torch.randn(3, 140, 140).to(device)
    for first, second in zip(ops.svd(A, False, True), ops.svd(A, False, True)):
        assert torch.equal(first, second)


@pytest.mark.parametrize(
    "m, n, names",
    [(400, 400, ["columns", "both"]), (410, 390, ["columns, shuffled"]), (390, 410, ["rows, shuffled"])],
)
def test_columns_and_rows_of_any_magnitude_in_any_order(device, m, n, names):
    """The sweeps do not converge for these unless the columns are put in order first."""
    rows, columns = (10.0 ** torch.linspace(-30, 30, size).double() for size in (m, n))
    A = torch.randn(m, n).double()
    cases = {
        "columns": A * columns,
        "rows": A * rows[:, None],
        "columns, shuffled": A * columns[torch.randperm(n)],
        "rows, shuffled": A * rows[torch.randperm(m), None],
        "both": A * columns.sqrt()[torch.randperm(n)] * rows.sqrt()[torch.randperm(m), None],
    }
    check_svd(device, torch.stack([cases[name] for name in names]).float(), names)


LARGE = {
    512: None,
    1024: ["random", "rank-deficient", "Hilbert", "columns from 1e-30 to 1e30", "all about 1e30"],
    2048: ["rank-deficient", "columns from 1e-30 to 1e30"],
}


@pytest.mark.only_on("cuda")
@pytest.mark.parametrize("n", LARGE)
def test_large_hard_matrices(device, n):
    cases = matrices(n, n)
    names = LARGE[n] or list(cases)
    check_svd(device, torch.stack([cases[name] for name in names]), names)


@pytest.mark.only_on("cuda")
@pytest.mark.parametrize("n", [512, 1024, 2048])
def test_large_matrices(device, n):
    spectrum = 10.0 ** torch.linspace(0, -6, n).double()
    check_svd(device, torch.stack([torch.randn(n, n), of_spectrum(spectrum, n).float()]), ["random", "graded"])


@pytest.mark.parametrize(
    "op, shape, kernels",
    [
        (
            "svd",
            (2, 150, 150),
            [
                "jacobi_scale",
                "jacobi_load",
                "jacobi_gram",
                "jacobi_rotate",
                "jacobi_values",
                "jacobi_store",
                "svd_complete",
                "svd_multiply",
            ],
        ),
        (
            "svd",
            (30, 150, 150),
            [
                "jacobi_scale",
                "jacobi_load",
                "jacobi_round",
                "jacobi_values",
                "jacobi_store",
                "svd_complete",
                "svd_multiply",
            ],
        ),
    ],
)
def test_explain_has_the_steps(op, shape, kernels):
    """The first dispatch of each kernel. In svd the kernels that order columns come first, then QR's."""
    with tuned("baseline"):
        explanation = metalcore.explain(op, shape)
    assert explanation.variant == "blocked"
    found = list(explanation.kernels)
    assert found[found.index(kernels[0]) :] == kernels
    if op == "svd":
        assert found[:3] == ["svd_exponents", "svd_order", "svd_permute"]
