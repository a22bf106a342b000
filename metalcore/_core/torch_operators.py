"""PyTorch's operators: which have a kernel on a device, and which write their results into memory of the caller."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch

from .out_forms import SEEN

__all__ = ["find_out_variant", "full_name", "has_kernel", "mps_kernels", "out_variant", "overload", "reads_storage"]


@functools.cache
def out_variant(func: Any, device: torch.device) -> tuple[Any, list[str]] | None:
    """Returns the overload that writes results, and nothing else, into tensors of a device, and the names of these
    arguments; None where there is none. An operator may have a kernel for the device, and its out overload none, as var
    on mps."""
    variant = find_out_variant(func, device)
    return variant if variant and full_name(variant[0]).removeprefix("aten::") in SEEN else None


def find_out_variant(func: Any, device: torch.device) -> tuple[Any, list[str]] | None:
    """Returns the same, of any overload that is said to write results, whatever else it writes."""
    if func._schema.is_mutable:
        return None
    wanted = [(argument.name, str(argument.type)) for argument in func._schema.arguments]
    for name in func.overloadpacket.overloads():
        other = getattr(func.overloadpacket, name)
        outs = [argument for argument in other._schema.arguments if argument.is_out]
        rest = [(a.name, str(a.type)) for a in other._schema.arguments if not a.is_out]
        if torch.Tag.generated in other.tags:  # it computes a new tensor and copies it
            continue
        if len(outs) == len(func._schema.returns) and all(str(a.type) == "Tensor" for a in outs) and rest == wanted:
            return (other, [argument.name for argument in outs]) if has_kernel(other, device) else None
    return None


@functools.cache
def has_kernel(target: torch._ops.OpOverload, device: torch.device) -> bool:
    """Returns whether PyTorch has a kernel for an operator that is for this kind of device."""
    return full_name(target) in (mps_kernels() if device.type == "mps" else _Registered(device.type.upper()))


def reads_storage(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Returns whether a call counts elements from the begin of a tensor's storage, as as_strided and its like do."""
    names = [argument.name for argument in func._schema.arguments]
    if "storage_offset" not in names:
        return False
    place = names.index("storage_offset")
    return (args[place] if place < len(args) else kwargs.get("storage_offset")) is not None


def full_name(target: torch._ops.OpOverload) -> str:
    schema = target._schema
    return f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name


def overload(name: str) -> Any:
    """Returns the operator of aten of a name such as "silu" or "sort.stable"; None where this PyTorch has none."""
    packet, _, which = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), which or "default", None)


# What mps_kernels() returns where the device is simulated. metalcore.simulator sets it.
simulated_kernels: Callable[[], Container[str]] | None = None


@functools.cache
def mps_kernels() -> Container[str]:
    """Returns the operators with an MPS kernel: PyTorch's own, or those of its table where the device is simulated."""
    return simulated_kernels() if simulated_kernels else _Registered("MPS")


class _Registered:
    """The operators with a kernel at a dispatch key."""

    def __init__(self, key):
        self.key = key

    def __contains__(self, name):
        return torch._C._dispatch_has_kernel_for_dispatch_key(name, self.key)
