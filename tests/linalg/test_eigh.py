"""eigh and eigvalsh as replacements for torch.linalg's: arguments, results, layouts, dtypes, errors."""

import random

import pytest
import torch
from matrices import EPS
from opinfo import check_samples
from spectral import LAYOUTS, check_eigh, eigh_condition, placed, same_error, unique_eigh

import metalcore


def test_are_the_namesakes(device):
    assert metalcore.eigh is metalcore.linalg.eigh and metalcore.eigvalsh is metalcore.linalg.eigvalsh
    A = torch.randn(4, 4, device=device)
    result = metalcore.eigh(A, UPLO="U")
    assert isinstance(result, torch.return_types.linalg_eigh)
    assert result[0] is result.eigenvalues and result[1] is result.eigenvectors
    assert torch.equal(metalcore.eigvalsh(A=A), metalcore.eigvalsh(A, "L"))


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


@pytest.mark.parametrize("shape", [(0, 0), (2, 0, 0), (0, 3, 3), (0, 70, 70), (0, 300, 300), (3, 0, 5, 5)])
def test_empty(device, shape):
    A = torch.empty(shape, device=device)
    for ours, theirs in zip(metalcore.eigh(A), torch.linalg.eigh(torch.empty(shape))):
        assert ours.shape == theirs.shape
    assert metalcore.eigvalsh(A).shape == shape[:-1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(device, layout):
    A = LAYOUTS[layout]()
    check_eigh(A, *metalcore.eigh(placed(A, device)))
    check_eigh(A, *metalcore.eigh(placed(A, device), "U"), "U")


def test_out(device):
    A = torch.randn(3, 4, 4, device=device)
    expected = metalcore.eigh(A)
    new = lambda **kwargs: torch.empty(0, **{"device": device, **kwargs})  # noqa: E731
    L, V = torch.empty(3, 8, device=device)[:, ::2], new()
    result = metalcore.eigh(A, out=(L, V))
    assert result.eigenvalues is L and result.eigenvectors is V
    assert torch.equal(L, expected.eigenvalues) and torch.equal(V, expected.eigenvectors)
    values = new()
    assert metalcore.eigvalsh(A, out=values) is values and torch.equal(values, metalcore.eigvalsh(A))
    metalcore.eigh(A, out=(L, A))  # in place of the input
    assert torch.equal(A, expected.eigenvectors)
    with pytest.raises(TypeError, match="expected tuple of 2 elements but got 1"):
        metalcore.eigh(A, out=(new(),))
    with pytest.raises(RuntimeError, match="Expected out tensor to have dtype"):
        metalcore.eigvalsh(A, out=new(dtype=torch.int32))
    with pytest.raises(RuntimeError, match="don't support automatic differentiation"):
        metalcore.eigh(A.requires_grad_(), out=(L, V))


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
