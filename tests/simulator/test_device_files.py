"""Saving, loading and copying tensors of the simulated device, and feeding them from a DataLoader."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


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
