"""svd and svdvals: PyTorch's samples, and hard matrices of every size against LAPACK in float64."""

import pytest
import torch
from matrices import EPS, check_below, matrices, norm, unit
from opinfo import check_samples
from rows import FAMILIES, tuned
from spectral import (
    check_named_svd,
    check_svd,
    check_values,
    plan,
    same_error,
    square_boundaries,
    svd,
    svd_condition,
    ten_sizes,
    unique_svd,
)

import metalcore
from metalcore import _C


@pytest.mark.parametrize("full_matrices", [True, False])
@pytest.mark.parametrize(
    "shape",
    [
        (1, 1),
        (5, 5),
        (7, 4),
        (4, 7),
        (2, 3, 20, 12),
        (2, 12, 20),
        (100, 3),
        (3, 100),
        (1, 9),
        (9, 1),
        (5, 40, 40),
        (70, 66),
    ],
)
def test_shapes(device, shape, full_matrices):
    A = torch.randn(shape)
    results = metalcore.svd(A.to(device), full_matrices)
    for ours, theirs in zip(results, torch.linalg.svd(A, full_matrices)):
        assert ours.shape == theirs.shape and ours.dtype == torch.float32 and ours.device.type == device
        assert ours.is_contiguous()
    check_svd(A, *results)
    values = metalcore.svdvals(A.to(device))
    assert (norm((values.cpu() - results.S.cpu()).unsqueeze(-1)) <= 10 * max(shape[-2:]) * EPS * norm(A)).all()


def test_drivers(device):
    A = torch.randn(3, 4, device=device)
    if torch.device(device).type == "cuda":
        for driver in ("gesvd", "gesvdj", "gesvda"):
            assert torch.equal(metalcore.svd(A, driver=driver).S, metalcore.svd(A).S)
            assert torch.equal(metalcore.svdvals(A, driver=driver), metalcore.svdvals(A))
        with pytest.raises(RuntimeError, match="unknown svd driver nope"):
            metalcore.svd(A, driver="nope")
    else:
        for function in ("svd", "svdvals"):
            same_error(
                lambda linalg, device: getattr(linalg, function)(A.to(device), driver="gesvd"),
                metalcore,
                torch.linalg,
                device,
            )
    assert metalcore.svd(A[:0], driver="x").S.shape == (0,)  # as PyTorch, which looks at it later


def test_opinfo_samples(device):
    check_samples(metalcore.svd, "linalg.svd", device, torch.float32, results=unique_svd, condition=svd_condition)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_opinfo_samples_of_svdvals(device, dtype):
    check_samples(metalcore.svdvals, "linalg.svdvals", device, dtype, condition=svd_condition)


@pytest.mark.only_on("simulator")
@pytest.mark.parametrize("shape", [(3, 4, 5), (40, 20), (2, 20, 40)])
def test_kernels_are_clean_in_checking_mode(device, shape):
    A = torch.randn(shape)
    with metalcore.simulator.checking():
        results = metalcore.svd(A.to(device))
        values = metalcore.svdvals(A.to(device))
    check_svd(A, *results)
    assert norm((values.cpu() - results.S.cpu()).unsqueeze(-1)).max() <= 10 * 40 * EPS * norm(A).max()


# Below, at and above every boundary between the variants of the baseline: (m, n) -> variant.
SHAPES = {
    "simd": [
        (1, 1),
        (2, 3),
        (5, 1),
        (8, 8),
        (9, 8),
        (7, 17),
        (16, 16),
        (17, 5),
        (32, 9),
        (30, 32),
        (32, 32),
        (33, 32),
        (50, 3),
        (3, 200),
    ],
    "block": [(33, 33), (64, 40), (64, 64), (65, 64), (48, 100)],
}


# The matrices of sizes whose neighbours have all.
EVERYWHERE = ["random", "rank-deficient", "columns from 1e-30 to 1e30"]


def check(device, A, names, full_matrices=False):
    U, S, Vh = svd(A.to(device), full_matrices, True)
    check_named_svd(A, U.cpu(), S.cpu(), Vh.cpu(), names)
    _, values, _ = svd(A.to(device), False, False)
    A, largest = unit(A)
    check_values(A, values.cpu(), largest, names)


