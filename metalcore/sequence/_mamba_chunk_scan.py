"""The state spaces of Mamba 2, whose heads have one rate and one step for all of their channels and states."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from .._core.registry import Op, Sample, register
from .._core.routing import require_floats, require_integers, require_tensors
from .._core.samples import integers
from .._core.tensors import in_int32
from ..activation import swiglu
from ._delta_rule import linear_attention
from ._scan_formulas import check, scan
from ._selective_scan import in_float32, run

__all__ = ["mamba_chunk_scan_combined"]


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """Computes the state spaces of Mamba 2 over sequences, as the function of this name of the package mamba-ssm. Each
    head has a state of its channels by `states`:

        h = exp(dt A) h + dt x Bᵀ
        y = h C + D x, times silu(z)

    Args:
        x: (batch, length, heads, channels): float32, float16 or bfloat16, any strides. It is computed in float32.
        dt: (batch, length, heads), the step of each position.
        A: (heads,), below 0 where states decay.
        B, C: (batch, length, groups, states) of x's dtype, where groups divides the heads.
        chunk_size: at least 1. Results do not depend on it: kernels choose the positions of a chunk.
        D: (heads,) or (heads, channels), or None for 0.
        z: of x's shape and dtype, or None: a gate. By chunks, results are rounded to this dtype before it, too.
        dt_bias: (heads,), or None: it is added to dt.
        initial_states: (batch, heads, channels, states), or None for 0.
        seq_idx: (batch, length), integers, or None: neighbouring positions of one number are a sequence. The initial
            states are those of the first one.
        cu_seqlens: (sequences + 1,), integers, for return_varlen_states: where sequences begin and end.
        dt_softplus: whether softplus is taken of dt + dt_bias.
        dt_limit: the least and the largest step, to which others are clamped.
        return_final_states: whether the states behind the last position are returned.
        return_varlen_states: whether the states behind each sequence of cu_seqlens are returned. The host waits for
            cu_seqlens, and positions are computed a second time.

    Returns:
        y of x's shape and dtype; with the states that are wanted a tuple of y, the final states and those of the
        sequences. States are float32, (batch or sequences, heads, channels, states). All have gradients of any order.
        The same inputs give the same bits.

    Raises:
        TypeError: an argument is no tensor, or has numbers of another kind.
        ValueError: chunk_size is less than 1, or dt_limit is not two numbers.
        RuntimeError: shapes do not go together.

    Source: Dao, Gu, "Transformers are SSMs", 2024.

    Example:
        >>> x, dt, A = torch.randn(1, 100, 4, 8, device="mps"), torch.rand(1, 100, 4, device="mps"), -torch.ones(4)
        >>> B, C = torch.randn(2, 1, 100, 2, 16, device="mps")
        >>> arguments = x, dt, A.to("mps"), B, C, 64
        >>> y, states = metalcore.mamba_chunk_scan_combined(*arguments, return_final_states=True)
        >>> y.shape, states.shape
        (torch.Size([1, 100, 4, 8]), torch.Size([1, 4, 8, 16]))
    """
    op = "mamba_chunk_scan_combined"
    require_tensors(op, x=x, dt=dt, A=A, B=B, C=C)
    optional = {"D": D, "z": z, "dt_bias": dt_bias, "initial_states": initial_states}
    require_tensors(op, optional=True, **optional, seq_idx=seq_idx, cu_seqlens=cu_seqlens)
    require_floats(op, x=x, dt=dt, A=A, B=B, C=C, **optional)
    require_integers(op, seq_idx=seq_idx, cu_seqlens=cu_seqlens)
    if not isinstance(chunk_size, int) or chunk_size < 1:
        raise ValueError(f"{op}: chunk_size must be at least 1, not {chunk_size!r}")
    if not isinstance(dt_limit, Sequence) or len(dt_limit) != 2:
        raise ValueError(f"{op}: dt_limit must be two numbers, not {dt_limit!r}")
    numbers = None if seq_idx is None else in_int32(seq_idx, x.device)
    inputs = x, dt, A, B, C, D, z, dt_bias, initial_states
    options = dt_softplus, *dt_limit
    y, states = _scan(op, *inputs, numbers, *options)
    results = (y, states) if return_final_states else (y,)
    if return_varlen_states:
        results += (_states_of_sequences(op, inputs, cu_seqlens, options),)
    return results if len(results) > 1 else y


# Fewer positions are not worth products of matrices, and neither is a state of a few numbers.
_LEAST_POSITIONS, _LEAST_STATES = 64, 32


def _scan(op, x, dt, A, B, C, D, z, dt_bias, states, numbers, softplus, low, high):
    """Computes the results and the last states: as linear attention by chunks of positions, whose weights are the
    steps, or as selective_scan."""
    by_channel = _by_channel(op, x, dt, A, B, C, D, z, dt_bias, states)
    found = None
    if x.shape[1] >= _LEAST_POSITIONS and B.shape[3] >= _LEAST_STATES and numbers is None:
        check(op, *by_channel, None, any_size=True)
        step = in_float32(dt) if dt_bias is None else dt + in_float32(dt_bias)
        step = F.softplus(step) if softplus else step
        if not softplus or low > 0 or high != float("inf"):  # softplus has no numbers below 0
            step = step.clamp(low, high)
        before = None if states is None else in_float32(states).mT
        found = linear_attention(C, B, x, step * in_float32(A), step, before, by_channel[5])
    if found is None:
        return run(op, *by_channel, numbers, softplus, low, high)
    y, states = found
    return y if z is None else swiglu(z, y), states.mT


def _by_channel(op, x, dt, A, B, C, D, z, dt_bias, states):
    """Returns the arguments of selective_scan, of which heads' numbers are those of all channels."""
    if x.dim() != 4 or B.dim() != 4:
        raise RuntimeError(
            f"metalcore::{op}: x must be [batch, length, heads, channels] and B [batch, length, groups, states], and "
            f"they are {list(x.shape)} and {list(B.shape)}"
        )
    heads, dim = x.shape[2:]
    for name, tensor, shape in (("dt", dt, x.shape[:3]), ("A", A, (heads,)), ("dt_bias", dt_bias, (heads,))):
        if tensor is not None and tensor.shape != shape:
            raise RuntimeError(f"metalcore::{op}: {name} must be {list(shape)}, not {list(tensor.shape)}")
    if D is not None and D.shape not in ((heads,), (heads, dim)):
        raise RuntimeError(f"metalcore::{op}: D must be [{heads}] or [{heads}, {dim}], not {list(D.shape)}")
    # The steps' gradients are sums over channels in float32.
    dt = in_float32(dt)[..., None].expand(x.shape)
    A = in_float32(A)[:, None, None].expand(heads, dim, B.shape[3])
    D = D if D is None or D.dim() == 2 else in_float32(D)[:, None].expand(heads, dim)
    dt_bias = None if dt_bias is None else in_float32(dt_bias)[:, None].expand(heads, dim)
    return x, dt, A, B, C, in_float32(D), z, dt_bias, in_float32(states)


