"""eigh and eigvalsh of one triangle, of PyTorch's samples, and of arguments that PyTorch refuses."""

import random

import pytest
import torch
from matrices import EPS
from opinfo import check_samples
from spectral import check_eigh, eigh_condition, same_error, unique_eigh

import metalcore


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
