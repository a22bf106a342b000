"""eigh and eigvalsh: PyTorch's samples and errors, and hard matrices of every size against LAPACK in float64."""

import random

import pytest
import torch
from matrices import EPS, check_below, norm, symmetric, unit
from opinfo import check_samples
from rows import FAMILIES, tuned
from spectral import (
    check_eigenvalues,
    check_eigh,
    check_named_eigh,
    eigh,
    eigh_condition,
    plan,
    same_error,
    square_boundaries,
    ten_sizes,
    unique_eigh,
)

import metalcore
from metalcore import _C


@pytest.mark.parametrize(
    "shape, UPLO",
    [(shape, UPLO) for shape in [(1, 1), (5, 5), (2, 3, 12, 12), (9, 33, 33), (70, 70)] for UPLO in "LU"]
    + [((5, 5), "l"), ((5, 5), "u")],
)
def test_reads_one_triangle(device, shape, UPLO):
    A = torch.randn(shape)
    # A read of the other triangle would show in the result.
    A = (
        A.tril() + torch.full(shape, float("nan")).triu(1)
        if UPLO in "Ll"
        else A.triu() + torch.full(shape, float("nan")).tril(-1)
    )
    results = metalcore.eigh(A.to(device), UPLO)
    for ours, size in zip(results, (shape[:-1], shape)):
        assert ours.shape == size and ours.dtype == torch.float32 and ours.is_contiguous()
    clean = A.nan_to_num()
    check_eigh(clean, *results, UPLO.upper())
    values = metalcore.eigvalsh(A.to(device), UPLO).cpu().double()
    expected = torch.linalg.eigvalsh(clean.double(), UPLO)
    assert ((values - expected).abs() <= 5 * max(8, shape[-1]) * EPS * expected.abs().amax(-1, keepdim=True)).all()


@pytest.mark.parametrize(
    "call",
    [
        lambda linalg, device: linalg.eigh(torch.randn(3, 4, device=device)),
        lambda linalg, device: linalg.eigh(torch.randn(0, 4, device=device)),
        lambda linalg, device: linalg.eigvalsh(torch.randn(2, 4, 3, device=device)),
        lambda linalg, device: linalg.eigh(torch.randn(3, device=device)),
        lambda linalg, device: linalg.eigvalsh(torch.tensor(1.0, device=device)),
        lambda linalg, device: linalg.eigh(torch.randn(3, 3, device=device), "x"),
        lambda linalg, device: linalg.eigh(torch.randn(3, 3, device=device), "LU"),
        lambda linalg, device: linalg.eigvalsh(torch.randn(0, 0, device=device), ""),
        lambda linalg, device: linalg.eigh(torch.ones(3, 3, dtype=torch.int32, device=device)),
        lambda linalg, device: linalg.eigh([1.0]),
    ],
)
def test_errors_are_torchs(device, call):
    same_error(call, metalcore, torch.linalg, device)


def test_opinfo_samples(device):
    random.seed(0)  # the samples choose UPLO by it
    check_samples(metalcore.eigh, "linalg.eigh", device, torch.float32, results=unique_eigh, condition=eigh_condition)


def test_opinfo_samples_of_eigvalsh(device):
    random.seed(0)
    check_samples(metalcore.eigvalsh, "linalg.eigvalsh", device, torch.float32, condition=eigh_condition)


@pytest.mark.only_on("simulator")
@pytest.mark.parametrize("shape", [(3, 4, 4), (2, 20, 20), (40, 40)])
def test_kernels_are_clean_in_checking_mode(device, shape):
    A = torch.randn(shape)
    with metalcore.simulator.checking():
        results = metalcore.eigh(A.to(device))
        metalcore.eigvalsh(A.to(device))
    check_eigh(A, *results)


SIZES = {"simd": [1, 2, 8, 9, 16, 17, 32], "block": [33, 64]}


# The matrices of sizes whose neighbours have all.
EVERYWHERE = ["random", "rank-deficient", "graded"]


def check(device, A, names):
    L, V = eigh(A.to(device), "L", True)
    check_named_eigh(A, L.cpu(), V.cpu(), names)
    L, _ = eigh(A.to(device), "U", False)
    A, largest = unit(A)
    check_eigenvalues(A, L.cpu(), largest, names)