def _states_of_sequences(op, inputs, cu_seqlens, options):
    x, dt, A, B, C, _, _, dt_bias, before = inputs
    states = x.shape[2:] + B.shape[3:]
    if cu_seqlens is None or cu_seqlens.dim() != 1 or x.shape[0] != 1:
        raise RuntimeError(
            f"metalcore::{op}: return_varlen_states needs a vector cu_seqlens and one batch entry, and they are "
            f"{None if cu_seqlens is None else list(cu_seqlens.shape)} and {x.shape[0]}"
        )
    found = [x.new_empty(0, *states, dtype=torch.promote_types(x.dtype, torch.float32))]
    for begin, end in pairwise(cu_seqlens.tolist()):
        part = slice(begin, end)
        rows = x[:, part], dt[:, part], A, B[:, part], C[:, part]
        found.append(_scan(op, *rows, None, None, dt_bias, before if begin == 0 else None, None, *options)[1])
    return torch.cat(found)


def _reference(
    x,
    dt,
    A,
    B,
    C,
    chunk_size,
    D=None,
    z=None,
    dt_bias=None,
    initial_states=None,
    seq_idx=None,
    cu_seqlens=None,
    dt_softplus=False,
    dt_limit=(0.0, float("inf")),
    return_final_states=False,
    return_varlen_states=False,
):
    inputs = _by_channel("mamba_chunk_scan_combined", x, dt, A, B, C, D, z, dt_bias, initial_states)
    y, states = scan(*inputs, seq_idx, dt_softplus, *dt_limit)
    return (y, states) if return_final_states else y


def _sample(name, batch, length, heads, channels, states, *, groups=1, ends=None, given=True):
    of_x, of_rows = (batch, length, heads, channels), (batch, length, groups, states)
    shapes = [of_x, of_x[:3], (heads,), of_rows, of_rows]
    shapes += [(heads, channels), of_x, (heads,), (batch, heads, channels, states)] * given

    def arguments(x, dt, A, B, C, *rest):
        D, z, bias, before = rest or (None, None, None, None)
        numbers = None if ends is None else integers([i for i, n in enumerate(ends) for _ in range(n)], x, torch.int32)
        sequences = None if numbers is None else numbers.expand(batch, -1)
        return x, dt, -A.abs(), B, C, 64, D, z, bias, before, sequences, None, True, (0.0, 2.0), True

    return Sample(name, tuple(shapes), arguments=arguments, terms=states + length, backward=length > 0)


register(
    Op(
        "mamba_chunk_scan_combined",
        mamba_chunk_scan_combined,
        reference=_reference,
        operators=("selective_scan", "selective_scan_backward"),
        integers={"seq_idx": torch.int32, "cu_seqlens": torch.int32},
        production=lambda batch_size=1, length=128, heads=2, channels=32, states=64: _sample(
            "", batch_size, length, heads, channels, states
        ),
        samples=lambda: (
            _sample("heads", 2, 12, 4, 6, 20, groups=2, given=False),
            _sample("sequences", 1, 70, 2, 5, 16, ends=(3, 30, 37)),
            _sample("128 states", 1, 5, 2, 3, 100),
            _sample("many states", 1, 5, 2, 3, 200),
            _sample("empty", 1, 0, 2, 3, 4),
        ),
    )
)
