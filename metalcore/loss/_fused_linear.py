"""Cross entropy of a linear layer's outputs, which are never in memory as a whole."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._core.registry import Op, Sample, register
from .._core.routing import alike, autocast_dtype, is_plain, require_tensors
from .._core.tensors import is_dtensor
from ._cross_entropy import REDUCTIONS, _classes, _takes, cross_entropy, require_classes
from ._cross_entropy_output import CrossEntropyOutput, Wanted, output, target_weight
from ._fused_linear_operators import fused
from ._weight_gradient import accumulation

__all__ = ["fused_linear_cross_entropy"]

_CHUNK_BYTES = 256 << 20


def chunk_of(rows: int, classes: int, itemsize: int) -> int:
    """Returns how many rows have their logits in memory at once: about 256 MiB of them, and whole tiles of a
    product."""
    return min(rows, max(256, _CHUNK_BYTES // (classes * itemsize) // 256 * 256))


def fused_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    chunk: int | None = None,
    token_weight: Tensor | None = None,
    token_scaling: bool = False,
    accum_dtype: torch.dtype | None = None,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
) -> Any:  # Tensor | CrossEntropyOutput
    """Computes cross_entropy(hidden @ weight.T + bias, target) with the logits of one chunk of rows in memory at a
    time.

    Each chunk's logits give way to their gradient as soon as their losses are known, and this to its products with the
    weight and with the hidden states (the method of Liger-Kernel, arXiv:2410.10989). So backward() has only to scale
    the gradients, and peak memory is that of the gradients and of a chunk.

    Args:
        hidden: (…, H), float32, float16 or bfloat16, any strides.
        weight: (C, H), of hidden's dtype, or under autocast of any.
        target: classes, int64, of hidden's shape without H.
        bias: (C) or None.
        class_weight, ignore_index, reduction, label_smoothing, softcap, z_loss: as for `cross_entropy`.
        chunk: the rows of a chunk; by default as many as have 256 MiB of logits, and at least 256.
        token_weight: of target's shape: each target's loss is multiplied by it, and "mean" divides by the sum of these
            weights, times the class weights of the targets. It is a constant; with a gradient of its own, or on a
            DTensor, it takes all logits into memory.
        token_scaling: as for `cross_entropy`: the losses are multiplied by the targets' probabilities.
        accum_dtype: in which the gradient of a 16-bit weight is summed over the chunks: float32, the weight's dtype, or
            None for float32 where there are more than 4 chunks. float32 takes a buffer of twice the weight's memory
            until the forward pass ends. The error of the weight's dtype grows with the number of chunks: it is twice
            that of one chunk with 16 of them, and ten times with 1,024.
        return_z_loss, return_token_accuracy, return_predicted_tokens: what to return besides the loss, as for
            `cross_entropy`. token_scaling and return_z_loss read the logits of a chunk once more, and so do the
            predictions.

    Returns:
        The loss, float32 under autocast, otherwise of hidden's dtype, or a `CrossEntropyOutput`. With reduction="none"
        the gradient computes the logits again. backward() overwrites the gradients that the forward pass has made,
        except with retain_graph=True, which copies them.

    Example:
        >>> hidden, weight = torch.zeros(2, 8, device="mps"), torch.randn(4, 8, device="mps")
        >>> target = torch.tensor([0, 3], device="mps")
        >>> round(metalcore.fused_linear_cross_entropy(hidden, weight, target).item(), 4)  # log(4)
        1.3863
    """
    require_tensors("fused_linear_cross_entropy", hidden=hidden, weight=weight, target=target)
    optional = {"bias": bias, "class_weight": class_weight, "token_weight": token_weight}
    require_tensors("fused_linear_cross_entropy", optional=True, **optional)  # pyright: ignore[reportArgumentType]
    if token_weight is not None and (token_weight.shape != target.shape or not token_weight.is_floating_point()):
        raise ValueError(
            f"fused_linear_cross_entropy: token_weight must have target's shape {list(target.shape)} and a "
            f"floating-point dtype, not {list(token_weight.shape)} and {token_weight.dtype}"
        )
    if accum_dtype not in (None, torch.float32, weight.dtype):
        raise ValueError(
            "fused_linear_cross_entropy: accum_dtype must be None, torch.float32 or the weight's dtype, "
            f"not {accum_dtype}"
        )
    wanted = Wanted(return_z_loss, return_token_accuracy, return_predicted_tokens)
    if any(wanted) or token_scaling:
        require_classes("fused_linear_cross_entropy", hidden, target)
    if chunk is not None and (type(chunk) is not int or chunk < 1):
        raise ValueError(f"fused_linear_cross_entropy: chunk must be a positive number of rows, not {chunk!r}")
    autocast = autocast_dtype(hidden)
    if autocast is not None:
        hidden, weight = hidden.to(autocast), weight.to(autocast)
        bias = bias if bias is None else bias.to(autocast)
    out = hidden.dtype if autocast is None else torch.float32
    if is_dtensor(hidden) and reduction != "none" and token_weight is None:
        from ..distributed import vocabulary

        size = chunk or chunk_of(hidden.shape[:-1].numel(), len(weight), hidden.element_size())
        options = ignore_index, reduction, label_smoothing, softcap, z_loss
        return vocabulary.fused_linear_cross_entropy(hidden, weight, target, bias, class_weight, *options, size).to(out)
    fits = _fusible(hidden, weight, target, bias, class_weight, reduction, label_smoothing, ignore_index)
    if token_weight is not None:
        same_device = is_plain(token_weight) and token_weight.device == hidden.device
        fits = fits and same_device and not token_weight.requires_grad
    if is_dtensor(hidden) or not fits:
        options = ignore_index, reduction, label_smoothing, softcap, z_loss
        return _unfused(
            F.linear(hidden, weight, bias).to(out), target, class_weight, token_weight, *options, token_scaling, wanted
        )
    rows = hidden.reshape(-1, hidden.shape[-1])
    chunk = chunk or chunk_of(len(rows), len(weight), rows.element_size())
    gradients = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in (hidden, weight, bias)]
    classes = target.reshape(-1)
    loss, squares, predicted = fused(
        rows,
        weight,
        classes,
        bias,
        class_weight,
        token_weight if token_weight is None else token_weight.reshape(-1).float(),
        REDUCTIONS[reduction],
        return_z_loss,
        wanted.predictions,
        token_scaling,
        accumulation(weight, len(rows), chunk, accum_dtype) is not weight.dtype,
        ignore_index,
        float(label_smoothing),
        float(softcap or 0.0),
        float(z_loss),
        chunk,
        *gradients,
    )
    loss = (loss.view(target.shape) if reduction == "none" else loss).to(out)
    if not any(wanted):
        return loss
    with torch.no_grad():
        total = target_weight(
            classes,
            class_weight,
            ignore_index,
            reduction == "mean",
            None if token_weight is None else token_weight.reshape(-1),
        )
        squares, predicted = (
            part.view(target.shape) if asked else None
            for part, asked in ((squares, return_z_loss), (predicted, wanted.predictions))
        )
        return output(loss, wanted, target, ignore_index, reduction, total, squares, predicted)


def _unfused(
    logits,
    target,
    class_weight,
    token_weight,
    ignore_index,
    reduction,
    label_smoothing,
    softcap,
    z_loss,
    scaling,
    wanted,
):
    """Returns the same with all logits in memory."""
    output = cross_entropy(
        logits.reshape(-1, logits.shape[-1]),
        target.reshape(-1),
        class_weight if class_weight is None else class_weight.to(logits.dtype),
        None,
        ignore_index,
        None,
        reduction if token_weight is None else "none",
        label_smoothing,
        softcap=softcap,
        z_loss=z_loss,
        token_scaling=scaling,
        return_z_loss=wanted.z_loss,
        return_token_accuracy=wanted.token_accuracy,
        return_predicted_tokens=wanted.predicted_tokens,
    )
    output = output if isinstance(output, CrossEntropyOutput) else CrossEntropyOutput(output)
    loss, squares, accuracy, predicted = output
    classes, counted = target.reshape(-1), target.reshape(-1) != ignore_index
    if token_weight is not None:
        factors = token_weight.reshape(-1).to(loss.dtype)
        total = target_weight(classes, class_weight, ignore_index, reduction == "mean", factors).squeeze()

        def weighted(part):
            part = (part * factors).where(counted, 0.0)
            return part if reduction == "none" else (part.sum() / total).to(part.dtype)

        loss, squares = weighted(loss), squares if squares is None else weighted(squares)
        if accuracy is not None and reduction != "none":
            accuracy = accuracy.sum() / counted.sum()
    if reduction == "none":
        loss = loss.view(target.shape)
        squares, accuracy = (part if part is None else part.view(target.shape) for part in (squares, accuracy))
    if not any(wanted):
        return loss
    return CrossEntropyOutput(loss, squares, accuracy, predicted if predicted is None else predicted.view(target.shape))


def _fusible(hidden, weight, target, bias, class_weight, reduction, label_smoothing, ignore_index):
    return (
        alike(hidden, weight, bias)
        and (class_weight is None or class_weight.is_floating_point() and class_weight.device == hidden.device)
        and hidden.dim() > 0
        and weight.dim() == 2
        and weight.shape[1] == hidden.shape[-1]
        and (bias is None or bias.shape == weight.shape[:1])
        and (class_weight is None or class_weight.shape == weight.shape[:1] and not class_weight.requires_grad)
        and target.shape == hidden.shape[:-1]
        and target.dtype == torch.int64
        and weight.numel() > 0
        and target.numel() > 0
        and _takes(hidden.new_empty(()).expand(2, len(weight)), target.new_empty(()).expand(2), None, reduction,
                   label_smoothing, ignore_index)
    )  # fmt: skip


def _reference(hidden, weight, target, bias=None, *, class_weight=None, chunk=None, softcap=None, **options):
    logits = F.linear(hidden, weight, bias)
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    return F.cross_entropy(logits, target, class_weight, **options)


def _sample(name, biased=False, **options):
    shapes = ((40, 16), (50, 16), *[(50,)] * biased)
    return Sample(
        name,
        shapes,
        {"chunk": 16, **options},
        arguments=lambda x, w, *bias: (x, w, _classes(x.new_empty(40, 50)), *bias),
        terms=40 * 50,
        roundings=4,
    )


def _production(tokens=128, hidden_size=128, vocab_size=2000):
    return Sample(
        "",
        ((tokens, hidden_size), (vocab_size, hidden_size)),
        {"chunk": 64},
        arguments=lambda x, w: (x, w, _classes(x.new_empty(tokens, vocab_size))),
        terms=tokens * vocab_size,
        roundings=4,
    )


register(
    Op(
        "fused_linear_cross_entropy",
        fused_linear_cross_entropy,
        reference=_reference,
        operators=("fused_linear_cross_entropy", "fused_linear_cross_entropy_backward", "cross_entropy_", "scale_"),
        integers={"target": torch.int64},
        samples=lambda: (
            _sample("chunks"),
            _sample("with a bias", True, label_smoothing=0.1, reduction="sum", ignore_index=7),
            _sample("losses of rows", True, reduction="none", softcap=3.0),
        ),
        production=_production,
    )
)
