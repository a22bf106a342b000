"""Functions that rotate queries and keys by their positions, such as apply_rotary_pos_emb in the files of transformers'
models. A file's functions are tried when a class of modules from it is met."""

from __future__ import annotations

import inspect
import itertools
import sys
import types
from typing import Any, NamedTuple

import torch

from ..._core.routing import accelerated
from ...rotary import rope
from .. import _report
from .formulas import agree, on_the_cpu
from .kinds import Kind
from .patches import Patch, full_name, run_counted

__all__ = ["RotaryFunctions"]

_HALF = (torch.float16, torch.bfloat16)
_PAIRS = [(x, x) for x in (torch.float32, *_HALF)] + [(x, torch.float32) for x in _HALF]  # dtypes of q and of cos
_TWICE = {
    "halves": lambda table: torch.cat([table, table], -1),
    "beside": lambda table: table.repeat_interleave(2, -1),
    "once": lambda table: table,
}
_BATCH, _TOKENS, _HEADS, _HEADS_OF_K, _SIZE = 2, 5, 4, 2, 16


class Layout(NamedTuple):
    """How a function reads its arguments.

    Attributes:
        interleaved: neighbours are pairs, and not the elements of two halves.
        tables: where cos and sin have an angle: in both "halves", twice "beside" each other, or "once".
        flat: q and k have the shape (tokens, heads, size), and no dimension for a batch.
        partial: cos may be narrower than a head, whose other elements stay as they are.
        dtypes: {(dtype of q, dtype of cos): dtype of the results}
    """

    interleaved: bool
    tables: str
    flat: bool
    partial: bool = False
    dtypes: dict = {}  # noqa: RUF012  (a NamedTuple's default, which nothing changes)

    def rotary(self, cos):
        """Returns how many elements of a head are rotated."""
        return cos.shape[-1] * (2 if self.tables == "once" else 1)

    def compute(self, rotate, q, k, cos, sin, dimension):
        width = self.rotary(cos)
        if self.tables == "halves" and self.interleaved:  # `rope` expects angles where a pair's elements are, or once
            cos, sin = cos[..., : width // 2], sin[..., : width // 2]
        options = {"interleaved": self.interleaved, "rotary_dim": width}
        if not self.flat:
            return rotate(q, k, cos, sin, unsqueeze_dim=dimension, **options)
        q, k = rotate(q.unsqueeze(0), k.unsqueeze(0), cos, sin, unsqueeze_dim=2, **options)
        return q.squeeze(0), k.squeeze(0)


class RotaryFunctions(Kind):
    """Functions of q, k, cos and sin with "rotary" in their names."""

    def __init__(self):
        super().__init__(("rope",))

    def meet_class(self, cls):
        file = sys.modules.get(cls.__module__)
        library = cls.__module__.partition(".")[0]
        if file is None or file in self.seen or library in ("torch", "metalcore"):
            return
        self.seen.add(file)
        for name, function in list(vars(file).items()):
            if "rotary" in name and isinstance(function, types.FunctionType) and _takes_q_k_cos_sin(function):
                layout = _find(function)
                if layout is None:
                    reason = "since their numbers are not those of a rotation of halves or of neighbours"
                    _report.never_replaced("rope", full_name(function), reason)
                else:
                    patch = self.patches[file, name] = Patch(file, name)
                    patch.install(_replacement(patch, layout, _report.count_of("rope", full_name(function))))


def _takes_q_k_cos_sin(function):
    return list(inspect.signature(function).parameters)[:4] == ["q", "k", "cos", "sin"]


def _replacement(patch, layout, count):
    original = patch.original
    takes_dimension = "unsqueeze_dim" in inspect.signature(original).parameters

    def function(q, k: Any = None, cos: Any = None, sin: Any = None, *args, **kwargs):
        def rotated():
            dimension = kwargs.get("unsqueeze_dim", 1) if takes_dimension else 1
            others = args or kwargs.keys() - {"unsqueeze_dim"} or dimension not in (1, 2)
            if others or not _fits(layout, q, k, cos, sin, dimension):
                return None
            dtype = layout.dtypes[q.dtype, cos.dtype]
            return layout.compute(rope, q.to(dtype), k.to(dtype), cos, sin, dimension)

        if not patch.on:
            return original(q, k, cos, sin, *args, **kwargs)
        return run_counted(count, rotated, lambda: original(q, k, cos, sin, *args, **kwargs))

    return function


def _fits(layout, q, k, cos, sin, dimension):
    if k is None or cos is None or sin is None or not accelerated(q, k, cos, sin):
        return False
    if q.dtype is not k.dtype or sin.dtype is not cos.dtype:
        return False
    dims, tokens = (3, 0) if layout.flat else (4, 3 - dimension)
    return (
        (q.dtype, cos.dtype) in layout.dtypes
        and q.dim() == k.dim() == dims
        and cos.dim() == dims - 1
        and cos.shape == sin.shape
        and cos.shape[-2] == q.shape[tokens] == k.shape[tokens]
        and (layout.flat or cos.shape[0] in (1, q.shape[0]) and q.shape[0] == k.shape[0])
        and layout.rotary(cos) % 2 == 0
        and (layout.rotary(cos) == q.shape[-1] or layout.partial and layout.rotary(cos) < q.shape[-1])
        and q.shape[-1] == k.shape[-1]
    )


def _find(function):
    """Returns how the function reads its arguments, or None if it does something else."""
    for interleaved, tables in itertools.product((False, True), _TWICE):
        for flat in (False, True):
            layout = Layout(interleaved, tables, flat)
            with on_the_cpu():
                dtypes = {pair: out for pair in _PAIRS if (out := _same(function, layout, *pair))}
                partial = _same(function, layout, *_PAIRS[0], _SIZE // 2) is not None
            if _PAIRS[0] in dtypes:
                return layout._replace(partial=partial, dtypes=dtypes)
    return None


def _same(function, layout, dtype, table_dtype, rotary=_SIZE):
    """Returns the dtype of the function's results if it rotates the first `rotary` elements of heads as `_rotated`
    does, or None."""
    generator = torch.Generator("cpu").manual_seed(1)

    def numbers(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float32)

    def heads(count):
        return numbers(*((_TOKENS, count) if layout.flat else (_BATCH, count, _TOKENS)), _SIZE).to(dtype)

    q, k = heads(_HEADS), heads(_HEADS_OF_K)
    angles = numbers(*(() if layout.flat else (_BATCH,)), _TOKENS, rotary // 2)
    cos, sin = angles.cos() * 1.5, angles.sin() * 1.5
    cos, sin = (_TWICE[layout.tables](table).to(table_dtype) for table in (cos, sin))
    try:
        results = function(q, k, cos, sin)
        out = results[0].dtype
    except Exception:  # it takes other shapes
        return None
    bound = 4 * torch.finfo(dtype).eps
    same = all(
        agree(lambda: ours, lambda: theirs, bound, out, scale=theirs.float().abs().max())
        for ours, theirs in zip(results, layout.compute(_rotated, q.to(out), k.to(out), cos, sin, 1))
    )
    return out if same else None


def _rotated(q, k, cos, sin, unsqueeze_dim, interleaved, rotary_dim):
    """Computes rope in PyTorch's ops."""
    pairs = rotary_dim // 2
    step = 2 if interleaved and cos.shape[-1] == rotary_dim else 1
    cos, sin = (t[..., ::step][..., :pairs].float().unsqueeze(-2 if unsqueeze_dim == 2 else 1) for t in (cos, sin))

    def turned(x):
        y = x[..., :rotary_dim].float()
        a, b = (y[..., ::2], y[..., 1::2]) if interleaved else (y[..., :pairs], y[..., pairs:])
        parts = (a * cos - b * sin, b * cos + a * sin)
        y = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
        return torch.cat([y.to(x.dtype), x[..., rotary_dim:]], -1)

    return turned(q), turned(k)
