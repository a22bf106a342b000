"""Classes drawn from the distributions of logits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._core.operators import cpu_kernel, fake_kernel, without_derivative
from .._core.registry import Op, Sample, register
from .._core.routing import accelerated, require_tensors
from .._core.tensors import host_sees

__all__ = ["sample"]


def sample(
    logits: Tensor,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor | None = None,
    top_p: float | Tensor | None = None,
    min_p: float | Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draws a class from softmax(logits / temperature) for each row, of its most probable classes only.

    Nothing is sorted, and nothing is copied to the host: thresholds are found on the device, and one random number of
    each row goes through the inverse of its distribution. The options apply in this order. Each may be a tensor that
    broadcasts to the logits' shape without C, with an option for each row:

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
        ValueError: an option is out of its range. Tensors are looked at where the host sees their numbers; elsewhere a
            temperature below 0 is as 0, top_k below 1 and top_p above 1 keep all, and top_p of 0 and min_p above 1 keep
            the largest.
        TypeError: logits is no tensor, or a tensor of options has another kind of numbers.
        RuntimeError: there are no classes, or a tensor of options does not broadcast.

    Example:
        >>> logits = torch.tensor([[0.0, 9.0, 1.0]], device="mps")
        >>> metalcore.sample(logits, top_k=1).tolist()
        [1]
    """
    require_tensors("sample", logits=logits)
    settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    for name, option in settings.items():
        if not isinstance(option, Tensor):
            expected = _EXPECTED[name]
            if not (option is None and name != "temperature" or _number(option, name) and expected.holds(option)):
                raise _wrong(name, option, expected.text)
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
    if any(isinstance(option, Tensor) for option in settings.values()):
        drawn = run(rows, uniform, 1.0, 0, 1.0, 0.0, _per_row(settings, logits, batch))
    else:
        top_p = 1.0 if top_p is None else float(top_p)  # pyright: ignore[reportArgumentType]
        drawn = run(rows, uniform, float(temperature), min(top_k or 0, classes), top_p, float(min_p or 0.0), None)
    return drawn if len(batch) == 1 else drawn.view(batch)


class _Range(NamedTuple):
    holds: Callable[[Any], Any]  # of a number or a tensor of them
    text: str


# bitwise & instead of `and`, for tensors
_EXPECTED = {
    "temperature": _Range(lambda x: (x >= 0) & (x < math.inf), "a number from 0 on"),
    "top_k": _Range(lambda x: x > 0, "a positive int or None"),
    "top_p": _Range(lambda x: (x > 0) & (x <= 1), "in (0, 1] or None"),
    "min_p": _Range(lambda x: (x >= 0) & (x <= 1), "in [0, 1] or None"),
}


def _per_row(settings, logits, batch):
    """Returns the options of each row, (rows, 4) in float32: SampleOptions of kernels/sampling/sampling.h."""
    columns = []
    for (name, option), default in zip(settings.items(), (1.0, 0, 1.0, 0.0)):
        if isinstance(option, Tensor):
            floating = option.is_floating_point()
            if option.dtype == torch.bool or option.is_complex() or floating == (name == "top_k"):
                raise TypeError(f"sample: {name} must not be of {option.dtype}")
            if option.device != logits.device:
                raise RuntimeError(f"sample: {name} must be on the logits' device, {logits.device}")
            if host_sees(option) and not bool(_EXPECTED[name].holds(option).all()):
                raise _wrong(name, option, _EXPECTED[name].text.removesuffix(" or None"))
            try:
                columns.append(option.detach().to(torch.float32).expand(batch).reshape(-1))
            except RuntimeError as error:
                shapes = f"{tuple(option.shape)} does not broadcast to {tuple(batch)}"
                raise RuntimeError(f"sample: {name} of the shape {shapes}") from error
        else:
            number = float(default if option is None else option)
            columns.append(torch.full((math.prod(batch),), number, dtype=torch.float32, device=logits.device))
    return torch.stack(columns, -1)


def _number(value, name):
    return type(value) is int or type(value) is float and name != "top_k"


def _wrong(name, value, expected):
    return ValueError(f"sample: {name} must be {expected}, not {value!r}")


def distribution(x: Tensor, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, options: Tensor | None = None) -> Tensor:
    """Returns the probabilities with which `sample` draws, in float32 or float64. `options` has the numbers of each row
    in the place of the others."""
    wide = x if x.dtype == torch.float64 else x.float()
    wide = wide.where(~wide.isnan(), -torch.inf)
    if options is None:
        options = wide.new_tensor([temperature, top_k, top_p, min_p])
    own = options.to(wide.dtype).expand(*x.shape[:-1], 4).split(1, -1)
    own_temperature, own_top_k, own_top_p, own_min_p = own
    largest = wide.amax(-1, keepdim=True)
    first = (wide == largest).to(torch.uint8).argmax(-1, keepdim=True)
    alone = torch.arange(x.shape[-1], device=x.device) == first
    greedy = own_temperature <= 0
    shifted = ((wide - largest) / own_temperature.where(~greedy, 1.0)).where(wide != largest, 0.0)
    ordered = wide.sort(-1, descending=True).values
    classes = x.shape[-1]
    least = ordered.gather(-1, own_top_k.where(own_top_k > 0, classes).clamp(max=classes).long() - 1)
    masses = shifted.exp().where((wide >= least) & (alone | ~largest.isneginf()), 0.0)
    falling = masses.sort(-1, descending=True).values
    sums = falling.cumsum(-1)
    enough = (sums >= own_top_p * masses.sum(-1, keepdim=True)).to(torch.uint8).argmax(-1, keepdim=True)
    masses = masses.where((masses >= falling.gather(-1, enough)) | (own_top_p >= 1), 0.0)
    masses = masses.where((shifted >= own_min_p.log()) | (wide == largest), 0.0)
    return alone.to(wide.dtype).where(greedy, masses / masses.sum(-1, keepdim=True))


@cpu_kernel("sample")
def _by_torch(x, uniform, temperature, top_k, top_p, min_p, options=None):
    ends = distribution(x, temperature, top_k, top_p, min_p, options).cumsum(-1)
    point = uniform[:, None].to(ends.dtype) * ends[:, -1:]
    return (ends > point).to(torch.uint8).argmax(-1)


@fake_kernel("sample")
def _(x, uniform, temperature, top_k, top_p, min_p, options=None):
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
            Sample("the largest of a long row", ((1, 9001),), {"temperature": 0.0}),
            Sample("of one nucleus", ((5, 1000),), {"temperature": 0.01, "top_p": 1e-6, "min_p": 1.0}),
        ),
    )
)
