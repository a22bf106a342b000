"""A tensor that an op has saved for its derivative, and a program changes before the backward pass, is an error as in
PyTorch, and never another gradient."""

import pytest
import torch
from cases import CASES, FORMS
from saved import Call, changed


@pytest.mark.parametrize("name", [name for name in FORMS if CASES[name].backward and CASES[name].sample.elements])
def test_changed_tensors(device, name):
    def make():
        return Call(CASES[name].op, CASES[name].sample, device, torch.float32)

    expected, count = make().gradients(), len(make().tensors())
    for which in range(count):
        found = changed(make, which)
        for value, wanted in zip(found or (), expected):
            assert torch.equal(value, wanted), f"tensor {which}"
