"""What computes a call whose kernels a GPU refuses. (tests/metal_runtime has kernels refused.)"""

import torch

from metalcore._core.refused import on_any_device


def test_a_device_without_the_op(device):
    """PyTorch's error for an op that a device lacks sends the call to the CPU, and the results come back."""
    seen = []

    def formula(x, others, scale, *, weight=None):
        seen.append(x.device.type)
        if x.device.type != "cpu":
            raise NotImplementedError("aten::no_such_op is not implemented for this device")
        return scale * x + others[0] + weight, len(others)

    x = torch.arange(4.0, device=device)
    result, count = on_any_device(formula, x, [x, x], 2.0, weight=x)
    assert seen == (["cpu"] if device == "cpu" else [device, "cpu"]) and count == 2
    torch.testing.assert_close(result, 4 * x)
    assert result.device == x.device
