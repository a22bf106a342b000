"""Functions that raise find out that a matrix of a batch failed."""

import pytest
import torch
from references import assert_same_error
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import metalcore

BLOCK = 4096  # the number of infos that a threadgroup reads
info_any = torch.ops.metalcore.info_any


@pytest.mark.parametrize("count", [1, 2, 31, 33, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5, BLOCK**2, BLOCK**2 + 1])
def test_a_single_failure_is_found_wherever_it_is(device, count):
    info = torch.zeros(count, dtype=torch.int32, device=device)
    assert info_any(info).shape == () and info_any(info).item() == 0
    for failed in {0, count // 2, count - 1, min(count - 1, BLOCK), min(count, BLOCK) - 1}:
        for code in (1, -3):
            info[failed] = code
            assert info_any(info).item() != 0
        info[failed] = 0
    assert info_any(info).item() == 0


def test_infos_of_any_shape(device):
    for shape in ((), (0,), (2, 0), (3, 5)):
        assert info_any(torch.zeros(shape, dtype=torch.int32, device=device)).item() == 0
    strided = torch.zeros(50, 60, dtype=torch.int32, device=device)
    strided[0, 0] = 1
    assert info_any(strided[1:, 1::2].mT).item() == 0
    strided[1, 1] = 1
    assert info_any(strided[1:, 1::2].mT).item() != 0
    with pytest.raises(RuntimeError, match="info_any: info must be int32, not float32"):
        info_any(torch.zeros(3, device=device))


@pytest.mark.parametrize("where", ["cpu", "device"])
def test_opcheck(device, where):
    info = torch.tensor([0, 2, 0], dtype=torch.int32, device=device if where == "device" else where)
    torch.library.opcheck(info_any.default, (info,))
    assert info_any(info).item() != 0 and info_any(0 * info).item() == 0


@pytest.mark.parametrize("batch", [1, 7, 5000])
@pytest.mark.parametrize("name", ["inv", "solve", "lu_factor", "cholesky"])
def test_the_last_of_many_matrices_raises_torchs_error(device, batch, name):
    A = 2 * torch.eye(3).repeat(batch, 1, 1)
    inputs = (A, torch.ones(batch, 3, 1)) if name == "solve" else (A,)
    getattr(metalcore, name)(*[tensor.to(device) for tensor in inputs])
    A[-1, 2, 2] = 0
    assert_same_error(
        lambda: getattr(metalcore, name)(*[tensor.to(device) for tensor in inputs]),
        lambda: getattr(torch.linalg, name)(*inputs),
    )


def test_the_error_has_its_place_in_graphs(device):
    A = torch.eye(3, device=device).repeat(2, 1, 1)
    graph = make_fx(lambda A: metalcore.inv(A))(A)
    assert torch.equal(graph(2 * A).cpu(), A.cpu() / 2)
    with pytest.raises(torch.linalg.LinAlgError):
        graph(0 * A)
    with FakeTensorMode() as mode:
        assert metalcore.inv(mode.from_tensor(A)).shape == A.shape
