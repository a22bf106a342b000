"""Every op, forward and backward, on the samples that together launch every kernel that its plans choose here.

`make test` runs this in checking mode, and where subnormal numbers are zero. The self-test's test has all samples.
"""

import pytest
import torch

from metalcore._core import accuracy
from metalcore._core.registry import OPS
from metalcore.recording import on_meta


def samples():
    """The first one of each op, and those that reach a kernel that none before reaches."""
    reached = set()
    for op in OPS.values():
        for number, sample in enumerate(op.samples()):
            with torch.no_grad(), on_meta("mps") as recorder:
                op.compute(sample, [torch.empty(shape, device="meta") for shape in sample.shapes])
            kernels = set(recorder.recording.kernels)
            if number == 0 or not kernels <= reached:
                yield pytest.param(op, sample, id=f"{op.name}, {sample.name}")
            reached |= kernels


@pytest.mark.parametrize("op, sample", list(samples()))
def test_sample(device, op, sample):
    shares = accuracy.shares(op, sample, device, torch.float32)
    assert max(shares.values()) <= 1, shares