def check_named(device, m, n, full_matrices=False, only=None):
    cases = matrices(m, n)
    names = only or list(cases)
    check(device, torch.stack([cases[name] for name in names]), names, full_matrices)


@pytest.mark.parametrize("variant, m, n", [(variant, *shape) for variant in SHAPES for shape in SHAPES[variant]])
def test_hard_matrices(device, variant, m, n):
    with tuned("baseline"):
        assert plan("baseline", "svd", (m, n))[0] == variant
        check_named(device, m, n)


@pytest.mark.parametrize("m, n", [(3, 2), (2, 3), (20, 5), (5, 30), (40, 12), (60, 40), (1, 9), (100, 1)])
def test_full_matrices(device, m, n):
    check_named(device, m, n, full_matrices=True)


@pytest.mark.parametrize("first", range(1, 131, 10))
def test_every_size(device, first):
    for n, names in ten_sizes(device, first, EVERYWHERE):
        check_named(device, n, n, only=names)


@pytest.mark.parametrize("family", FAMILIES[1:])
def test_where_other_gpus_take_other_kernels(device, family):
    for n in square_boundaries(family, "svd"):
        if plan(family, "svd", (n, n)) != plan("baseline", "svd", (n, n)):
            with tuned(family):
                check_named(device, n, n, only=EVERYWHERE)


def test_rows_and_columns_of_any_magnitude(device):
    """The largest that a threadgroup holds."""
    check_named(device, 128, 128, only=["rows from 1e30 to 1e-30", "columns from 1e-30 to 1e30"])


@pytest.mark.parametrize("m, n", [(8, 8), (16, 12), (32, 32), (40, 10), (64, 64), (70, 70)])
def test_small_singular_values_of_graded_columns(device, m, n):
    """A = B D with well-conditioned B and diagonal D: each singular value to n eps of itself (Demmel and Veselić)."""
    B = torch.linalg.qr(torch.randn(3, m, n).double()).Q + 0.1 * torch.randn(3, m, n).double()
    A = (B * 2.0 ** -torch.arange(n).double().mul(60 / n).round()).float()
    expected = torch.linalg.svdvals(A.double())
    values = svd(A.to(device), False, True)[1].cpu().double()
    scaled = A.double() / torch.linalg.vector_norm(A.double(), dim=-2, keepdim=True)
    bound = 10 * max(m, n) * EPS * torch.linalg.cond(scaled).max()
    assert ((values - expected).abs() / expected).max() <= bound


@pytest.mark.parametrize("batch", [7, 130])
@pytest.mark.parametrize("m, n", [(4, 4), (8, 5), (12, 12), (20, 30)])
def test_many_matrices(device, m, n, batch):
    check(device, torch.randn(batch, m, n), ["random"] * batch)


def test_4096_matrices(device):
    check(device, torch.randn(4096, 4, 4), ["random"] * 4096)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("m, n", [(5, 4), (16, 16), (10, 30), (40, 10), (50, 40), (66, 65)])
def test_a_bad_matrix_spoils_its_own_batch_entry_only(device, m, n, bad):
    A = torch.randn(3, m, n)
    A[1, m - 1, 1] = bad
    results = [x.cpu() for x in svd(A.to(device), False, True)]
    assert all(x[1].isnan().all() for x in results)
    assert svd(A.to(device), False, False)[1].cpu()[1].isnan().all()
    check_named_svd(A[::2], *(x[::2] for x in results), ["random"] * 2)


@pytest.mark.parametrize("n", [6, 20, 40])
def test_the_same_bits_every_time(device, n):
    A = torch.randn(20, n, n, device=device)
    first = svd(A, False, True)
    for one, other in zip(first, svd(A, False, True)):
        assert torch.equal(one, other)
    # The result must not depend on the other matrices in the same simdgroup.
    for one, other in zip(first, svd(A[7:8], False, True)):
        assert torch.equal(one[7:8], other)


