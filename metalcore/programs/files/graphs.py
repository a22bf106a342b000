"""Graphs from the manifest of a file. Operations are computed without memory, so that shapes, dtypes and arguments of
each are what its operator takes, whatever the file says."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ..ir import tensors_of, value
from . import operators
from .container import ProgramFileError
from .encoding import decode, device_named, dtype_named, fits, form, is_dense
from .operators import CHECKS

__all__ = ["GraphReader"]

_MOST_BYTES = 1 << 42  # of one tensor
_MOST_DIMENSIONS = 64


class GraphReader:
    """Makes one graph, in the order: inputs, parameters, operations, outputs."""

    def __init__(self, mode: FakeTensorMode, device: torch.device):
        self.mode, self.device = mode, device
        self.graph, self.owner = Graph(), torch.nn.Module()
        self._nodes: dict[str, Node] = {}

    def _add(self, name, node):
        if name in self._nodes:
            raise ProgramFileError(f"{name} is there twice")
        self._nodes[name] = node
        return node

    def _value(self, name):
        if name not in self._nodes:
            raise ProgramFileError(f"{name[:60]!r} is used before it is made, or never made")
        return self._nodes[name]

    def input(self, entry: dict) -> None:
        number_or_fake = (
            decode(entry["is"], self._no_value, self.device) if "is" in entry else self._fake(*self._form(entry))
        )
        node = self._add(entry["name"], self.graph.placeholder(entry["name"]))
        node.target, node.meta["val"] = node.name, number_or_fake

    def _no_value(self, name):
        raise ProgramFileError(f"{name[:60]!r} is no value of an input")

    def parameter(self, entry: dict, read: Callable[[dict], Tensor]) -> None:
        """Adds a parameter, whose tensor on the CPU `read` gives for its entry."""
        shape, strides, dtype, device = self._form(entry)
        source = read(entry)
        if tuple(source.shape) != shape:
            raise ProgramFileError(f"{entry['tensor']} has the shape {list(source.shape)}, and {list(shape)} is needed")
        if source.dtype != dtype and not (source.is_floating_point() and dtype.is_floating_point):
            raise ProgramFileError(f"{entry['tensor']} is {source.dtype}, and {dtype} is needed")
        tensor = torch.empty_strided(shape, strides, dtype=dtype, device=device).copy_(source)
        self.constant(entry["name"], tensor, entry["tensor"])

    def constant(self, name: str, tensor: Tensor, path: str) -> None:
        attribute = f"constant_{len(self._nodes)}"
        self.owner.register_buffer(attribute, tensor)
        node = self._add(name, self.graph.create_node("get_attr", attribute, name=name))
        node.meta.update(val=self._fake(tensor.shape, tensor.stride(), tensor.dtype, tensor.device), path=path)

    def _fake(self, shape, strides, dtype, device):
        return FakeTensor(self.mode, torch.empty_strided(shape, strides, dtype=dtype, device="meta"), device)

    def _form(self, entry):
        shape, device = entry["shape"], device_named(entry["device"], self.device)
        dtype = dtype_named(entry["dtype"])
        strides = entry.get("strides")
        if not _are_sizes(shape) or math.prod(shape) * dtype.itemsize > _MOST_BYTES:
            raise ProgramFileError(f"{entry['name'][:60]!r} has no possible shape")
        if strides is None:
            strides = [math.prod(size or 1 for size in shape[d + 1 :]) for d in range(len(shape))]
        elif not _are_sizes(strides) or len(strides) != len(shape) or not is_dense(shape, strides):
            raise ProgramFileError(f"{entry['name'][:60]!r} has no possible strides")
        return tuple(shape), tuple(strides), dtype, device

    def operation(self, entry: dict) -> Node:
        name = entry["name"]
        target = operators.find(entry["operator"])
        if target is None:
            raise ProgramFileError(f"{name} has the operator {entry['operator'][:80]!r}, which no file may have")
        args = tuple(decode(entry["arguments"], self._value, self.device))
        options = {n: decode(option, self._value, self.device) for n, option in entry["options"].items()}
        if entry["operator"] == operators.GETITEM:
            _check_item(name, args, options)
        else:
            _check_arguments(name, target._schema, args, options)  # pyright: ignore[reportFunctionMemberAccess]
        node = self._add(name, self.graph.create_node("call_function", target, args, options, name=name))
        fake_args, fake_options = map_arg((args, options), value)
        try:
            with self.mode, torch.no_grad():
                if check := CHECKS.get(entry["operator"]):
                    check(*fake_args, **fake_options)
                node.meta["val"] = target(*fake_args, **fake_options)
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ProgramFileError(f"{name}: {entry['operator']} does not take its arguments: {reason}") from None
        forms = [form(tensor) for tensor in tensors_of(node)]
        if forms != entry["gives"]:
            stated = ", ".join(map(str, entry["gives"]))[:200]
            raise ProgramFileError(f"{name} gives {', '.join(forms)}, and the file says {stated!r}")
        if any(tensor.numel() * tensor.element_size() > _MOST_BYTES for tensor in tensors_of(node)):
            raise ProgramFileError(f"{name} is too large")
        return node

    def finish(self, outputs: Any) -> None:
        """Gives the graph its results."""
        results = decode(outputs, self._value, self.device)
        if not isinstance(results, list):
            raise ProgramFileError("the outputs are no list")
        for result in results:
            if isinstance(result, list) or isinstance(result, Node) and not isinstance(value(result), Tensor):
                raise ProgramFileError("a result is neither a tensor nor a number")
        self.graph.output(tuple(results))


def _are_sizes(sizes):
    return len(sizes) <= _MOST_DIMENSIONS and all(type(size) is int and 0 <= size < 1 << 48 for size in sizes)


def _check_item(name, args, options):
    if options or len(args) != 2 or not isinstance(args[0], Node) or type(args[1]) is not int:
        raise ProgramFileError(f"{name} takes a value and a number")
    several = value(args[0])
    if not isinstance(several, (tuple, list)) or not 0 <= args[1] < len(several):
        raise ProgramFileError(f"{name} takes the result {args[1]} of {args[0]}, which has none of that number")


def _check_arguments(name, schema, args, options):
    places = {spec.name: spec for spec in schema.arguments}
    positional = [spec for spec in schema.arguments if not spec.kwarg_only]
    if len(args) > len(positional) or not set(options) <= set(places):
        raise ProgramFileError(f"{name}: {schema.name} does not have these arguments")
    named = [(spec.name, thing) for spec, thing in zip(positional, args)]
    if len({*(n for n, _ in named), *options}) != len(named) + len(options):
        raise ProgramFileError(f"{name}: an argument of {schema.name} is there twice")
    for argument, thing in [*named, *options.items()]:
        if not fits(places[argument].real_type, thing):
            raise ProgramFileError(f"{name}: {schema.name} cannot have this as {argument}")
        for node in [thing] if isinstance(thing, Node) else thing if isinstance(thing, list) else []:
            if isinstance(node, Node) and not isinstance(value(node), Tensor):
                raise ProgramFileError(f"{name}: {argument} is no tensor")
