"""Cross entropy of logits, and log-probabilities of chosen classes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import increment_version

from .._core.operators import cpu_kernel, fake_kernel, needs_gradient, ops
from .._core.registry import Op, Override, Sample, register
from .._core.routing import alike, autocast_to_float32, is_plain, on_cuda, require_tensors
from .._core.samples import rows
from .._core.tensors import is_dtensor
from ._cross_entropy_operators import cap, cross_entropy_ahead, cross_entropy_rows
from ._cross_entropy_output import Wanted, log_sum, output, target_probability, target_weight

__all__ = ["cross_entropy", "selective_log_softmax"]

REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}  # PyTorch's numbers


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    softcap: float | None = None,
    z_loss: float = 0.0,
    inplace: bool = False,
    token_scaling: bool = False,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
) -> Any:  # Tensor | CrossEntropyOutput
    """Computes the cross entropy of logits and targets, as torch.nn.functional.cross_entropy.

    The logits are read once for the loss. The gradient reads them once more.

    Args:
        input: logits (C), (N, C) or (N, C, d1, …), float32, float16 or bfloat16, any strides, computed in float32.
        target: classes, int64, of the input's shape without C; or probabilities of classes, of the input's shape and
            dtype. Probabilities that require a gradient go to PyTorch's op. The loss for a class that is neither in
            [0, C) nor ignore_index is NaN.
        weight: of the classes, (C).
        size_average, reduce: PyTorch's older way to name a reduction.
        ignore_index: targets of this class have no loss and no gradient.
        reduction: "mean" (over the targets' weights), "sum" or "none".
        label_smoothing: the part of each target's probability that all classes share, in [0, 1].
        softcap: logits become softcap * tanh(logits / softcap), except those that are -inf.
        z_loss: z_loss * logsumexp(logits)^2 is added to the loss of each target that is not ignored. Class weights do
            not multiply it. "mean" divides it as it divides the loss: by the targets' weights, and not by their count.
        inplace: the memory of the logits (N, C) may be overwritten, by their gradient. It is a permission: memory and
            a walk over the logits are saved where classes are the targets, the reduction is no "none", the input
            requires a gradient, is contiguous and neither a leaf nor a view of one, and nothing traces the call.
            backward() then runs once.
        token_scaling: each target's loss is multiplied by the probability of its class, which counts as a constant.
            "mean" divides by the same number as without.
        return_z_loss, return_token_accuracy, return_predicted_tokens: what to return besides the loss. These four
            need classes as targets, and no DTensor. The classes with the largest logits take another walk over them.

    Logits may be a DTensor that is sharded along C: they are not gathered (metalcore/distributed/vocabulary.py).

    Returns:
        A tensor of the input's dtype, or float32 if autocast makes PyTorch's result float32. It has gradients of any
        order, and the same inputs give the same bits. With one of the return_… a `CrossEntropyOutput`.

    Example:
        >>> logits, target = torch.zeros(2, 4, device="mps"), torch.tensor([0, 3], device="mps")
        >>> round(metalcore.cross_entropy(logits, target).item(), 4)  # log(4)
        1.3863
    """
    if size_average is not None or reduce is not None:
        reduction = torch.nn._reduction.legacy_get_string(size_average, reduce)  # pyright: ignore[reportAttributeAccessIssue]
    wanted = Wanted(return_z_loss, return_token_accuracy, return_predicted_tokens)
    if any(wanted) or token_scaling:
        require_classes("cross_entropy", input, target)
    if is_dtensor(input):
        from ..distributed import vocabulary

        return vocabulary.cross_entropy(
            input, target, weight, ignore_index, reduction, label_smoothing, softcap, z_loss
        )
    if not _takes(input, target, weight, reduction, label_smoothing, ignore_index):
        options = ignore_index, reduction, label_smoothing, softcap, z_loss
        if any(wanted) or token_scaling:
            return _more_by_torch(input, target, weight, *options, token_scaling, wanted)
        return _by_torch(input, target, weight, *options)
    probabilities = target.is_floating_point()  # whose loss ends in a sum, which autocast leaves in 16 bits on mps
    if autocast_to_float32("log_softmax", input) and (not probabilities or on_cuda(input)):
        input = input.float()
        target = target.float() if probabilities else target
    options = ignore_index, float(label_smoothing), float(softcap or 0.0), float(z_loss)
    if any(wanted) or token_scaling:
        return _more(input, target, weight, reduction, options, token_scaling, wanted)
    if inplace and _replaceable(input, target, reduction):
        return _Replaced.apply(input, target, weight, reduction == "mean", options)
    return cross_entropy_rows(input, target, weight, REDUCTIONS[reduction], *options)


def selective_log_softmax(logits: Tensor, index: Tensor) -> Tensor:
    """Computes the log-probabilities of chosen classes, log_softmax(logits, -1) at `index`, as the losses of DPO and
    GRPO need them. The log-probabilities of the other classes are never written.

    Args:
        logits: (…, C), float32, float16 or bfloat16.
        index: classes, int64, of the logits' shape without C. The result for one outside of [0, C) is NaN.

    Returns:
        A tensor of the index's shape and the logits' dtype, with gradients of any order.

    Example:
        >>> logits, index = torch.zeros(2, 4, device="mps"), torch.tensor([0, 3], device="mps")
        >>> metalcore.selective_log_softmax(logits, index).shape
        torch.Size([2])
    """
    require_tensors("selective_log_softmax", logits=logits, index=index)
    *batch, count = logits.shape or (0,)
    if logits.dim() == 0 or index.shape != (*batch,):
        raise RuntimeError(
            f"selective_log_softmax: index must have the shape of logits without the last dimension, "
            f"{batch}, not {list(index.shape)}"
        )
    rows, classes = logits, index
    if len(batch) > 1 and logits.numel():
        rows, classes = logits.reshape(-1, count), index.reshape(-1)
    if not _takes(rows, classes):
        return logits.log_softmax(-1).gather(-1, index[..., None])[..., 0]
    if autocast_to_float32("log_softmax", rows):
        rows = rows.float()
    # No class is ignored: this one is none.
    losses = -cross_entropy_rows(rows, classes, None, 0, _NO_CLASS, 0.0, 0.0, 0.0)
    return losses if len(batch) <= 1 else losses.view(batch)


_NO_CLASS = -(2**63)


def _takes(input, target, weight=None, reduction="mean", label_smoothing=0.0, ignore_index=0):
    if not alike(input, weight) or not isinstance(target, Tensor) or target.device != input.device:
        return False
    shape = input.shape
    dims = len(shape)
    if dims == 0 or not 0 < input.numel() <= 2**31 * 64 or type(reduction) is not str or reduction not in REDUCTIONS:
        return False
    classes = shape[0 if dims == 1 else 1]
    if target.dtype == torch.int64:
        fits = target.shape == ((shape[0], *shape[2:]) if dims > 1 else ())
    else:
        fits = target.dtype == input.dtype and target.shape == shape and not target.requires_grad and dims > 1
        fits = fits and target.layout == torch.strided
    return (
        fits
        and classes < 2**31
        and type(ignore_index) is int
        and (weight is None or weight.shape == (classes,) and not weight.requires_grad)
        and isinstance(label_smoothing, (float, int))
        and 0 <= label_smoothing <= 1
    )


def _by_torch(input, target, weight, ignore_index, reduction, label_smoothing, softcap, z_loss):
    if not softcap and not z_loss:
        return F.cross_entropy(
            input, target, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
        )
    x = cap(input, softcap or 0.0)
    loss = F.cross_entropy(x, target, weight, None, ignore_index, None, reduction, label_smoothing)
    if not z_loss:
        return loss
    dim = 0 if x.dim() == 1 else 1
    squares = z_loss * x.logsumexp(dim).square()
    divisor = squares.numel()
    if not target.is_floating_point():
        counted = target != ignore_index
        squares = squares.where(counted, 0.0)
        weights = 1.0 if weight is None else weight[target.where(counted, 0)]
        divisor = (counted * weights).sum()
    return loss + {"none": squares, "sum": squares.sum(), "mean": (squares.sum() / divisor).to(x.dtype)}[reduction]


# With more results, or losses that are scaled by row


def require_classes(name, input, target):
    """Raises an error for what has no predicted classes."""
    if not isinstance(target, Tensor) or target.is_floating_point():
        raise ValueError(f"{name}: token_scaling and the results besides the loss need classes as targets")
    if is_dtensor(input) or is_dtensor(target):
        raise NotImplementedError(f"{name}: DTensors have neither token_scaling nor results besides the loss")


def _more(input, target, weight, reduction, options, token_scaling, wanted):
    kind = 0 if token_scaling else REDUCTIONS[reduction]
    loss, saved, total = ops.cross_entropy(input, target, weight, kind, *options)
    ignore_index, _, softcap, z_loss = options
    probability = None
    with torch.no_grad():
        saved = saved.view(*target.shape, 3)
        squares = z_loss * log_sum(saved).square()
        logits = input.movedim(1, -1) if input.dim() > 1 else input
        predicted = logits.argmax(-1) if wanted.predictions else None
        if token_scaling:
            probability = target_probability(logits, target, ignore_index, softcap, saved)
            total = target_weight(target, weight, ignore_index, reduction == "mean")
    if probability is not None:
        loss, squares = _scaled(loss, probability, reduction, total), squares * probability
    return output(loss, wanted, target, ignore_index, reduction, total, squares, predicted) if any(wanted) else loss


def _scaled(losses, factors, reduction, total):
    scaled = losses.to(factors.dtype) * factors
    return (scaled if reduction == "none" else scaled.sum() / total.squeeze()).to(losses.dtype)


def _more_by_torch(
    input, target, weight, ignore_index, reduction, label_smoothing, softcap, z_loss, token_scaling, wanted
):
    softcap = softcap or 0.0
    loss = _by_torch(
        input, target, weight, ignore_index, "none" if token_scaling else reduction, label_smoothing, softcap, z_loss
    )
    with torch.no_grad():
        logits = input.movedim(1, -1) if input.dim() > 1 else input
        squares = z_loss * cap(logits, softcap).logsumexp(-1).square()
        predicted = logits.argmax(-1) if wanted.predictions else None
        total = target_weight(target, weight, ignore_index, reduction == "mean").to(squares.dtype)
        probability = target_probability(logits, target, ignore_index, softcap) if token_scaling else None
    if probability is not None:
        loss, squares = _scaled(loss, probability, reduction, total), squares * probability
    return output(loss, wanted, target, ignore_index, reduction, total, squares, predicted) if any(wanted) else loss


# In place of the logits


def _replaceable(input, target, reduction):
    return (
        input.dim() == 2
        and target.dtype == torch.int64
        and reduction != "none"
        and torch.is_grad_enabled()
        and input.requires_grad
        and not input.is_leaf
        and not (input._base is not None and input._base.is_leaf)  # it would overwrite a parameter
        and input.is_contiguous()
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
    )


class _Replaced(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, target, weight, mean, options):
        total = target_weight(target, weight, options[0], mean)
        losses = ops.cross_entropy_(x.detach(), target, weight, total.reciprocal(), *options)
        increment_version(x)  # whoever has saved the logits for backward() finds out
        ctx.save_for_backward(x.detach())
        ctx.used = False
        return (losses.sum() / total[0]).to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.used:
            raise RuntimeError("cross_entropy: with inplace=True backward() runs once; the logits are gone")
        ctx.used = True
        (gradient,) = ctx.saved_tensors
        ops.scale_(gradient, grad.float())
        increment_version(gradient)
        return gradient, None, None, None, None


@cpu_kernel("scale_")
def _(x, factor):
    x.mul_(factor)
    return x.new_empty(0)


@fake_kernel("scale_")
def _(x, factor):
    return x.new_empty(0)


# Overrides of PyTorch's kernels


def _override(previous, count, decline):
    def kernel(keyset, x, target, weight=None, reduction=1, ignore_index=-100, label_smoothing=0.0):
        names = {number: name for name, number in REDUCTIONS.items()}
        fits = (
            is_plain(x)
            and is_plain(target)
            and is_plain(weight)
            and _takes(x, target, weight, names.get(reduction), label_smoothing, ignore_index)  # pyright: ignore[reportArgumentType]
        )
        if not fits or autocast_to_float32("log_softmax", x):
            return decline(keyset, x, target, weight, reduction, ignore_index, label_smoothing)
        smoothing = float(label_smoothing)
        if not needs_gradient(x):
            return count.run(cross_entropy_rows, x, target, weight, reduction, ignore_index, smoothing, 0.0, 0.0)
        divided = reduction == 1 and _is_divided_ahead(x)
        return count.run(cross_entropy_ahead, x, target, weight, reduction, ignore_index, smoothing, divided)[0]

    return kernel


# Whether the gradient of a mean is divided where it is first written, for which the targets are read before. It saves
# another walk over logits that caches do not hold, if the upstream gradient is 1. One threadgroup reads the targets.
_DIVIDED_FROM, _MOST_TARGETS = 2**22, 2**16


def _is_divided_ahead(x):
    # Quotients of float16 would be too small for it. An upstream gradient may have a scale for that.
    large = x.dim() > 1 and x.numel() >= _DIVIDED_FROM and x.numel() // x.shape[1] <= _MOST_TARGETS
    return large and x.dtype is not torch.float16


def _classes(x, dim=-1):
    """Returns a class for each row, of which one is ignored."""
    shape = [size for d, size in enumerate(x.shape) if d != dim % x.dim()]
    index = torch.arange(max(1, x.numel() // max(1, x.shape[dim])), device=x.device) * 7 % max(1, x.shape[dim])
    index = index[: x.numel() // max(1, x.shape[dim])].view(shape)
    return index


def _sample(name, count, length):
    return Sample(name, ((count, length),), arguments=lambda x: (x, _classes(x)), terms=max(count, length))


def _probabilities(x):
    """Returns targets of half of the classes, the same in every dtype."""
    return (torch.arange(x.shape[1], device=x.device) % 2 * 2**-6).to(x.dtype).expand(x.shape)


def _samples():
    every = {"label_smoothing": 0.1, "ignore_index": 7, "reduction": "sum"}
    return (
        *rows(_sample),
        Sample("pixels", ((2, 5, 6, 7),), arguments=lambda x: (x, _classes(x, 1)), terms=84),
        Sample(
            "weights and smoothing",
            ((20, 40),),
            every,
            arguments=lambda x: (x, _classes(x), torch.linspace(0.5, 2, 40, dtype=x.dtype, device=x.device)),
            terms=800,
        ),
        Sample("losses of rows", ((20, 40),), {"reduction": "none"}, arguments=lambda x: (x, _classes(x)), terms=40),
        Sample("probabilities", ((9, 130),), arguments=lambda x: (x, _probabilities(x)), terms=1170),
        Sample("many rows", ((9000, 5),), arguments=lambda x: (x, _classes(x)), terms=9000),
    )


register(
    Op(
        "cross_entropy",
        cross_entropy,
        namesake="torch.nn.functional.cross_entropy",
        operators=(
            "cross_entropy",
            "cross_entropy_backward",
            "cross_entropy_",
            "scale_",
            "cross_entropy_ahead",
            "cross_entropy_finish_",
        ),
        integers={"target": torch.int64},
        override=(
            Override("cross_entropy_loss", _override, at_autograd=True),
            Override("cross_entropy_loss", _override),
        ),
        samples=_samples,
    )
)
register(
    Op(
        "selective_log_softmax",
        selective_log_softmax,
        reference=lambda logits, index: logits.log_softmax(-1).gather(-1, index[..., None])[..., 0],
        operators=("cross_entropy", "cross_entropy_backward"),
        integers={"index": torch.int64},
        samples=lambda: (
            Sample("tokens", ((3, 11, 100),), arguments=lambda x: (x, _classes(x)), terms=100),
            Sample("one", ((20,),), arguments=lambda x: (x, _classes(x)), terms=20),
        ),
    )
)
