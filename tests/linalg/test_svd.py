"""svd and svdvals of every shape and of PyTorch's samples; drivers."""

import pytest
import torch
from matrices import EPS, norm
from opinfo import check_samples
from spectral import check_svd, same_error, svd_condition, unique_svd

import metalcore


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
