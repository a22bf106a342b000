"""Rotary position embedding of queries and keys."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .._core.operators import autograd, cpu_kernel, fake_kernel, ops
from .._core.registry import Op, Sample, register
from .._core.routing import INT32_MAX, accelerated, require_tensors
from .._core.samples import integers

__all__ = ["rope"]


def rope(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None = None,
    unsqueeze_dim: int = 1,
    *,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    sections: Sequence[int] | None = None,
    inplace: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotates pairs (a, b) of each head's first elements in q and k to (a cos - b sin, b cos + a sin).

    Args:
        q, k: float32, float16 or bfloat16, with the sizes (batch, heads, tokens, size of a head), or (batch, tokens,
            heads, size of a head) if `unsqueeze_dim` is 2; any strides. The number of heads may differ. They are
            rotated in float32.
        cos, sin: tables of q's dtype or float32, with the sizes (tokens, columns) or (batch or 1, tokens, columns);
            with `sections` they have 3 in front. With `position_ids` they have the sizes (positions, columns).
            There are `rotary_dim` columns, where each angle stands twice as in what multiplies q: in both halves, or
            side by side if `interleaved`. Half as many columns have each angle once.
        position_ids: int64, with the sizes (tokens,) or (batch or 1, tokens), with `sections` 3 in front: the tables'
            row for each token. Negative ones count from the end. A row that the tables do not have gives NaN.
        unsqueeze_dim: the dimension of the heads, 1 or 2.
        interleaved: whether the elements of a pair are neighbours, as in GPT-J, and not half of `rotary_dim` apart, as
            in Llama.
        rotary_dim: the number of elements of a head that are rotated; the tables' columns by default. The others are
            copied. Tables with half as many columns as a head has elements may mean both: they need it.
        sections: how many pairs take their angles from the first, second and third of the tables in front, as in
            Qwen2-VL. They add up to half of `rotary_dim`.
        inplace: whether q and k are overwritten, and returned.

    Returns:
        (q, k): rotated tensors with the strides of q and k if these have no gaps. Their gradient is the gradient
        rotated back, and has gradients of any order. Tables that need a gradient, and other input, go to PyTorch's ops.

    Raises:
        ValueError: sizes do not fit together.
        TypeError: q, k, cos, sin or position_ids is no tensor.

    The rotation is Su et al.'s (RoFormer, 2021).

    Example:
        >>> q, k = torch.randn(2, 1, 4, 8, 64, device="mps")  # (batch, heads, tokens, size of a head)
        >>> angles = torch.randn(8, 32, device="mps")
        >>> q, k = metalcore.rope(q, k, angles.cos(), angles.sin(), rotary_dim=64)
        >>> q.shape
        torch.Size([1, 4, 8, 64])
    """
    rotation = _Rotation(q, k, cos, sin, position_ids, unsqueeze_dim, interleaved, rotary_dim, sections)
    if not rotation.accelerated():
        rotated = rotation.by_torch()
        return (q.copy_(rotated[0]), k.copy_(rotated[1])) if inplace else rotated
    arguments = rotation.arguments()
    if not inplace:
        return _rope(q, k, *arguments)
    if q.stride(-1) != 1 or k.stride(-1) != 1:
        rotated = _rope(q, k, *arguments)
        return q.copy_(rotated[0]), k.copy_(rotated[1])
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad):
        return _InPlace.apply(q, *arguments), _InPlace.apply(k, *arguments)
    ops.rope_(q, k, *arguments)
    torch.autograd.graph.increment_version((q, k))
    return q, k


_INT64 = frozenset({torch.int64})


def _on_device(q, k, cos, sin, position_ids):
    """Returns whether the kernels can take tensors of these dtypes where they are."""
    if k is None or cos is None or sin is None:  # accelerated() skips these
        return False
    return accelerated(q, k, cos, sin) and (
        position_ids is None or accelerated(position_ids, dtypes=_INT64) and position_ids.device == q.device
    )