@pytest.mark.parametrize("n", [3, 8, 24, 48])
def test_exact_where_nothing_rotates(device, n):
    D = torch.diag(torch.arange(n, 0, -1).float())
    U, S, Vh = (x.cpu() for x in svd(D.to(device), False, True))
    assert torch.equal(S, D.diagonal()) and torch.equal(Vh, torch.eye(n))
    assert norm(U - torch.eye(n)) <= n * EPS


def test_rank_by_the_singular_values(device):
    A = torch.randn(4, 30, 10) @ torch.randn(4, 10, 20)
    _, S, _ = svd(A.to(device), False, True)
    check_below(S.cpu()[:, 10:].amax(-1) / S.cpu()[:, 0], 30 * EPS, "zero singular values", ["rank 10"] * 4)


N = 129


@pytest.fixture(autouse=True)
def polar(device):
    """All matrices of more than 128 columns go by the polar decomposition."""
    _C.use_measured(device, _C.gpu_family(device), [("jacobi", "polar_columns", [1])])
    yield
    _C.use_measured(device, _C.gpu_family(device), [])


def orthogonal(n):
    return torch.linalg.qr(torch.randn(n, n, dtype=torch.float64))[0]


def hard_for_polar():
    """Yields square matrices by name."""
    places, half = torch.arange(N), N // 2
    yield "random", torch.randn(N, N)
    yield "graded", (orthogonal(N) * 10.0 ** (-10 * places / N) @ orthogonal(N)).float()
    yield "rank half", (orthogonal(N)[:, :half] @ orthogonal(N)[:half]).float()
    yield "zero columns", torch.randn(N, N) * (places % 3 > 0)
    yield "identity, then zeros", torch.diag((places < half).float())
    yield "nilpotent", torch.eye(N).roll(1, 0).tril()
    yield "zero", torch.zeros(N, N)
    yield "large", 1e37 * torch.randn(N, N)
    yield "small", 1e-37 * torch.randn(N, N)


def check_polar(A, results, names):
    """Checks results against float64 where the entries differ from the matrix by a few roundings of its norm."""
    U, S, Vh = (result.cpu().double() for result in results)
    A = A.double()
    expected = torch.linalg.svdvals(A)
    norm = expected[:, 0].clamp(min=1e-300)
    k = S.shape[-1]
    # The weight of a step, of up to 90, multiplies roundings, and the product with x divides by its root, about 10.
    bound = (10 + 4 * k**0.5) * EPS
    residual = torch.linalg.matrix_norm((U[..., :k] * S.unsqueeze(-2)) @ Vh[..., :k, :] - A, 2)
    check_below(residual / norm, 4 * bound, "A = U S Vᴴ", names)
    check_below((S - expected).abs().amax(-1) / norm, bound, "S", names)
    for name, Q in (("U", U), ("V", Vh.mT)):
        check_below((Q.mT @ Q - torch.eye(Q.shape[-1])).abs().amax((-2, -1)), bound, f"{name} is orthonormal", names)
    assert (S.diff() <= 0).all() and (S >= 0).all()


def test_hard_matrices_by_polar(device):
    names, A = zip(*hard_for_polar())
    A = torch.stack(A)
    assert metalcore.explain("svd", A.to(device)).variant == "polar"
    check_polar(A, metalcore.svd(A.to(device)), names)


@pytest.mark.parametrize("m, n, full_matrices", [(150, N, False), (150, N, True), (N, 150, False), (N, 150, True)])
def test_tall_and_wide(device, m, n, full_matrices):
    A = torch.randn(1, m, n)
    results = metalcore.svd(A.to(device), full_matrices=full_matrices)
    check_polar(A, results, ["random"])
    values = metalcore.svdvals(A.to(device)).cpu()
    torch.testing.assert_close(values, results[1].cpu(), rtol=0, atol=64 * EPS * float(values[0, 0]))


def test_a_bad_matrix_spoils_no_other_by_polar(device):
    A = torch.randn(2, N, N)
    A[1, 4, 2] = torch.nan
    results = metalcore.svd(A.to(device))
    check_polar(A[:1], [result[:1] for result in results], ["random"])
    assert all(result[1].isnan().all() for result in results)
