"""metalcore.nn.Linear4bit: its products, and its state_dict, which is bitsandbytes'."""

import json

import pytest
import torch

import metalcore
from metalcore.nn import Linear4bit

KINDS = pytest.mark.parametrize(
    ("type", "block_size", "compress"), [("nf4", 64, False), ("fp4", 128, True), ("nf4", 32, True)]
)


def dense(device, bias=True):
    return torch.nn.Linear(96, 40, bias=bias).to(device)


@KINDS
def test_layer(device, type, block_size, compress):
    """Results, gradients and numbers are those of the functions, and conversions keep the scales' digits."""
    linear = dense(device)
    layer = Linear4bit.from_linear(linear, type, block_size, compress)
    packed, state = metalcore.quantize_4bit(linear.weight.detach(), type, block_size, compress)
    x = torch.randn(3, 96, device=device, requires_grad=True)
    y = layer(x)
    assert torch.equal(y, metalcore.linear_4bit(x, packed, state, linear.bias))
    assert torch.equal(layer.weight, metalcore.dequantize_4bit(packed, state))
    y.sum().backward()
    assert x.grad is not None and layer.bias.grad is not None
    half = layer.half()
    assert half.weight.dtype is half.bias.dtype is torch.float16 and half.absmax.dtype is torch.float32
    assert torch.equal(half.weight, metalcore.dequantize_4bit(packed, state, torch.float16))


@KINDS
def test_state_dict(device, type, block_size, compress):
    """A layer and a model load what was saved; what does not go together is an error."""
    layer = Linear4bit.from_linear(dense(device), type, block_size, compress)
    saved = torch.nn.Sequential(layer).state_dict()
    again = Linear4bit.from_state_dict(saved, "0.")
    x = torch.randn(2, 96, device=device)
    assert torch.equal(again(x), layer(x))
    other = torch.nn.Sequential(Linear4bit.from_linear(dense(device)))
    other.load_state_dict(saved)
    assert torch.equal(other(x), layer(x)) and other[0].packed.device == layer.packed.device


def test_damaged_state_dicts(device):
    layer = torch.nn.Sequential(Linear4bit.from_linear(dense(device, bias=False)))
    saved = dict(layer.state_dict())
    described = next(name for name in saved if "bitsandbytes__" in name)

    def changed(**what):
        of = {**json.loads(bytes(saved[described].tolist())), **what}
        return {**saved, described: torch.tensor(list(json.dumps(of).encode()), dtype=torch.uint8)}

    for damaged, message in (
        ({**saved, "0.weight": saved["0.weight"][1:]}, "packed must have 1920 elements, not 1919"),
        ({**saved, "0.weight.absmax": saved["0.weight.absmax"][1:]}, "absmax must have 60 elements, not 59"),
        ({**saved, described: torch.tensor([7], dtype=torch.uint8)}, "cannot be read"),
        (changed(shape=[-40, -96]), "must have 2 dimensions"),
        (changed(blocksize=63), "no blocks of 63"),
        (changed(dtype="float33"), "cannot be read"),
        ({key: value for key, value in saved.items() if key != "0.weight.absmax"}, "0.weight.absmax"),
    ):
        with pytest.raises(RuntimeError, match=message):
            layer.load_state_dict(damaged)
        with pytest.raises(ValueError, match=message):
            Linear4bit.from_state_dict(damaged, "0.")
    with pytest.raises(RuntimeError, match="shape"):
        layer.load_state_dict(changed(shape=[96, 40]))
    with pytest.raises(RuntimeError, match=r"Unexpected key.*0\.other"):
        layer.load_state_dict({**saved, "0.other": saved["0.weight"]})


@KINDS
def test_bitsandbytes(device, type, block_size, compress):
    """bitsandbytes' own layer reads the state_dict, writes the same one, and has the same numbers."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    saved = Linear4bit.from_linear(dense(device), type, block_size, compress).state_dict()
    theirs = bitsandbytes.nn.Linear4bit(96, 40)
    theirs.weight = bitsandbytes.nn.Params4bit.from_prequantized(
        saved["weight"], {key: saved[key] for key in saved if key.startswith("weight.")}, device=device
    )
    theirs.bias = torch.nn.Parameter(saved["bias"])
    written = theirs.state_dict()
    assert set(written) == set(saved)
    assert all(torch.equal(written[key].cpu(), saved[key].cpu()) for key in saved)
    x = torch.randn(2, 96, device=device)
    assert torch.equal(Linear4bit.from_state_dict(written)(x), theirs(x))
