"""What is kept of rows of logits or probabilities before classes are drawn from them, in FlashInfer's terms."""

from __future__ import annotations

import torch
from torch import Tensor

from .._core.operators import cpu_kernel, fake_kernel, ops
from .._core.registry import Op, Sample, register
from .._core.routing import INT32_MAX, accelerated, require_tensors
from .._core.tensors import beside

__all__ = ["top_k_mask_logits", "top_k_renorm_probs", "top_p_renorm_probs"]

_MASK, _TOP_K, _TOP_P = range(3)  # RENORM_… of kernels/sampling/sampling.h


def top_k_mask_logits(logits: Tensor, top_k: int | Tensor) -> Tensor:
    """Replaces all except the k largest logits of each row by -inf.

    Args:
        logits: (…, C), float32, float16 or bfloat16, any strides. NaN counts as -inf.
        top_k: a number from 1 on, or an integer tensor of them that broadcasts to the logits' shape without C. Logits
            that equal the smallest one that is kept are kept as well.

    Returns:
        A contiguous tensor of the logits' shape and dtype, without a derivative.

    Raises:
        ValueError: top_k is not positive.
        TypeError: logits is no tensor, or top_k is of another type.
        RuntimeError: the logits are no floating-point numbers, or top_k does not broadcast.

    Example:
        >>> logits = torch.tensor([[0.0, 9.0, 1.0]], device="mps")
        >>> metalcore.top_k_mask_logits(logits, 2).tolist()
        [[-inf, 9.0, 1.0]]
    """
    return _rows("top_k_mask_logits", "logits", logits, "top_k", top_k, _MASK)


def top_k_renorm_probs(probs: Tensor, top_k: int | Tensor) -> Tensor:
    """Divides the k largest probabilities of each row by their sum, and sets the others to zero.

    Args:
        probs: (…, C), as the logits of `top_k_mask_logits`. Negative numbers and NaN count as 0.
        top_k: as for `top_k_mask_logits`.

    Returns:
        A contiguous tensor of probs' shape and dtype, without a derivative. A row without a positive number is 0.

    Raises:
        As `top_k_mask_logits`.

    Example:
        >>> probs = torch.tensor([[0.5, 0.25, 0.25, 0.0]], device="mps")
        >>> metalcore.top_k_renorm_probs(probs, 1).tolist()
        [[1.0, 0.0, 0.0, 0.0]]
    """
    return _rows("top_k_renorm_probs", "probs", probs, "top_k", top_k, _TOP_K)


def top_p_renorm_probs(probs: Tensor, top_p: float | Tensor) -> Tensor:
    """Divides the smallest set of largest probabilities of each row that has this part of their sum by its own sum, and
    sets the others to zero.

    Args:
        probs: as for `top_k_renorm_probs`.
        top_p: a number in [0, 1], or a floating-point tensor of them, as top_k. Probabilities that equal the smallest
            one that is kept are kept as well.

    Returns:
        As `top_k_renorm_probs`.

    Raises:
        ValueError: top_p is not in [0, 1].
        TypeError, RuntimeError: as `top_k_mask_logits`.

    Example:
        >>> probs = torch.tensor([[0.5, 0.25, 0.25, 0.0]], device="mps")
        >>> metalcore.top_p_renorm_probs(probs, 0.4).tolist()
        [[1.0, 0.0, 0.0, 0.0]]
    """
    return _rows("top_p_renorm_probs", "probs", probs, "top_p", top_p, _TOP_P)


def _rows(op, name, x, option, limit, kind):
    require_tensors(op, **{name: x})
    if x.dim() == 0 or not x.is_floating_point():
        raise RuntimeError(f"{op}: {name} must be floating-point numbers (…, C)")
    limits = _limits(op, option, limit, kind, x)
    rows = x.detach().reshape(limits.numel(), x.shape[-1])
    run = ops.renorm_rows if accelerated(rows) and rows.numel() and rows.shape[1] <= INT32_MAX else _by_torch
    return run(rows, limits, kind).view(x.shape)


