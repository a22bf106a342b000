"""A tensor that an op has saved for its derivative, and a program changes before the backward pass, is an error as in
PyTorch, and never another gradient."""

import pytest
import torch
from saved import Call, changed

from metalcore._core.registry import OPS


@pytest.mark.parametrize("name", [name for name, op in OPS.items() if op.backward])
def test_changed_tensors(device, name):
    op = OPS[name]
    for sample in op.samples():
        if not sample.backward or not sample.elements:
            continue

        def make(sample=sample):
            return Call(op, sample, device, torch.float32)

        expected, count = make().gradients(), len(make().tensors())
        for which in range(count):
            found = changed(make, which)
            for value, wanted in zip(found or (), expected):
                assert torch.equal(value, wanted), f"{sample.name}: tensor {which}"
