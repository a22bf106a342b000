"""Tensors of the simulated device: creation, copies, views, mutation and refusals; saving and loading them, and
feeding them from a DataLoader."""

import copy
import io
import pickle

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def same(actual, expected):
    assert actual.device.type == "mps"
    torch.testing.assert_close(actual.detach().cpu(), expected, rtol=0, atol=0)


FACTORIES = {
    "zeros": lambda d: torch.zeros(2, 3, device=d),
    "ones": lambda d: torch.ones(2, device=d, dtype=torch.int64),
    "full": lambda d: torch.full((2, 2), 3.5, device=d),
    "arange": lambda d: torch.arange(10, device=d),
    "linspace": lambda d: torch.linspace(0, 1, 7, device=d),
    "eye": lambda d: torch.eye(4, device=d),
    "tensor": lambda d: torch.tensor([[1, 2], [3, 4.0]], device=d),
    "scalar": lambda d: torch.tensor(3, device=d),
    "empty": lambda d: torch.empty(0, device=d),
    "tril_indices": lambda d: torch.tril_indices(3, 3, device=d),
    "complex": lambda d: torch.complex(torch.ones(2, device=d), torch.zeros(2, device=d)),
    "numpy": lambda d: torch.as_tensor(numpy.arange(5, dtype="float32"), device=d),
    "new_ones": lambda d: torch.zeros(4, device=d).new_ones(3),
    "hann_window": lambda d: torch.hann_window(5, device=d),
    "bfloat16": lambda d: torch.ones(3, device=d, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("create", FACTORIES.values(), ids=FACTORIES)
def test_creation(create):
    same(create("mps"), create("cpu"))


def test_copies_between_devices_keep_values_and_strides():
    x = torch.randn(3, 4)
    y = x.to("mps")
    same(y, x)
    assert y.to("mps") is y and y.to("mps:0") is y
    assert torch.equal(y.to("cpu", torch.float16), x.half())
    same(x.to("mps", torch.bfloat16, non_blocking=True), x.bfloat16())
    transposed = x.t().to("mps")
    assert transposed.stride() == x.t().stride()
    same(transposed, x.t())
    z = torch.zeros(4, 3, device="mps")
    z.t().copy_(y)
    same(z, x.t())
    w = torch.empty(3, 4)
    assert torch.equal(w.copy_(y), x)
    assert torch.equal(x.to("mps").expand(2, 3, 4).cpu(), x.expand(2, 3, 4))
    assert y[1].data_ptr() == y.data_ptr() + 16


def test_conjugate_views_are_copied_as_such():
    c = torch.randn(3, dtype=torch.complex64)
    same(c.to("mps").conj().clone(), c.conj().clone())
    assert torch.equal(c.to("mps").conj().cpu(), c.conj())
    same(c.to("mps").imag, c.imag)


def test_host_access():
    x = torch.arange(3.0, device="mps")
    assert x.tolist() == [0, 1, 2] and x[1].item() == 1 and bool(x.sum() > 2)
    assert repr(x) == "tensor([0., 1., 2.], device='mps:0')"
    with pytest.raises(TypeError, match="can't convert mps:0 device type tensor to numpy"):
        x.numpy()


def mutate_views(device):
    x = torch.arange(24.0, device=device).view(2, 3, 4)
    x.transpose(0, 2)[1:3].mul_(2)
    x[:, 1] = 7
    x.view(-1)[3:5].fill_(9)
    x.unfold(2, 2, 1).add_(1)
    x.select(1, 2).sub_(x.select(1, 0))
    x[x > 20] = -1
    x.diagonal(0, 0, 1).add_(5)
    x[:, [0, 2]] += 100
    x.permute(2, 0, 1).narrow(0, 0, 2).clamp_(max=50)
    torch.split(x, 2, 2)[1].neg_()
    x.view(torch.int32)[0, 0, 0] = 5
    x.movedim(0, 1).chunk(2)[0].mul_(3)
    return x


def test_mutation_through_views():
    same(mutate_views("mps"), mutate_views("cpu"))


def test_views_know_their_base_and_version():
    a = torch.zeros(3, device="mps")
    a[1:].add_(1)
    assert a._version == 1 and a[1:]._base is a and a.view(3, 1)._is_view()
    x = torch.zeros(3, device="mps", requires_grad=True)
    b = x * 1
    b[1:].add_(1)
    b[0] = 5
    b.sum().backward()
    same(x.grad, torch.tensor([0.0, 1, 1]))


def test_out_arguments_grow_and_keep_their_identity():
    out = torch.empty(0, device="mps")
    result = torch.add(torch.ones(3, device="mps"), 1, out=out)
    assert result is out
    view = out.view(3)
    out.add_(1)
    same(view, torch.full((3,), 3.0))
    values, indices = torch.empty(0, device="mps"), torch.empty(0, dtype=torch.long, device="mps")
    torch.max(torch.arange(6.0, device="mps").view(2, 3), 1, out=(values, indices))
    same(values, torch.tensor([2.0, 5]))
    target = torch.zeros(4, device="mps")
    torch.mm(torch.ones(1, 3, device="mps"), torch.ones(3, 2, device="mps"), out=target[:2].view(1, 2))
    same(target, torch.tensor([3.0, 3, 0, 0]))


def test_storages_are_resized_and_exchanged():
    x = torch.arange(6.0, device="mps")
    x.resize_(20)
    assert x.numel() == 20
    same(x[:6], torch.arange(6.0))
    x.set_(torch.ones(4, device="mps"))
    same(x, torch.ones(4))
    assert x.set_().numel() == 0


def test_overlapping_memory_is_detected():
    x = torch.arange(5.0, device="mps")
    with pytest.raises(RuntimeError, match="unsupported operation"):
        torch.mul(x[1:], 2, out=x[:-1])
    with pytest.raises(RuntimeError, match="unsupported operation"):
        x.unsqueeze(0).expand(2, 5).add_(1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(2, dtype=torch.float64, device="mps"),
        lambda: torch.ones(2, dtype=torch.float64).to("mps"),
        lambda: torch.ones(2, device="mps").double(),
        lambda: torch.ones(2, device="mps").sum(dtype=torch.float64),
        lambda: torch.zeros(2, dtype=torch.complex128, device="mps"),
    ],
    ids=["factory", "to", "double", "reduction", "complex"],
)
def test_float64_is_refused(make):
    with pytest.raises(TypeError, match="MPS framework doesn't support float64"):
        make()


@pytest.mark.parametrize(
    "mix",
    [
        lambda: torch.ones(2, device="mps") + torch.ones(2),
        lambda: torch.ones(2, 2, device="mps") @ torch.ones(2, 2),
        lambda: torch.nn.functional.linear(torch.ones(2, 2), torch.ones(2, 2, device="mps")),
        lambda: torch.cat([torch.ones(2), torch.ones(2, device="mps")]),
        lambda: torch.nn.functional.embedding(torch.tensor([0]), torch.ones(2, 2, device="mps")),
    ],
    ids=["add", "matmul", "linear", "cat", "embedding"],
)
def test_mixed_devices_are_refused(mix):
    with pytest.raises(RuntimeError, match="device"):
        mix()


def test_scalars_and_indices_may_come_from_the_cpu():
    x = torch.arange(6.0, device="mps")
    same(x + torch.tensor(1.0), torch.arange(6.0) + 1)
    assert (x * torch.tensor(2.0, dtype=torch.float64)).dtype == torch.float32
    same(x[torch.tensor([0, 2])], torch.tensor([0.0, 2]))


def test_what_has_no_kernel_says_so():
    with pytest.raises(NotImplementedError, match="strided"):
        torch.eye(3, device="mps").to_sparse()
    library = torch.library.Library("metalcore_tests", "DEF")
    library.define("cpu_only(Tensor x) -> Tensor")
    library.impl("cpu_only", lambda x: x + 1, "CPU")
    with pytest.raises(NotImplementedError, match="'MPS' backend"):
        torch.ops.metalcore_tests.cpu_only(torch.ones(2, device="mps"))


def test_pytorch_operators_can_be_replaced_and_restored():
    x = torch.randn(5, device="mps")
    expected = torch.nn.functional.silu(x)
    library = torch.library.Library("aten", "IMPL")
    library.impl("silu", lambda x: torch.full_like(x, 42), "MPS")
    same(torch.nn.functional.silu(x), torch.full((5,), 42.0))
    library._destroy()
    assert torch.equal(torch.nn.functional.silu(x), expected)


@pytest.mark.parametrize(
    "location, device",
    [(None, "mps"), ("cpu", "cpu"), ("mps", "mps"), (torch.device("mps"), "mps"), ({"mps": "cpu"}, "cpu")],
    ids=str,
)
def test_save_and_load(location, device):
    model, x = nn.Linear(3, 3).to("mps"), torch.randn(6, device="mps")
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "x": x, "view": x[2:]}, file)
    file.seek(0)
    loaded = torch.load(file, map_location=location)
    assert loaded["x"].device.type == device and torch.equal(loaded["x"].cpu(), x.cpu())
    loaded["x"][3] = 9
    assert loaded["view"][1].item() == 9
    model.load_state_dict(loaded["model"])


