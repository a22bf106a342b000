"""Puts operations that PyTorch has no MPS kernel for on the CPU, with transfers at the borders."""

from __future__ import annotations

import functools
import operator

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..._core.torch_operators import full_name, mps_kernels
from ..ir import name_of, value, written
from ..rewriting import Emitter

__all__ = ["is_lacking", "lacks_kernel", "put_on_cpu"]

_CPU = torch.device("cpu")


def put_on_cpu(module: GraphModule) -> int:
    """Moves operations to the CPU where `mps` has no kernel for them. Returns how many."""
    count = 0
    for node in list(module.graph.nodes):
        device = _device_of(node)
        if device is not None and device.type == "mps" and lacks_kernel(node):
            _move(module, node, device)
            count += 1
    return count


def _device_of(node):
    if name_of(node) is None or name_of(node).startswith("metalcore."):  # pyright: ignore[reportOptionalMemberAccess]
        return None
    tensors = [t for t in tree_leaves(value(node)) if isinstance(t, Tensor)]
    for source in node.all_input_nodes:
        tensors += [t for t in tree_leaves(value(source)) if isinstance(t, Tensor)]
    return next((t.device for t in tensors if t.device.type != "cpu"), None)


def lacks_kernel(node: Node) -> bool:
    """Returns whether PyTorch on a Mac has no kernel for an operation, nor for what it consists of."""
    if is_lacking(node.target):
        return True
    if not node.target.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):  # pyright: ignore[reportAttributeAccessIssue, reportFunctionMemberAccess]
        return False
    dtypes = tuple(str(value(n).dtype) for n in node.all_input_nodes if isinstance(value(n), Tensor))
    key = (node.target, dtypes)
    if key not in _composites:
        _composites[key] = any(map(is_lacking, _parts(node)))
    return _composites[key]


_composites: dict = {}


def _parts(node):
    """Returns the operators that an operation consists of."""
    mode = next((v.fake_mode for v in map(value, node.all_input_nodes) if hasattr(v, "fake_mode")), None)
    if mode is None:
        return []
    args, kwargs = map_arg((node.args, node.kwargs), value)
    with mode, torch.no_grad(), _Called() as called:
        node.target(*args, **kwargs)
    return called.operators


class _Called(TorchDispatchMode):
    """Notes the operators that are called, or that those consist of."""

    def __init__(self):
        super().__init__()
        self.operators = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace == "aten":
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        self.operators.append(func)
        return func(*args, **kwargs)


@functools.cache
def is_lacking(target: torch._ops.OpOverload) -> bool:
    """Returns whether PyTorch on a Mac has no kernel of its own for an operator, and none that is made of others."""
    name = full_name(target)
    if not name.startswith("aten::") or name in mps_kernels():
        return False
    # What the CPU has no kernel for either is an override's, as _fused_rms_norm_backward.
    if not torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, "CPU"):
        return False
    composites = ("CompositeImplicitAutograd", "CompositeExplicitAutograd")
    return not any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in composites)


def _move(module, node, device):
    graph = module.graph
    mode = next(t.fake_mode for t in tree_leaves([value(node), *map(value, node.all_input_nodes)]) if _is_fake(t))
    emit = Emitter(module, mode)
    with graph.inserting_before(node):
        there = {source: _transfer(emit, source, _CPU) for source in node.all_input_nodes}
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: there[n])
        if isinstance(kwargs.get("device"), (torch.device, str)):
            kwargs = {**kwargs, "device": _CPU}
        moved = emit(node.target, *args, **kwargs)
        moved.meta["place"] = "cpu"
        for target in written(node):
            emit(torch.ops.aten.copy_.default, target, there[target])
        if written(node) and isinstance(value(node), Tensor):
            node.replace_all_uses_with(written(node)[0])
        elif isinstance(value(node), Tensor):
            node.replace_all_uses_with(_transfer(emit, moved, device))
        else:
            _return_items(graph, node, moved, emit, device)
    graph.erase_node(node)


def _return_items(graph, node, moved, emit, device):
    for user in list(node.users):
        if user.target is not operator.getitem:
            raise NotImplementedError(f"{user.name} takes all results of {node.name}, which runs on the CPU")
        back = _transfer(emit, emit.item(moved, user.args[1]), device)
        user.replace_all_uses_with(back)
        graph.erase_node(user)


def _is_fake(tensor):
    return hasattr(tensor, "fake_mode")


def _transfer(emit, node: Node, device):
    if not isinstance(value(node), Tensor) or value(node).device == device:
        return node
    copy = emit(torch.ops.aten._to_copy.default, node, device=device)
    copy.meta["place"] = "transfer"
    return copy