def check_named(device, n, only=None):
    cases = symmetric(n)
    names = only or list(cases)
    check(device, torch.stack([cases[name] for name in names]), names)


@pytest.mark.parametrize("variant, n", [(variant, n) for variant in SIZES for n in SIZES[variant]])
def test_hard_matrices(device, variant, n):
    with tuned("baseline"):
        assert plan("baseline", "eigh", (n, n))[0] == variant
        check_named(device, n)


@pytest.mark.parametrize("first", range(1, 131, 10))
def test_every_size(device, first):
    for n, names in ten_sizes(device, first, EVERYWHERE):
        check_named(device, n, only=names)


@pytest.mark.parametrize("family", FAMILIES[1:])
def test_where_other_gpus_take_other_kernels(device, family):
    for n in square_boundaries(family, "eigh"):
        if plan(family, "eigh", (n, n)) != plan("baseline", "eigh", (n, n)):
            with tuned(family):
                check_named(device, n, only=EVERYWHERE)


def test_the_largest_that_a_threadgroup_holds(device):
    check_named(device, 128, only=["clustered", "plus and minus one", "graded", "all about 1e30"])


@pytest.mark.parametrize("batch", [7, 130])
@pytest.mark.parametrize("n", [4, 8, 12, 20])
def test_many_matrices(device, n, batch):
    A = torch.randn(batch, n, n)
    check(device, A + A.mT, ["random"] * batch)


def test_4096_matrices(device):
    A = torch.randn(4096, 4, 4)
    check(device, A + A.mT, ["random"] * 4096)


