"""eigh of matrices larger than a threadgroup holds: tridiagonal form, divide and conquer, and back."""

import pytest
import torch
from matrices import EPS, check_below, norm, symmetric, unit
from rows import tuned

import metalcore
from metalcore import _C

eigh = torch.ops.metalcore.eigh


def check(device, A, names, upper=False):
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


def random(n):
    A = torch.randn(1, n, n)
    return A + A.mT


@pytest.mark.parametrize("n, upper", [(129, False), (160, True)])
def test_hard_matrices(device, n, upper):
    cases = symmetric(n)
    check(device, torch.stack(list(cases.values())), list(cases), upper)


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
    check(device, random(n), ["random"], upper=n % 2 == 0)


def test_hard_matrices_in_panels(device, panels):
    cases = symmetric(131)
    check(device, torch.stack(list(cases.values())), list(cases))
    assert "tridiagonal_multiply" in metalcore.explain("eigh", (131, 131)).kernels


def test_blocks_of_reflectors(device):
    """A block has 256 reflectors, and columns more than a threadgroup's threads have at 512."""
    for n in (256, 257, 513):
        check(device, random(n), ["random"])


def test_zero_columns_and_tiny_ones(device, panels):
    """A column of zeros has no reflector, and one whose squares are below float32's range has an orthogonal one."""
    A = torch.zeros(3, 140, 140)
    A[0, 70:, 70:] = random(70)[0]
    A[1] = torch.diag(torch.arange(140.0)) + 1e-25 * random(140)[0]
    A[2] = 1.0
    check(device, A, ["zeros", "tiny", "ones"])


def test_values_alone(device):
    A = random(150)
    L = eigh(A.to(device), "L", False)[0].cpu().double()
    expected = torch.linalg.eigvalsh(A.double())
    assert (L - expected).abs().max() <= 5 * 150 * EPS * expected.abs().max()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_matrix_spoils_its_own_batch_entry_only(device, bad):
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
def test_kernels_are_clean_in_checking_mode(device, panels):
    with metalcore.simulator.checking():
        eigh(random(131).to(device), "L", True)[0].cpu()


@pytest.mark.only_on("cuda")
@pytest.mark.parametrize("n, names", [(512, None), (2048, ["rank-deficient", "graded", "clustered"])])
def test_large_hard_matrices(device, n, names):
    cases = symmetric(n)
    names = names or list(cases)
    with tuned("baseline"):  # which leaves none to PyTorch
        check(device, torch.stack([cases[name] for name in names]), names)


def test_explain_has_the_steps(device):
    with tuned("baseline"):
        explanation = metalcore.explain("eigh", (2, 150, 150))
    assert explanation.variant == "tridiagonal"
    steps = ["tridiagonal_load", "tridiagonal_column_128", "tridiagonal_fill", "reflectors_factor_64"]
    assert [kernel for kernel in explanation.kernels if kernel in steps] == steps
