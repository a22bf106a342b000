"""Every op on its samples, forward and backward. `make test` runs this a second time in checking mode."""

import pytest
import torch

from metalcore._core import accuracy
from metalcore._core.registry import OPS

SAMPLES = [pytest.param(op, sample, id=f"{op.name}, {sample.name}") for op in OPS.values() for sample in op.samples()]


@pytest.mark.parametrize("op, sample", SAMPLES)
def test_sample(device, op, sample):
    shares = accuracy.shares(op, sample, device, torch.float32)
    assert max(shares.values()) <= 1, shares