@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize("n", [3, 16, 40])
def test_reads_the_triangle_that_is_named(device, n, upper):
    A = torch.randn(2, n, n)
    whole = A.triu() + A.triu(1).mT if upper else A.tril() + A.tril(-1).mT
    other = torch.where(torch.ones(n, n).tril(-1).bool() if upper else torch.ones(n, n).triu(1).bool(), float("nan"), A)
    L, V = eigh(other.mT.contiguous().mT.to(device), "U" if upper else "L", True)
    check_named_eigh(whole, L.cpu(), V.cpu(), ["random"] * 2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("n", [2, 5, 16, 30, 50, 70])
def test_a_bad_matrix_spoils_its_own_batch_entry_only(device, n, bad):
    A = torch.randn(3, n, n)
    A = A + A.mT
    A[1, n - 1, 0] = bad
    L, V = (x.cpu() for x in eigh(A.to(device), "L", True))
    assert L[1].isnan().all() and V[1].isnan().all()
    check_named_eigh(A[::2], L[::2], V[::2], ["random"] * 2)


@pytest.mark.parametrize("n", [6, 20, 40])
def test_the_same_bits_every_time(device, n):
    A = torch.randn(20, n, n, device=device)
    first = eigh(A, "L", True)
    for one, other in zip(first, eigh(A, "L", True)):
        assert torch.equal(one, other)
    # The result must not depend on the other matrices in the same simdgroup.
    for one, other in zip(first, eigh(A[7:8], "L", True)):
        assert torch.equal(one[7:8], other)


@pytest.mark.parametrize("n", [1, 8, 24, 48])
def test_of_zeros(device, n):
    L, V = (x.cpu() for x in eigh(torch.zeros(2, n, n, device=device), "L", True))
    assert not L.any()
    assert torch.equal(V.abs().sum(-1), torch.ones(2, n)) and (V.mT @ V - torch.eye(n)).abs().max() <= n * EPS


def check_large(device, A, names, upper=False):
    """The other triangle of each matrix holds NaN."""
    n = A.shape[-1]
    other = torch.full((n, n), float("nan"))
    given = A.triu() + other.tril(-1) if upper else A.tril() + other.triu(1)
    L, V = (x.cpu().double() for x in eigh(given.to(device), "U" if upper else "L", True))
    D, largest = unit(A)
    L = L / largest[..., 0]
    expected = torch.linalg.eigvalsh(D)
    size = expected.abs().amax(-1).clamp(min=1e-300)
    check_below((L - expected).abs().amax(-1) / size, 5 * n * EPS, "eigenvalues", names)
    check_below(norm(V.mT @ V - torch.eye(n)), 10 * n * EPS, "orthogonality", names)
    check_below(norm(D @ V - V * L[..., None, :]) / norm(D).clamp(min=1e-300), 10 * n * EPS, "residual", names)
    assert (L.diff() >= 0).all()


def random_symmetric(n):
    A = torch.randn(1, n, n)
    return A + A.mT


@pytest.mark.parametrize("n, upper", [(129, False), (160, True)])
def test_hard_large_matrices(device, n, upper):
    cases = symmetric(n)
    check_large(device, torch.stack(list(cases.values())), list(cases), upper)


@pytest.fixture
def panels(device):
    """All matrices are reduced in panels of 8 columns, as far as there are more than 9."""
    rows = [("tridiagonalize", "panels_above", [9]), ("tridiagonalize", "panel_columns", [8])]
    _C.use_measured(device, _C.gpu_family(device), rows)
    yield
    _C.use_measured(device, _C.gpu_family(device), [])


# A square of the matrix has 128 rows, a threadgroup 63 rows of a column, and the last columns begin at a multiple of 8.
@pytest.mark.parametrize("n", [129, 130, 137, 190, 191, 257, 258])
def test_panels(device, panels, n):
    check_large(device, random_symmetric(n), ["random"], upper=n % 2 == 0)


def test_hard_matrices_in_panels(device, panels):
    cases = symmetric(131)
    check_large(device, torch.stack(list(cases.values())), list(cases))
    assert "tridiagonal_multiply" in metalcore.explain("eigh", (131, 131)).kernels


def test_blocks_of_reflectors(device):
    """A block has 256 reflectors, and columns more than a threadgroup's threads have at 512."""
    for n in (256, 257, 513):
        check_large(device, random_symmetric(n), ["random"])


def test_zero_columns_and_tiny_ones(device, panels):
    """A column of zeros has no reflector, and one whose squares are below float32's range has an orthogonal one."""
    A = torch.zeros(3, 140, 140)
    A[0, 70:, 70:] = random_symmetric(70)[0]
    A[1] = torch.diag(torch.arange(140.0)) + 1e-25 * random_symmetric(140)[0]
    A[2] = 1.0
    check_large(device, A, ["zeros", "tiny", "ones"])


def test_values_alone(device):
    A = random_symmetric(150)
    L = eigh(A.to(device), "L", False)[0].cpu().double()
    expected = torch.linalg.eigvalsh(A.double())
    assert (L - expected).abs().max() <= 5 * 150 * EPS * expected.abs().max()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_large_matrix_spoils_its_own_batch_entry_only(device, bad):
    A = torch.randn(3, 140, 140)
    spoilt = A.clone()
    spoilt[1, 70, 3] = bad
    for expected, actual in zip(eigh(A.to(device), "L", True), eigh(spoilt.to(device), "L", True)):
        assert actual[1].isnan().all()
        assert torch.equal(actual[[0, 2]], expected[[0, 2]])


def test_the_same_bits(device):
    A = torch.randn(3, 140, 140).to(device)
    for first, second in zip(eigh(A, "U", True), eigh(A, "U", True)):
        assert torch.equal(first, second)


@pytest.mark.only_on("simulator")
def test_kernels_of_large_matrices_are_clean_in_checking_mode(device, panels):
    with metalcore.simulator.checking():
        eigh(random_symmetric(131).to(device), "L", True)[0].cpu()


@pytest.mark.only_on("cuda")
@pytest.mark.parametrize("n, names", [(512, None), (2048, ["rank-deficient", "graded", "clustered"])])
def test_large_hard_matrices(device, n, names):
    cases = symmetric(n)
    names = names or list(cases)
    with tuned("baseline"):  # which leaves none to PyTorch
        check_large(device, torch.stack([cases[name] for name in names]), names)


def test_explain_has_the_steps(device):
    with tuned("baseline"):
        explanation = metalcore.explain("eigh", (2, 150, 150))
    assert explanation.variant == "tridiagonal"
    steps = ["tridiagonal_load", "tridiagonal_column_128", "tridiagonal_fill", "reflectors_factor_64"]
    assert [kernel for kernel in explanation.kernels if kernel in steps] == steps