def _limits(op, option, limit, kind, x):
    """Returns the option for each row, as float32."""
    shape = x.shape[:-1]
    if isinstance(limit, Tensor):
        if limit.dtype == torch.bool or limit.is_complex() or limit.is_floating_point() != (kind == _TOP_P):
            raise TypeError(f"{op}: {option} must not be of {limit.dtype}")
        return limit.detach().to(x.device, torch.float32).expand(shape).reshape(-1)
    if type(limit) is not int and not (kind == _TOP_P and type(limit) is float):
        raise TypeError(f"{op}: {option} must be a number or a tensor, not {type(limit).__name__}")
    if not (0 <= limit <= 1 if kind == _TOP_P else limit > 0):
        raise ValueError(f"{op}: {option} must be {'in [0, 1]' if kind == _TOP_P else 'positive'}, not {limit}")
    return beside(x, torch.full((shape.numel(),), limit, dtype=torch.float32, device=x.device))


@cpu_kernel("renorm_rows")
def _by_torch(x, limits, kind):
    x = x.contiguous()  # as the result is
    wide = x if x.dtype == torch.float64 else x.float()
    wide = wide.where(~wide.isnan(), -torch.inf if kind == _MASK else 0.0)
    if x.numel() == 0:
        return torch.empty_like(x)
    ordered = wide.sort(-1, descending=True).values
    if kind == _TOP_P:
        sums = ordered.clamp_min(0).cumsum(-1)
        enough = sums >= limits.clamp_min(0)[:, None].to(sums.dtype) * sums[:, -1:]
        last = enough.to(torch.uint8).argmax(-1, keepdim=True).where(limits[:, None] < 1, x.shape[-1] - 1)
    else:
        last = limits.long().clamp(1, x.shape[-1])[:, None] - 1
    kept = wide >= ordered.gather(-1, last)
    if kind == _MASK:
        return wide.where(kept, -torch.inf).to(x.dtype)
    masses = wide.clamp_min(0).where(kept, 0.0)
    total = masses.sum(-1, keepdim=True)
    return (masses / total.where(total > 0, 1.0)).to(x.dtype)


@fake_kernel("renorm_rows")
def _(x, limits, kind):
    return x.new_empty(x.shape)


def _flat(x, limit, kind):
    return _by_torch(x.reshape(-1, x.shape[-1]), torch.full((x.shape[:-1].numel(),), limit).to(x.device), kind).view(
        x.shape
    )


def _probabilities(x):
    return x.softmax(-1)


def _finite(masked):
    """Returns which numbers are -inf, and the others: -inf has no distance from another one."""
    return [masked.isneginf().to(masked.dtype), masked.where(~masked.isneginf(), 0.0)]


register(
    Op(
        "top_k_mask_logits",
        top_k_mask_logits,
        reference=lambda logits, top_k: _flat(logits, top_k, _MASK),
        results=_finite,
        operators=("renorm_rows",),
        backward=False,
        samples=lambda: (
            Sample("rows", ((5, 1000),), {"top_k": 7}),
            Sample("short rows", ((2, 3, 20),), {"top_k": 100}),
        ),
        production=lambda batch_size=4, vocab_size=32000, top_k=50: Sample(
            "", ((batch_size, vocab_size),), {"top_k": top_k}
        ),
    )
)
register(
    Op(
        "top_k_renorm_probs",
        top_k_renorm_probs,
        reference=lambda probs, top_k: _flat(probs, top_k, _TOP_K),
        operators=("renorm_rows",),
        backward=False,
        samples=lambda: (Sample("rows", ((5, 1000),), {"top_k": 7}, prepare=(_probabilities,), terms=7),),
        production=lambda batch_size=4, vocab_size=32000, top_k=50: Sample(
            "", ((batch_size, vocab_size),), {"top_k": top_k}, prepare=(_probabilities,), terms=top_k
        ),
    )
)
register(
    Op(
        "top_p_renorm_probs",
        top_p_renorm_probs,
        reference=lambda probs, top_p: _flat(probs, top_p, _TOP_P),
        operators=("renorm_rows",),
        backward=False,
        # Probabilities of which one has more than the part that is wanted: roundings of sums decide nothing.
        samples=lambda: (
            Sample("rows", ((5, 1000),), {"top_p": 0.25}, prepare=(_one_likely,), terms=2),
            Sample("all", ((5, 20),), {"top_p": 1.0}, prepare=(_probabilities,), terms=20),
        ),
        production=lambda batch_size=4, vocab_size=32000, top_p=0.25: Sample(
            "", ((batch_size, vocab_size),), {"top_p": top_p}, prepare=(_one_likely,), terms=2
        ),
    )
)


def _one_likely(x):
    probabilities = x.softmax(-1) / 2
    probabilities[..., 0] += 0.5
    return probabilities
