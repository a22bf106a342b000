"""Rows of 2^31 elements and more go to PyTorch's op, since kernels cannot count so many. The tensors have no memory:
they are expanded from one element, or empty."""

import pytest
import torch
import torch.nn.functional as F

import metalcore

LONG = 2**31


class Asked(Exception):
    pass


@pytest.fixture
def torchs(monkeypatch):
    """PyTorch's ops raise Asked, since they would need the memory."""

    def refuse(*args, **kwargs):
        raise Asked

    for where, name in ((torch, "softmax"), (torch, "log_softmax"), (F, "rms_norm")):
        monkeypatch.setattr(where, name, refuse)


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@pytest.mark.parametrize(
    "shape, dim",
    [
        ((LONG,), 0),
        ((LONG,), -1),
        ((1, LONG), 1),
        ((LONG, 1), 0),
        ((LONG, 4), 0),
        ((2, 2 * LONG), -1),
        ((2 * LONG, 2), -1),
    ],
)
def test_softmax(device, torchs, name, shape, dim):
    for dtype in (None, torch.float32):
        x = torch.zeros(1, dtype=torch.float16, device=device).expand(shape)  # .half() would allocate all of it
        with pytest.raises(Asked):
            getattr(metalcore, name)(x, dim, dtype=dtype)


@pytest.mark.parametrize("shape, dims", [((LONG,), 1), ((1, LONG), 1), ((2**16, 2**15), 2), ((2 * LONG, 2), 1)])
def test_rms_norm(device, torchs, shape, dims):
    x = torch.zeros(1, device=device).expand(shape)
    with pytest.raises(Asked):
        metalcore.rms_norm(x, shape[-dims:])


def test_add_rms_norm(device, torchs, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "__add__", lambda a, b: a)  # a sum would need the memory
    x = torch.zeros(1, device=device).expand(LONG)
    with pytest.raises(Asked):
        metalcore.add_rms_norm(x, x)


@pytest.mark.parametrize("shape", [(0, LONG), (0, 3, LONG)])
def test_no_rows_of_that_length(device, shape):
    x = torch.empty(shape, device=device)
    assert metalcore.softmax(x, -1).shape == shape and metalcore.log_softmax(x, -1).shape == shape
    assert metalcore.rms_norm(x, (LONG,)).shape == shape


@pytest.mark.only_on("simulator", "cuda")
@pytest.mark.parametrize("dtype, text", [(torch.float32, "float32"), (torch.bfloat16, "bfloat16")])
def test_out_of_memory_says_how_much_and_where(device, dtype, text):
    x = torch.zeros(1, device=device, dtype=dtype).expand(2**20, 2**24)
    size = 2**44 * x.element_size() / 2**30
    for call in (lambda: metalcore.softmax(x, -1), lambda: metalcore.rms_norm(x, (2**24,))):
        with pytest.raises(RuntimeError) as error:
            call()
        message = str(error.value)
        assert "out of memory." in message and f"{size:.2f} GiB on {device}:0" in message
        assert f"[{2**20}, {2**24}] and dtype {text}" in message
