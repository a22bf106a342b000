"""Makes a program from a file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node

from ..ir import value
from ..options import SINGLE, Options
from ..passes.folding import Recipe
from ..program import Program, finish
from ..rewriting import Rewritten
from ..source import Source
from .container import Container, ProgramFileError
from .encoding import decode_tree
from .graphs import GraphReader
from .manifest import read_manifest

__all__ = ["load"]

_GROWTH = 8  # what a recipe makes may have so many times the elements of its arguments


def load(
    path: str | os.PathLike,
    weights: str | os.PathLike | Mapping[str, Tensor] | None = None,
    device: torch.device | str | None = None,
) -> Program:
    """Makes a program from a file that `Program.save` wrote, on this machine or another one.

    A file is data. It names operators of a list that this package has, and what they are applied to is checked as if
    somebody had typed it. Its digest shows damage, and no intention: who wrote a file decides what it computes.

    Args:
        path: of the file.
        weights: for a program with its weights apart: a file of safetensors, or tensors by name as a state_dict has
            them. By default it is the file that was written with the program, beside it. Floating-point tensors of
            other dtypes are converted. Where the file has the digest that `Program.save` writes, it is checked.
        device: where it runs: "mps", "cuda" or "cpu", with or without a number. By default a device like that for which
            it was compiled, or else the GPU of this machine, or else the CPU.

    Raises:
        ProgramFileError: the file is damaged, of another version, or has what no such file may have; or weights are
            missing, or of another shape.
        ValueError: weights are given for a program that has its own inside, or this machine has no such device.
        TypeError: weights are neither a path nor tensors by name.
        OSError: a file cannot be read.

    Example:
        >>> x = torch.ones(2, 4, device="mps")
        >>> metalcore.compile(metalcore.nn.RMSNorm(4, device="mps").eval(), (x,)).save("norm.mcprog")
        >>> metalcore.load("norm.mcprog")(x).shape
        torch.Size([2, 4])
    """
    try:
        return _load(Path(path), weights, device)
    except (RecursionError, OverflowError, MemoryError) as error:
        raise ProgramFileError(f"{path}: a size or a depth in it is impossible: {error}") from None


def _load(path, weights, device):
    with Container(path) as file, ExitStack() as stack:
        manifest = read_manifest(file)
        where = _device(device, manifest["device"])
        if weights is not None and manifest["weights"] is None:
            raise ValueError(f"{path}: the program's weights are inside of it, so that it takes no others")
        tensors = _Weights(file, _opened(path, manifest["weights"], weights, stack))
        source = _source(manifest, tensors, where)
    notes = _notes(manifest, where)
    try:
        with torch.no_grad():
            program = finish(source.module(), source.options, source.fused, notes, source)
    except (RuntimeError, ValueError, TypeError, NotImplementedError, AssertionError) as error:
        raise ProgramFileError(f"{path}: the program cannot be planned: {error}") from error
    program.add_notes(_kernel_notes(program, manifest["kernels"]))
    return program


def _source(manifest, tensors, device):
    arguments, results = decode_tree(manifest["arguments"]), decode_tree(manifest["results"])
    if manifest["memory"] not in ("arena", "allocator"):
        raise ProgramFileError(f"there is no memory {manifest['memory'][:40]!r}")
    mode = FakeTensorMode()
    reader = GraphReader(mode, device)
    for entry in manifest["inputs"]:
        reader.input(entry)
    for entry in manifest["parameters"]:
        reader.parameter(entry, tensors.read)
    if manifest["recipe"] is not None:
        for name, tensor in _folded(manifest["recipe"], tensors, device):
            reader.constant(name, tensor, name)
    for entry in manifest["operations"]:
        reader.operation(entry)
    reader.finish(manifest["outputs"])
    if arguments.num_leaves != len(manifest["inputs"]) or results.num_leaves != len(manifest["outputs"]):
        raise ProgramFileError("the structure of its arguments or results has another size than they have")
    generated = [SINGLE] if manifest["single"] else None if manifest["generated"] else []
    options = Options(fusions=generated, memory=manifest["memory"], fallback=False)
    fused = tuple(Rewritten(pattern, place, (), ()) for pattern, place in manifest["fused"])
    return Source(reader.graph, reader.owner, None, None, options, fused, (arguments, results), manifest["target"])


def _folded(entry, tensors, device):
    """Returns the constants that a recipe makes, by name."""
    reader = GraphReader(FakeTensorMode(), device)
    for parameter in entry["parameters"]:
        reader.parameter(parameter, tensors.read)
    for operation in entry["operations"]:
        node = reader.operation(operation)
        input_elements = sum(_elements(source) for source in node.all_input_nodes)
        if _elements(node) > max(_GROWTH * input_elements, 1 << 16):
            raise ProgramFileError(f"{node.name} makes far more than it is made of")
    names = tuple(name for name, _ in entry["constants"])
    reader.finish([constant for _, constant in entry["constants"]])
    if not all(isinstance(node, Node) and isinstance(value(node), Tensor) for node in _results(reader.graph)):
        raise ProgramFileError("the recipe makes something that is no tensor")
    try:
        return list(zip(names, Recipe(reader.graph, reader.owner, names).run(), strict=True))
    except (RuntimeError, ValueError, IndexError) as error:
        raise ProgramFileError(f"the recipe cannot be followed: {error}") from error


def _elements(node):
    result = value(node)
    return sum(t.numel() for t in (result if isinstance(result, (tuple, list)) else [result]) if isinstance(t, Tensor))


def _results(graph):
    return next(node for node in graph.nodes if node.op == "output").args[0]


class _Weights:
    """Tensors for parameters: from the program's file, or from the weights."""

    def __init__(self, file: Container, weights: Container | Mapping[str, Tensor] | None):
        self._file, self._weights = file, weights

    def read(self, entry: dict) -> Tensor:
        if "names" not in entry:
            if entry["tensor"] not in self._file.entries:
                raise ProgramFileError(f"the file has no tensor {entry['tensor'][:80]!r}")
            return self._file.read(entry["tensor"])
        if self._weights is None:
            raise ProgramFileError("the program's weights are apart, and neither given nor beside it: give weights=…")
        tensors = self._weights.entries if isinstance(self._weights, Container) else self._weights
        name = next((name for name in entry["names"] if name in tensors), None)
        if name is None:
            raise ProgramFileError(f"the weights have no tensor {entry['tensor'][:80]!r}")
        return self._weights.read(name) if isinstance(self._weights, Container) else self._weights[name].detach()


