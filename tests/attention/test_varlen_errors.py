"""varlen_attn's errors. Where the host sees the offsets, none that are wrong give silent results."""

import pytest
import torch

from metalcore.nn.attention import varlen_attn


def call(device, starts_q=(0, 20, 50), starts_k=(0, 30, 60), max_q=30, max_k=30, dtype=torch.int32, size=16):
    q, k = torch.randn(50, 2, size, device=device), torch.randn(60, 2, size, device=device)
    offsets = (torch.tensor(starts, dtype=dtype, device=device) for starts in (starts_q, starts_k))
    return varlen_attn(q, k, k, *offsets, max_q, max_k)


@pytest.mark.parametrize(
    "change, match",
    [
        ({"max_q": 29}, "max_q is 29, and sequence 1 has 30 tokens"),
        ({"max_k": 29}, "max_k is 29, and sequence 0 has 30 tokens"),
        ({"max_q": 0}, "max_q is 0, and sequence 0 has 20 tokens"),
        ({"max_k": -1}, "max_k is -1"),
        ({"starts_q": (0, 30, 20)}, "cu_seq_q must be numbers of 0 to 50 that do not descend"),
        ({"starts_k": (0, 40, 61)}, "cu_seq_k must be numbers of 0 to 60 that do not descend"),
        ({"starts_k": (-1, 30, 60)}, "cu_seq_k must be numbers of 0 to 60"),
        ({"starts_q": (0, 20, 2**32 + 50), "dtype": torch.int64}, "cu_seq_q must be numbers of 0 to 50"),
    ],
)
def test_numbers(device, change, match):
    with pytest.raises(ValueError, match=match):
        call("cpu", **change)
    if device == "mps" and getattr(torch._C, "_metalcore_simulates_mps", False):
        with pytest.raises(ValueError, match=match):
            call(device, **change)


def test_types(device):
    for dtype in (torch.float32, torch.bool):
        with pytest.raises(RuntimeError, match="must be integers of one shape"):
            call(device, dtype=dtype)
    with pytest.raises(TypeError, match="max_q must be an integer, not float"):
        call(device, max_q=30.0)
    q = torch.randn(4, 2, 8, device=device)
    offsets = torch.tensor([0, 4], dtype=torch.int32, device=device)
    with pytest.raises(TypeError, match="cu_seq_q must be a tensor, not list"):
        varlen_attn(q, q, q, [0, 4], None, 4, 4)  # pyright: ignore[reportArgumentType]
    with pytest.raises(RuntimeError, match="one dtype, a floating-point one"):
        varlen_attn(q.int(), q.int(), q.int(), offsets, None, 4, 4)
    with pytest.raises(RuntimeError, match="dimensions"):
        varlen_attn(q[0, 0], q[0, 0], q[0, 0], offsets, None, 4, 4)
    with pytest.raises(RuntimeError, match="on one device"):
        varlen_attn(q, q.cpu(), q, offsets, None, 4, 4)