def test_load_onto_the_device():
    file = io.BytesIO()
    torch.save(torch.ones(3), file)
    file.seek(0)
    assert torch.load(file, map_location="mps").is_mps


def test_deepcopy_and_pickle():
    model = nn.Linear(3, 3).to("mps")
    twin = copy.deepcopy(model)
    assert twin.weight.is_mps and twin.weight.data_ptr() != model.weight.data_ptr()
    assert torch.equal(twin.weight, model.weight)
    assert torch.equal(pickle.loads(pickle.dumps(model.weight)), model.weight)


def test_storages():
    storage = torch.UntypedStorage(8, device="mps")
    assert storage.device.type == "mps" and storage.nbytes() == 8
    assert list(torch.UntypedStorage([1, 2, 3], device="mps").cpu()) == [1, 2, 3]
    assert torch.UntypedStorage(4).device.type == "cpu"
    assert torch.UntypedStorage(4, device="meta").device.type == "meta"
    assert torch.ones(2).untyped_storage().mps().device.type == "mps"


def test_safetensors(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file({"a": torch.arange(4.0, device="mps")}, tmp_path / "a.safetensors")
    loaded = safetensors.load_file(tmp_path / "a.safetensors", device="mps")["a"]
    assert loaded.is_mps and loaded.tolist() == [0, 1, 2, 3]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"pin_memory": True}], ids=str)
def test_data_loader(options):
    data = torch.arange(20.0).view(10, 2)
    batches = [
        batch.to("mps", non_blocking=True) for (batch,) in DataLoader(TensorDataset(data), batch_size=3, **options)
    ]
    assert torch.equal(torch.cat(batches).cpu(), data)
