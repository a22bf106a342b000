"""Classes drawn from the distributions of logits."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .._core.operators import cpu_kernel, fake_kernel, without_derivative
from .._core.registry import Op, Sample, register
from .._core.routing import accelerated, require_tensors

__all__ = ["sample"]


def sample(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draws a class from softmax(logits / temperature) for each row, of its most probable classes only.

    Nothing is sorted, and nothing is copied to the host: thresholds are found on the device, and one random number of
    each row goes through the inverse of its distribution. The options apply in this order:

    Args:
        logits: (…, C), float32, float16 or bfloat16. It is computed in float32; NaN counts as -inf. Where all logits of
            a row are -inf its first class is drawn.
        temperature: a number. 0 gives the first of the largest logits.
        top_k: only the k largest logits, and those that equal the smallest of them, are drawn from.
        top_p: of these only the smallest set of largest logits that has this part of their probability, and those that
            equal the smallest of them.
        min_p: of these only what is at least min_p times as probable as the largest.
        generator: of the logits' device; PyTorch's own by default. Its seed decides what is drawn.

    Returns:
        Classes, int64, of the logits' shape without C.

    Raises:
        ValueError: an option is out of its range.
        RuntimeError: there are no classes.
    """
    require_tensors("sample", logits=logits)
    if not (_number(temperature) and 0 <= temperature < math.inf):
        raise _wrong("temperature", temperature, "a number from 0 on")
    if not (top_k is None or type(top_k) is int and top_k > 0):
        raise _wrong("top_k", top_k, "a positive int or None")
    if not (top_p is None or _number(top_p) and 0 < top_p <= 1):
        raise _wrong("top_p", top_p, "in (0, 1] or None")
    if not (min_p is None or _number(min_p) and 0 <= min_p <= 1):
        raise _wrong("min_p", min_p, "in [0, 1] or None")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"sample: generator must be a torch.Generator, not {type(generator).__name__}")
    *batch, classes = logits.shape or (0,)
    if classes == 0 or not logits.is_floating_point():
        raise RuntimeError("sample: logits must be floating-point numbers (…, C) with at least one class")
    rows = logits.detach() if logits.requires_grad else logits
    rows = rows if len(batch) == 1 else rows.reshape(-1, classes)
    count = rows.shape[0]
    uniform = torch.rand(count, dtype=torch.float32, device=logits.device, generator=generator)
    run = _sample if count and classes < 2**31 and accelerated(rows) else _by_torch
    top_p = 1.0 if top_p is None else float(top_p)
    drawn = run(rows, uniform, float(temperature), top_k or 0, top_p, float(min_p or 0.0))
    return drawn if len(batch) == 1 else drawn.view(batch)


def _number(value):
    return type(value) in (float, int)


def _wrong(name, value, expected):
    return ValueError(f"sample: {name} must be {expected}, not {value!r}")


def distribution(x: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """The probabilities with which `sample` draws, in float32 or float64."""
    wide = x if x.dtype == torch.float64 else x.float()
    wide = wide.where(~wide.isnan(), -torch.inf)
    largest = wide.amax(-1, keepdim=True)
    first = (wide == largest).to(torch.uint8).argmax(-1, keepdim=True)
    alone = torch.arange(x.shape[-1], device=x.device) == first
    if temperature == 0:
        return alone.to(wide.dtype)
    shifted = ((wide - largest) / temperature).where(wide != largest, 0.0)
    ordered = wide.sort(-1, descending=True).values
    least = ordered[..., min(top_k or x.shape[-1], x.shape[-1]) - 1, None]
    masses = shifted.exp().where((wide >= least) & (alone | ~largest.isneginf()), 0.0)
    if top_p < 1:
        falling = masses.sort(-1, descending=True).values
        sums = falling.cumsum(-1)
        enough = (sums >= top_p * masses.sum(-1, keepdim=True)).to(torch.uint8).argmax(-1, keepdim=True)
        masses = masses.where(masses >= falling.gather(-1, enough), 0.0)
    if min_p > 0:
        masses = masses.where(shifted >= math.log(min_p), 0.0)
    return masses / masses.sum(-1, keepdim=True)


@cpu_kernel("sample")
def _by_torch(x, uniform, temperature, top_k, top_p, min_p):
    ends = distribution(x, temperature, top_k, top_p, min_p).cumsum(-1)
    point = uniform[:, None].to(ends.dtype) * ends[:, -1:]
    return (ends > point).to(torch.uint8).argmax(-1)


@fake_kernel("sample")
def _(x, uniform, temperature, top_k, top_p, min_p):
    return x.new_empty(x.shape[0], dtype=torch.int64)


_sample = without_derivative("sample")


register(
    Op(
        "sample",
        sample,
        # Samples leave nothing to chance.
        reference=lambda logits, *_, **options: logits.argmax(-1),
        results=lambda classes: [classes.float()],
        operators=("sample",),
        edge=tuple,  # of equal values any may be drawn
        backward=False,
        samples=lambda: (
            Sample("the largest", ((5, 1000),), {"temperature": 0.0}),
            Sample("one of one", ((3, 7, 100),), {"top_k": 1}),
            Sample("of one nucleus", ((5, 1000),), {"temperature": 0.01, "top_p": 1e-6, "min_p": 1.0}),
        ),
    )
)