def _opened(path, name, weights, stack):
    if isinstance(weights, Mapping):
        if other := next((name for name, tensor in weights.items() if not isinstance(tensor, Tensor)), None):
            raise TypeError(f"weights[{other!r}] must be a tensor, not {type(weights[other]).__name__}")
        return weights
    if weights is not None and not isinstance(weights, (str, os.PathLike)):
        raise TypeError(f"weights must be a path or tensors by name (a state_dict), not {type(weights).__name__}")
    if weights is None:
        beside = None if name is None else path.parent / name
        if beside is None or not beside.exists():
            return None
        weights = beside
    file = stack.enter_context(Container(weights))
    if file.has_digest:
        file.check_digest()
    return file


def _device(device, recorded):
    """Returns the device as its tensors name it, with its number."""
    if device is None:
        device = next((kind for kind in (recorded, "mps", "cuda") if _is_here(kind)), "cpu")
    try:
        kind = torch.device(device).type
    except (RuntimeError, TypeError):
        kind = None
    if kind not in ("mps", "cuda", "cpu"):
        raise ValueError(f'load: device must be "mps", "cuda" or "cpu", and is {device!r}')
    if not _is_here(kind):
        raise ValueError(f"load: device is {device!r}, and this machine has none of the kind {kind}")
    return torch.empty(0, device=device).device


def _is_here(kind):
    if kind == "mps":
        return torch.backends.mps.is_available()
    return kind == "cuda" and torch.cuda.is_available() or kind == "cpu"


def _notes(manifest, device):
    if manifest["device"] == device.type:
        return []
    return [f"it was compiled for {manifest['device']}, and its patterns were chosen for that"]


def _kernel_notes(program, sources):
    """Kernels are generated anew, and never compiled from a file's text."""
    others = [name for name in program.generated_kernels() if name not in sources]
    if not others or not sources:
        return []
    return [f"{len(others)} generated kernels are others than those in the file, which another version made"]
