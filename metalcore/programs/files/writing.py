"""Writes a program to a file: a manifest in JSON, which holds its graph, and tensors.

The manifest has operators by name, with their arguments, and no devices, grids or addresses of memory. A program is
divided among devices and planned anew where it is loaded. What libmetalcore runs stands beside the manifest: the
recordings (recordings.py).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ..._core.generated_kernels import source as msl_of
from ..ir import mutated_storages, storage_of, tensors_of, value
from ..source import Source, program_device
from . import container
from .encoding import Encoder, encode_tree, form, is_dense, name_of_dtype
from .operators import allowed_name
from .recordings import RECORDINGS, record

if TYPE_CHECKING:
    from ..program import Program

__all__ = ["FORMAT", "VERSION", "save"]

FORMAT, VERSION = "metalcore program", "2"
INSIDE, APART = "inside", "apart"


def save(
    program: Program, path: str | os.PathLike, weights: str | os.PathLike = INSIDE, recordings: bool = False
) -> None:
    """Writes a program to a file. See `Program.save`."""
    source = program.source
    if source is None:
        raise ValueError("only programs of metalcore.compile and metalcore.load can be saved")
    path = Path(path)
    apart = None if weights == INSIDE else path.with_suffix(".safetensors") if weights == APART else Path(weights)
    if apart is not None and source.state is None:
        raise ValueError("a program that was loaded no longer has the module's weights; save it with weights='inside'")
    if apart is not None and apart.absolute() == path.absolute():
        raise ValueError(f"{path} cannot be the file of the weights as well")
    from ..._system import __version__

    writer = _Writer(source, apart is not None)
    sections = writer.sections()
    recorded = {}
    if recordings:
        entry = {"metalcore": __version__, "weights": None if apart is None else apart.name}
        recorded[RECORDINGS] = json.dumps({writer.device.type: {**entry, **record(program, writer.constant)}})
    manifest = {
        "metalcore": __version__,
        "torch": torch.__version__,
        "target": source.target,
        "device": writer.device.type,
        "memory": source.options.memory,
        "generated": source.options.generates,
        "single": source.options.generates_single,
        "weights": None if apart is None else apart.name,
        "arguments": encode_tree(source.specs[0], is_input=True),
        "results": encode_tree(source.specs[1], is_input=False),
        **sections,
        "fused": [[rewritten.pattern, rewritten.place] for rewritten in source.fused],
        "kernels": {name: msl_of(name) for name in program.generated_kernels()},
    }
    text = json.dumps(manifest, allow_nan=False)
    if apart is not None:
        container.write(apart, writer.apart, {"format": "pt"})
    container.write(path, writer.inside, {"format": FORMAT, "version": VERSION, "program": text, **recorded})


class _Writer:
    def __init__(self, source: Source, is_apart: bool):
        self.source, self.is_apart = source, is_apart
        self.device = program_device(source.graph) or torch.device("cpu")
        self.inside: dict[str, Tensor] = {}
        self.apart: dict[str, Tensor] = {}
        self._entries: dict[int, tuple[Tensor, dict[str, Any]]] = {}  # by storage
        self._state_names: dict[tuple, list[str]] = {}
        for name, tensor in (source.state or {}).items():
            self._state_names.setdefault(_identity(tensor), []).append(name)

    def sections(self) -> dict[str, Any]:
        source, recipe = self.source, self.source.recipe if self.is_apart else None
        _refuse_shared_memory(source.graph, source.owner)
        graph = self._graph(source.graph, source.owner, made_elsewhere=recipe.names if recipe else ())
        return {"recipe": None if recipe is None else self._recipe(recipe), **graph}

    def _recipe(self, recipe):
        graph = self._graph(recipe.graph, recipe.owner)
        names = {str(node.target): node.name for node in reversed(self.source.graph.nodes) if node.op == "get_attr"}
        constants = [[names[name], node] for name, node in zip(recipe.names, graph["outputs"]) if name in names]
        return {"parameters": graph["parameters"], "operations": graph["operations"], "constants": constants}

    def _graph(self, graph: Graph, owner: torch.nn.Module, made_elsewhere=()) -> dict[str, list]:
        names: dict[Node, str] = {}
        first: dict[str, str] = {}  # of several nodes for one tensor
        encode = Encoder(self.device, names)
        entries: dict[str, list] = {"inputs": [], "parameters": [], "operations": [], "outputs": []}
        for node in graph.nodes:
            names[node] = first.setdefault(str(node.target), node.name) if node.op == "get_attr" else node.name
            if node.op == "get_attr":
                if names[node] == node.name and node.target not in made_elsewhere:
                    entries["parameters"].append(self._parameter(owner, node, encode))
                elif names[node] == node.name:
                    tensor = getattr(owner, str(node.target)).detach()
                    entry = {"tensor": node.name, **_form(tensor), "made": True}
                    self._entries[tensor.untyped_storage()._cdata] = tensor, entry
            elif node.op == "placeholder":
                entries["inputs"].append(_input(node, encode))
            elif node.op == "output":
                entries["outputs"] = encode(node.args[0])
            else:
                entries["operations"].append(_operation(node, encode))
        return entries

    def _parameter(self, owner, node, encode):
        tensor = getattr(owner, str(node.target)).detach()
        state = self._state_names.get(_identity(tensor), [])
        path = node.meta.get("path", str(node.target))
        if self.is_apart and state:
            name = path if path in state else state[0]
            self.apart[name] = tensor
            names = [name, *(other for other in state if other != name)]
        else:
            name, names = path, None
            while name in self.inside and self.inside[name] is not tensor:
                name += "_"
            self.inside[name] = tensor
        entry = {"tensor": name, **_form(tensor)} | ({} if names is None else {"names": names})
        self._entries[tensor.untyped_storage()._cdata] = tensor, entry
        return {"name": node.name, **entry, "device": encode.place(tensor.device)}

    def constant(self, storage: torch.UntypedStorage) -> dict[str, Any]:
        """Describes memory that a recording reads: a parameter, or a tensor of its bytes, which the file then has."""
        tensor, entry = self._entries.get(storage._cdata, (None, {}))
        if tensor is not None and not tensor.storage_offset() and is_dense(tensor.shape, tensor.stride()):
            if tensor.nbytes == storage.nbytes():
                return entry
        if self.is_apart:
            raise ValueError(
                "the program's kernels read memory that is neither a parameter nor made by the recipe: save it with "
                "weights='inside'"
            )
        name = f"{RECORDINGS}.{len(self.inside)}"
        self.inside[name] = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        return {"tensor": name, **_form(self.inside[name])}


def _identity(tensor):
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _form(tensor):
    entry = {"dtype": name_of_dtype(tensor.dtype), "shape": list(tensor.shape)}
    if not tensor.is_contiguous() and is_dense(tensor.shape, tensor.stride()):
        entry["strides"] = list(tensor.stride())
    return entry


def _input(node, encode):
    example = value(node)
    if not isinstance(example, Tensor):
        return {"name": node.name, "is": encode(example)}
    return {"name": node.name, **_form(example), "device": encode.place(example.device)}


def _operation(node, encode):
    name = allowed_name(node.target)
    if name is None:
        foreign = getattr(node.target, "namespace", "aten") not in ("aten", "metalcore")
        reason = ", which is neither PyTorch's nor metalcore's" if foreign else ""
        raise ValueError(f"{node.name}: no file may have the operator {node.target}{reason}")
    return {
        "name": node.name,
        "operator": name,
        "arguments": encode(node.args),
        "options": {name: encode(option) for name, option in node.kwargs.items()},
        "gives": [form(tensor) for tensor in tensors_of(node)],
    }


def _refuse_shared_memory(graph, owner):
    """Refuses parameters that share memory: in a loaded program each has its own, which shows if one is written."""
    mutated = mutated_storages(graph)
    first: dict[int, str] = {}
    for node in graph.nodes:
        if node.op == "get_attr":
            target = str(node.target)
            other = first.setdefault(getattr(owner, target).untyped_storage()._cdata, target)
            if other != target and storage_of(value(node)) in mutated:
                raise ValueError(f"{other} and {target} share memory that the program writes to; no file can hold that")
