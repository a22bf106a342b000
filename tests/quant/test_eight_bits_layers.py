"""Linear8bitLt: bit for bit as bitsandbytes' layer, and with its state_dict."""

import pytest
import torch

import metalcore
from metalcore.quant._int8 import int8_product, rows_in_int8

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@pytest.mark.parametrize("shape", [(1, 1), (3, 1024), (5, 1025), (2, 3000), (17, 2048)])
def test_products_are_exact(device, shape):
    a, b = (torch.randint(-128, 128, of, dtype=torch.int8) for of in (shape, (8, shape[1])))
    a[0], b[0] = -128, -128  # the largest sum
    found = int8_product(a.to(device), b.to(device))
    assert found.dtype is torch.int32 and torch.equal(found.cpu().long(), a.long() @ b.long().T)


@pytest.mark.only_on("simulator", "mps")
@pytest.mark.parametrize("threshold", [0.0, 6.0])
def test_as_bitsandbytes(device, threshold):
    """Results, gradients and state_dicts, with outliers, zeros and one row."""
    bnb = pytest.importorskip("bitsandbytes")
    linear = torch.nn.Linear(72, 40).half()
    theirs = bnb.nn.Linear8bitLt(72, 40, has_fp16_weights=False, threshold=threshold)
    theirs.load_state_dict(linear.state_dict())
    theirs = theirs.to(device)
    theirs(torch.ones(1, 72, dtype=torch.float16, device=device))
    ours = metalcore.nn.Linear8bitLt.from_linear(linear.to(device), threshold)
    assert torch.equal(ours.packed.cpu(), theirs.weight.data.cpu())
    assert torch.equal(ours.scales.cpu(), theirs.state.SCB.cpu())
    for rows in (1, 5):
        x = torch.randn(2, rows, 72, dtype=torch.float16)
        x[0, 0, [3, 70]], x[1, -1] = torch.tensor([7.0, -9.0]).half(), 0
        given = [x.to(device).requires_grad_() for _ in range(2)]
        found, expected = ours(given[0]), theirs(given[1])
        assert torch.equal(found, expected)
        grad = torch.randn_like(found)
        found.backward(grad)
        expected.backward(grad)
        assert torch.equal(given[0].grad, given[1].grad)
    names = {name: tensor.shape for name, tensor in theirs.state_dict().items()}
    assert {name: tensor.shape for name, tensor in ours.state_dict().items()} == names
    again = metalcore.nn.Linear8bitLt.from_state_dict(theirs.state_dict(), threshold=threshold).to(device)
    assert torch.equal(again(given[0]), ours(given[0]))
    zeroed = metalcore.nn.Linear8bitLt(torch.zeros_like(ours.packed), ours.scales * 0, ours.bias, threshold)
    zeroed.load_state_dict(theirs.state_dict())
    assert torch.equal(zeroed(given[0]), ours(given[0]))


def test_accuracy_and_dtypes(device):
    """Within half a step of 8 bits for each factor; scales keep their digits in other dtypes."""
    linear = torch.nn.Linear(96, 24).to(device)
    layer = metalcore.nn.Linear8bitLt.from_linear(linear, 3.0).bfloat16()
    assert layer.scales.dtype is torch.float32 and layer.weight.dtype is torch.bfloat16
    for dtype in DTYPES:
        x = torch.randn(4, 96, device=device).to(dtype)
        found = layer.to(dtype)(x)
        assert found.dtype is dtype and "threshold=3.0" in repr(layer)
        expected = x.float() @ linear.weight.T + linear.bias
        steps = x.float().abs().amax() / 127 * linear.weight.abs().sum(1)
        steps = steps + x.float().abs().sum(1, keepdim=True) * layer.scales / 127
        rest = 4 * torch.finfo(torch.bfloat16).eps * (expected.abs() + 1)
        assert ((found.float() - expected).abs() <= 0.51 * steps + rest).all()
    assert layer(torch.zeros(0, 96, device=device, dtype=torch.float32)).shape == (0, 24)
    packed, scales, columns = rows_in_int8(torch.zeros(2, 8, device=device, dtype=torch.float16), 1.0)
    assert packed.eq(0).all() and scales.eq(0).all() and columns.numel() == 0


def test_damaged():
    layer = metalcore.nn.Linear8bitLt.from_linear(torch.nn.Linear(32, 4))
    state = layer.state_dict()
    make = metalcore.nn.Linear8bitLt.from_state_dict
    with pytest.raises(ValueError, match="the state_dict has no SCB"):
        make({name: tensor for name, tensor in state.items() if name != "SCB"})
    with pytest.raises(ValueError, match=r"SCB must be float32 with 4 elements, not torch.float32 \[3\]"):
        make(state | {"SCB": state["SCB"][:3]})
    with pytest.raises(ValueError, match="the weight must be int8 with 2 dimensions, not torch.uint8"):
        make(state | {"weight": state["weight"].view(torch.uint8)})
    with pytest.raises(ValueError, match="weight_format must be 0, for rows, and is 2"):
        make(state | {"weight_format": torch.tensor(2)})
    with pytest.raises(RuntimeError, match=r"weight has shape \[4, 31\], and the layer's is \[4, 32\]"):
        layer.load_state_dict(state | {"weight": state["weight"][:, 1:]})
    with pytest.raises(RuntimeError, match="Missing key"):
        layer.load_state_dict({name: tensor for name, tensor in state.items() if name != "weight"})
