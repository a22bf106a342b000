"""The tensors that a replay is given: their checks, and how they come to where the dispatches read them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from .._core.tensors import may_share_memory

__all__ = ["Inputs"]


class Inputs:
    """The examples of a capture, and what later calls give in their place.

    Attributes:
        tensors: the capture's own tensors, of the examples' values and layout, on which the function is recorded.
    """

    def __init__(self, what: str, examples: Sequence[Tensor], bind: bool):
        self.what, self.bind = what, bind
        for i, example in enumerate(examples):
            _check_example(what, i, example, examples[0])
        self.tensors = [_copy(example) for example in examples]
        self._layouts = [_layout(tensor, bind) for tensor in self.tensors]

    @property
    def device(self) -> torch.device | None:
        return self.tensors[0].device if self.tensors else None

    def check(self, tensors: Sequence[Tensor]) -> None:
        """Raises TypeError or ValueError, which name the input, unless all can take the examples' places."""
        if len(tensors) != len(self.tensors):
            raise TypeError(f"{self.what}: {len(self.tensors)} inputs were captured, and {len(tensors)} are given")
        for i, (tensor, layout) in enumerate(zip(tensors, self._layouts)):
            if not isinstance(tensor, Tensor):
                raise TypeError(f"{self.what}: input {i} must be a tensor, not {type(tensor).__name__}")
            if _layout(tensor, self.bind) != layout:
                self._refuse(i, tensor, layout)
            if self.bind and (tensor.is_neg() or tensor.is_conj()):
                raise ValueError(
                    f"{self.what}: input {i} is a negated or conjugated view, whose memory has other numbers: give it "
                    "a clone()"
                )

    def check_apart(self, tensors: Sequence[Tensor], owned: Collection[int]) -> None:
        """Raises ValueError where memory to be bound is the capture's own, or another input's."""
        seen: dict[int, list[tuple[int, int, int]]] = {}
        for i, tensor in enumerate(tensors):
            key = tensor.untyped_storage()._cdata
            if key in owned:
                raise ValueError(f"{self.what}: input {i} is memory that the replay itself writes: give it a clone()")
            begin = int(tensor.storage_offset()) * tensor.itemsize
            end = begin + int(_span(tensor)) * tensor.itemsize
            for j, other_begin, other_end in seen.setdefault(key, []):
                if begin < other_end and other_begin < end:
                    raise ValueError(
                        f"{self.what}: inputs {j} and {i} share memory, and the examples did not: give one of them a "
                        "clone()"
                    )
            seen[key].append((i, begin, end))

    @torch.no_grad()
    def copy(self, tensors: Sequence[Tensor]) -> None:
        for own, tensor in zip(self.tensors, tensors):
            if tensor is not own:
                own.copy_(tensor)

    def written(self, examples: Sequence[Tensor], versions: Sequence[int]) -> list[int]:
        """Returns the numbers of the inputs that were written to since they had the examples' values and these
        versions.

        Operators count versions, also where they write what was there; handwritten kernels do not."""
        pairs = zip(self.tensors, examples, versions)
        return [i for i, (own, example, v) in enumerate(pairs) if own._version != v or not _same_bytes(own, example)]

    def _refuse(self, i, tensor, layout):
        names = ("shape", "dtype", "device", "strides", "place within 16 bytes")
        for name, actual, expected in zip(names, _layout(tensor, self.bind), layout):
            if actual != expected:
                raise ValueError(
                    f"{self.what}: input {i} has the {name} {_text(actual)}; {_text(expected)} was captured"
                )


def _layout(tensor, bind):
    layout = tensor.shape, tensor.dtype, tensor.device
    if bind:
        layout += tensor.stride(), tensor.storage_offset() * tensor.itemsize % 16
    return layout


def _text(value):
    return str(tuple(value)) if isinstance(value, torch.Size) else str(value)


def _check_example(what, i, example, first):
    if not isinstance(example, Tensor):
        raise TypeError(
            f"{what}: example {i} must be a tensor, not {type(example).__name__}; other values belong into the function"
        )
    if example.device.type == "cpu":
        raise ValueError(f"{what}: example {i} is on the CPU; its operators need no replay")
    if example.device != first.device:
        raise ValueError(f"{what}: example {i} is on {example.device}, and example 0 on {first.device}")
    if example.layout is not torch.strided or may_share_memory(example.shape, example.stride()):
        raise ValueError(f"{what}: elements of example {i} share memory, or have none of their own: give it a clone()")


def _span(tensor):
    """Returns the elements from the first to the last one in memory."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))


def _flat(tensor):
    return tensor.detach().as_strided((_span(tensor),), (1,), tensor.storage_offset())


def _copy(example):
    """Returns a copy with the same strides that begins at the same place within 16 bytes."""
    lead = example.storage_offset() * example.itemsize % 16 // example.itemsize
    memory = torch.empty(lead + _span(example), dtype=example.dtype, device=example.device)
    memory[lead:].copy_(_flat(example))
    own = torch.empty(0, dtype=example.dtype, device=example.device)
    own.set_(memory.untyped_storage(), lead, example.shape, example.stride())
    return own.requires_grad_(example.requires_grad)


def _same_bytes(a, b):
    return torch.equal(_flat(a).view(torch.uint8), _flat(b).view(torch.uint8))