class _Rotation:
    """The arguments of rope, checked, with all dimensions."""

    def __init__(self, q, k, cos, sin, position_ids, heads_dim, interleaved, rotary_dim, sections):
        self.on_device = _on_device(q, k, cos, sin, position_ids)
        if not self.on_device:
            require_tensors("rope", q=q, k=k, cos=cos, sin=sin)
            require_tensors("rope", optional=True, position_ids=position_ids)
        if heads_dim not in (1, 2):
            raise _wrong(f"unsqueeze_dim must be 1 or 2, not {heads_dim}")
        size = q.shape
        if len(size) != 4:
            raise _wrong(f"q must have 4 dimensions, and is {list(size)}")
        expected = list(size)
        expected[heads_dim] = k.shape[heads_dim] if k.dim() == 4 else -1
        if list(k.shape) != expected:
            raise _wrong(f"k is {list(k.shape)}, which does not go with q, {list(size)}")
        if cos.shape != sin.shape:
            raise _wrong(f"cos is {list(cos.shape)}, and sin is {list(sin.shape)}")
        self.q, self.k, self.heads_dim, self.interleaved = q, k, heads_dim, interleaved
        columns = cos.shape[-1]
        if rotary_dim is None and 2 * columns == size[-1]:
            raise _wrong(
                f"cos has {columns} columns, half of a head's {size[-1]}: give rotary_dim={size[-1]} if these are the "
                f"angles of the whole head, each once, or rotary_dim={columns} if half of it is rotated"
            )
        self.rotary = rotary = columns if rotary_dim is None else rotary_dim
        if not 0 < rotary <= size[-1] or rotary % 2:
            raise _wrong(f"rotary_dim must be even and from 2 to {size[-1]}, not {rotary}")
        if columns not in (rotary, rotary // 2):
            raise _wrong(f"cos must have {rotary} or {rotary // 2} columns, not {columns}")
        self.sections = None if sections is None else tuple(sections)
        if self.sections is not None and (
            len(self.sections) != 3 or sum(self.sections) != rotary // 2 or min(self.sections) < 0
        ):
            raise _wrong(f"sections must be three numbers that add up to {rotary // 2}, not {self.sections}")
        self.positions = None
        if position_ids is None:
            self.cos, self.sin = self._along("cos and sin", cos, 1), self._along("cos and sin", sin, 1)
        else:
            if cos.dim() != 2:
                raise _wrong(f"with position_ids cos must have 2 dimensions, and is {list(cos.shape)}")
            self.cos, self.sin, self.positions = cos, sin, self._along("position_ids", position_ids, 0)

    def _along(self, name, x, columns):
        """Returns a view of tables or positions with the sizes (sections or 1, batch or 1, tokens, columns)."""
        front = 3 if self.sections is not None else 1
        batch, tokens = self.q.shape[0], self.q.shape[3 - self.heads_dim]
        y = x
        if self.sections is not None and y.dim() == 2 + columns:
            y = y.unsqueeze(1)
        if y.dim() < 3 + columns:
            y = y[(None,) * (3 + columns - y.dim())]
        if y.dim() != 3 + columns or y.shape[0] != front or y.shape[1] not in (1, batch) or y.shape[2] != tokens:
            in_sections = " in 3 sections" if front == 3 else ""
            raise _wrong(f"{name} of {list(x.shape)} do not go with {batch} x {tokens} tokens{in_sections}")
        return y

    def accelerated(self):
        q, k, cos, sin = self.q, self.k, self.cos, self.sin
        return (
            self.on_device
            and q.dtype == k.dtype
            and cos.dtype == sin.dtype
            and cos.dtype in (q.dtype, torch.float32)
            and max(q.numel(), k.numel()) <= INT32_MAX
            and not (torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad))
        )

    def arguments(self):
        second, third = (self.sections[0], self.sections[0] + self.sections[1]) if self.sections else (0, 0)
        if self.sections and not third:  # the third section has all pairs
            return self._third_alone()
        return (
            self.cos,
            self.sin,
            self.positions,
            self.heads_dim,
            self.rotary,
            self.interleaved,
            second,
            third,
            False,
        )

    def _third_alone(self):
        cos, sin, positions = self.cos, self.sin, self.positions
        if positions is None:
            cos, sin = cos[2:], sin[2:]
        else:
            positions = positions[2:]
        return cos, sin, positions, self.heads_dim, self.rotary, self.interleaved, 0, 0, False

    def by_torch(self):
        return _composite(self.q, self.k, *self.arguments())


def _wrong(message):
    return ValueError(f"metalcore.rope: {message}")


# CPU and fake kernels


