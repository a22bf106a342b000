"""How tests compare a program with its module, and write files of programs."""

import json

import torch
from torch.utils._pytree import tree_leaves

from metalcore.programs.files import container


class Calls(torch.nn.Module):
    """A module that calls a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *tensors):
        return self.function(*tensors)


def agree(expected, found, tolerance=2e-5):
    """Asserts that results are equal, to a tolerance relative to the largest number of each."""
    expected, found = ([t for t in tree_leaves(x) if isinstance(t, torch.Tensor)] for x in (expected, found))
    assert len(expected) == len(found)
    for a, b in zip(expected, found):
        assert a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
        a, b = a.detach().cpu().double(), b.detach().cpu().double()
        scale = max(1.0, a[a.isfinite()].abs().max().item() if a.isfinite().any() else 1.0)
        torch.testing.assert_close(b, a, rtol=0, atol=tolerance * scale, equal_nan=True)


def alike(expected, found):
    """Asserts what is asked of whole models: a correlation above 0.9999, and the same five largest results."""
    a, b = (t.detach().cpu().double().flatten() for t in (expected, found))
    assert torch.corrcoef(torch.stack([a, b]))[0, 1] > 0.9999
    assert a.topk(5).indices.tolist() == b.topk(5).indices.tolist()


def operators(program):
    return [step.operator for step in program.report().steps]


def of_ours(device, attentions):
    """How many of so many attentions become metalcore's by default: on cuda they stay PyTorch's, which are faster."""
    return 0 if device == "cuda" else attentions


def contents(path):
    """The tensors and the manifest of a file."""
    with container.Container(path) as file:
        return {name: file.read(name) for name in file.entries}, json.loads(file.metadata["program"])


def write(path, tensors, manifest, **metadata):
    metadata = {"format": "metalcore program", "version": "2", **metadata}
    text = manifest if isinstance(manifest, str) else json.dumps(manifest)
    container.write(path, tensors, {**metadata, "program": text})
    return path


def change(path):
    """A function that sets an entry of the manifest, and writes the file with a digest that fits."""
    tensors, manifest = contents(path)

    def set_entry(places, new):
        changed = json.loads(json.dumps(manifest))
        there = changed
        for place in places[:-1]:
            there = there[place]
        there[places[-1]] = new
        return write(path, tensors, changed)

    return set_entry, manifest
