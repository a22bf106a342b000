"""svd and svdvals as replacements for torch.linalg's: arguments, results, layouts, dtypes, errors."""

import pytest
import torch
from matrices import EPS, norm
from opinfo import check_samples
from spectral import LAYOUTS, check_svd, placed, same_error, svd_condition, unique_svd

import metalcore


def test_are_the_namesakes(device):
    assert metalcore.svd is metalcore.linalg.svd and metalcore.svdvals is metalcore.linalg.svdvals
    A = torch.randn(4, 3, device=device)
    result = metalcore.svd(A)
    assert isinstance(result, torch.return_types.linalg_svd)
    assert result[0] is result.U and result[1] is result.S and result[2] is result.Vh
    assert torch.equal(metalcore.svdvals(A=A), metalcore.svdvals(A))


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


@pytest.mark.parametrize("full_matrices", [True, False])
@pytest.mark.parametrize(
    "shape", [(0, 3), (3, 0), (0, 0), (2, 0, 3), (2, 3, 0), (0, 3, 2), (0, 0, 0), (0, 70, 70), (0, 300, 300)]
)
def test_empty(device, shape, full_matrices):
    A = torch.empty(shape, device=device)
    for ours, theirs in zip(metalcore.svd(A, full_matrices), torch.linalg.svd(torch.empty(shape), full_matrices)):
        assert ours.shape == theirs.shape
        assert torch.equal(ours.cpu(), theirs)  # the identity, where A has no rows or no columns
    assert metalcore.svdvals(A).shape == torch.linalg.svdvals(torch.empty(shape)).shape


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(device, layout):
    A = LAYOUTS[layout]()
    results = metalcore.svd(placed(A, device), full_matrices=False)
    check_svd(A, *results)
    values = metalcore.svdvals(placed(A, device)).cpu().double()
    expected = torch.linalg.svdvals(A.double())
    assert ((values - expected).abs() <= 5 * max(8, *A.shape[-2:]) * EPS * expected[..., :1]).all()


def test_out(device):
    A = torch.randn(3, 6, 4, device=device)
    expected = metalcore.svd(A, False)
    new = lambda **kwargs: torch.empty(0, **{"device": device, **kwargs})  # noqa: E731
    U, S, Vh = new(), torch.empty(3, 8, device=device)[:, ::2], new()
    result = metalcore.svd(A, False, out=(U, S, Vh))
    assert result.U is U and result.S is S and result.Vh is Vh
    assert torch.equal(U, expected.U) and torch.equal(S, expected.S) and torch.equal(Vh, expected.Vh)
    values = new()
    assert metalcore.svdvals(A, out=values) is values and torch.equal(values, metalcore.svdvals(A))
    with pytest.raises(TypeError, match="expected tuple of 3 elements but got 1"):
        metalcore.svd(A, out=(new(),))
    with pytest.raises(RuntimeError, match="Expected out tensor to have dtype"):
        metalcore.svdvals(A, out=new(dtype=torch.int32))
    with pytest.raises(RuntimeError, match="don't support automatic differentiation"):
        metalcore.svdvals(A.requires_grad_(), out=values)


@pytest.mark.parametrize(
    "call",
    [
        lambda linalg, device: linalg.svd(torch.randn(3, device=device)),
        lambda linalg, device: linalg.svd(torch.tensor(1.0, device=device)),
        lambda linalg, device: linalg.svdvals(torch.randn(3, device=device)),
        lambda linalg, device: linalg.svd(torch.ones(3, 3, dtype=torch.int32, device=device)),
        lambda linalg, device: linalg.svd([1.0]),
        lambda linalg, device: linalg.svd(None),
    ],
)
def test_errors_are_torchs(device, call):
    same_error(call, metalcore, torch.linalg, device)


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