def _angles(cos, sin, positions, rotary, interleaved, second, third):
    """Returns (cos, sin) of each pair, with the sizes (batch or 1, tokens, pairs)."""

    def of_pairs(table):
        if table.shape[-1] == rotary:
            table = table[..., ::2] if interleaved else table[..., : rotary // 2]
        if positions is not None:
            inside = (positions >= -table.shape[0]) & (positions < table.shape[0])
            table = torch.where(inside[..., None], table[positions * inside], torch.nan)
        if third == 0:
            return table[0]
        return torch.cat([table[0, ..., :second], table[1, ..., second:third], table[2, ..., third:]], -1)

    return of_pairs(cos), of_pairs(sin)


def _rotate(x, cos, sin, heads_dim, rotary, interleaved):
    """Returns x rotated in float32 or float64. It is differentiable to any order."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    cos, sin = cos.to(wide).unsqueeze(heads_dim), sin.to(wide).unsqueeze(heads_dim)
    turned, rest = x[..., :rotary].to(wide), x[..., rotary:]
    a, b = turned.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else turned.chunk(2, -1)
    pair = a * cos - b * sin, b * cos + a * sin
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([turned.to(x.dtype), rest], -1)


def _composite(q, k, cos, sin, positions, heads_dim, rotary, interleaved, second, third, inverse):
    cos, sin = _angles(cos, sin, positions, rotary, interleaved, second, third)
    sin = -sin if inverse else sin
    options = heads_dim, rotary, interleaved
    return _rotate(q, cos, sin, *options), _rotate(k, cos, sin, *options)


def _result_like(x):
    """Returns a tensor of x's shape, with its strides if it has no gaps and the elements of a head are neighbours."""
    if x.shape[-1] > 1 and x.stride(-1) != 1 or not _is_dense(x):
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    return x.new_empty_strided(x.shape, x.stride())


def _is_dense(x):
    expected = 1
    for stride, size in sorted(pair for pair in zip(x.stride(), x.shape) if pair[1] != 1):
        if stride != expected:
            return x.numel() == 0
        expected *= size
    return True


def _none(q):
    return q.new_empty(0)


@cpu_kernel("rope")
def _(q, k, *arguments):
    result = _composite(q, q if k is None else k, *arguments)
    return _result_like(q).copy_(result[0]), _none(q) if k is None else _result_like(k).copy_(result[1])


@fake_kernel("rope")
def _(q, k, *arguments):
    return _result_like(q), _none(q) if k is None else _result_like(k)


@cpu_kernel("rope_")
def _(q, k, *arguments):
    result = _composite(q, q if k is None else k, *arguments)
    q.copy_(result[0])
    if k is not None:
        k.copy_(result[1])


@fake_kernel("rope_")
def _(q, k, *arguments):
    return None


# Derivatives


def _save(ctx, inputs, output):
    _, k, cos, sin, positions, *ctx.options = inputs
    ctx.has_k = k is not None
    ctx.save_for_backward(cos, sin, positions)


def _backward(ctx, q_grad, k_grad):
    if any(ctx.needs_input_grad[2:4]):
        raise RuntimeError("metalcore::rope has no derivative by cos and sin; metalcore.rope has one")
    *options, inverse = ctx.options
    gq, gk = _rope(q_grad, k_grad if ctx.has_k else None, *ctx.saved_tensors, *options, not inverse)
    return gq, gk if ctx.has_k else None, *[None] * 9


_rope = autograd("rope", _backward, _save)


class _InPlace(torch.autograd.Function):
    """Rotates one tensor in place: autograd lets a view be changed only where it is the one result."""

    @staticmethod
    def forward(ctx, x, *arguments):
        ctx.mark_dirty(x)
        ctx.save_for_backward(*arguments[:3])
        ctx.options = arguments[3:]
        ops.rope_(x, None, *arguments)
        return x

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]  (there is one result)
        *options, inverse = ctx.options
        return _rope(grad, None, *ctx.saved_tensors, *options, not inverse)[0], *[None] * 9


def _reference(q, k, cos, sin, position_ids=None, unsqueeze_dim=1, *, inplace=False, **options):
    settings = {"interleaved": False, "rotary_dim": None, "sections": None} | options
    return _Rotation(q, k, cos, sin, position_ids, unsqueeze_dim, *settings.values()).by_torch()


def _tables(q, *shape):
    """Returns cos and sin of some angles, rounded to numbers that every dtype has. They are no leaves of a sample,
    which has a derivative by each of these. q's device computes them, since a CUDA graph cannot capture a copy from the
    host's memory. No product with 128 is so near to the middle of two integers that devices round it differently."""
    angles = torch.linspace(0, 3, torch.Size(shape).numel(), device=q.device).reshape(shape)
    return [(128 * table).round().div(128).to(q.dtype) for table in (angles.cos(), angles.sin())]


def _sample(name, q_shape, k_shape, table, **options):
    def arguments(q, k):
        return q * 1, k * 1, *_tables(q, *table)

    return Sample(name, (q_shape, k_shape), options, arguments=arguments, terms=2)


def _with_positions(q, k):
    return q, k, *_tables(q, 11, 16), integers((3, 0, 10, -1, 5), q)


def _samples():
    q, k = (2, 4, 5, 64), (2, 2, 5, 64)
    return (
        _sample("halves", q, k, (5, 32), rotary_dim=64),
        _sample("neighbours", q, k, (5, 64), interleaved=True, rotary_dim=64),
        _sample("some elements, in place", q, k, (5, 32), rotary_dim=32, inplace=True),
        _sample("odd sizes", (2, 3, 4, 14), (2, 1, 4, 14), (4, 6)),
        _sample("sections", q, k, (3, 2, 5, 64), sections=(16, 8, 8)),
        Sample(
            "positions",
            ((2, 5, 4, 32), (2, 5, 1, 32)),
            {"unsqueeze_dim": 2, "rotary_dim": 16},
            arguments=_with_positions,
            terms=2,
        ),
    )


register(Op("rope", rope, reference=_reference, operators=("rope", "rope_"), samples=_samples))
