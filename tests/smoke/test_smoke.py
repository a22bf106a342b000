"""Every op, forward and backward, on the samples that together launch every kernel that its plans choose here.

`make test` runs this in checking mode, and where subnormal numbers are zero. The self-test's test has all samples.
"""

import pytest
import torch
from cases import launching_all

from metalcore._core import accuracy


@pytest.mark.parametrize(
    "op, sample", [pytest.param(op, sample, id=f"{op.name}, {sample.name}") for op, sample in launching_all()]
)
def test_sample(device, op, sample):
    shares = accuracy.shares(op, sample, device, torch.float32)
    assert max(shares.values()) <= 1, shares
