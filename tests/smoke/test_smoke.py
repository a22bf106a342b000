"""Every op, forward and backward, on the samples that together launch every kernel that its plans choose here. The
simulated device is in checking mode.

`make test` runs this where subnormal numbers are zero. The self-test's test has all samples, in neither mode.
"""

import contextlib

import pytest
import torch
from cases import launching_all

import metalcore
from metalcore._core import accuracy


@pytest.mark.parametrize(
    "op, sample", [pytest.param(op, sample, id=f"{op.name}, {sample.name}") for op, sample in launching_all()]
)
def test_sample(device, op, sample):
    simulated = hasattr(torch._C, "_metalcore_simulates_mps")
    with metalcore.simulator.checking() if simulated else contextlib.nullcontext():
        shares = accuracy.shares(op, sample, device, torch.float32)
    assert max(shares.values()) <= 1, shares
