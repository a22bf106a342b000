"""The loss of language models by metalcore.fused_linear_cross_entropy, which never holds all logits.

While a model trains with labels, its output layer returns `Logits`, which are not computed. The cross entropy of them
is the fused one, whichever way the model goes from the layer to the loss. Whatever else looks into them gets them
computed.
"""

from __future__ import annotations

import functools
import inspect
import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling
from torch.utils._pytree import tree_map_only

from ..._core.routing import accelerated, autocast_dtype
from ...loss import fused_linear_cross_entropy
from .. import _report
from .kinds import Kind
from .patches import Patch, full_name, owner_of

__all__ = ["LanguageModels", "Logits"]

_NAME = "fused_linear_cross_entropy"


class Source(NamedTuple):
    """What logits are made from: outer * tanh(inner * layer(hidden)), or inner * layer(hidden) where outer is None.

    Attributes:
        dtype: that of the logits.
        autocast: the dtype in which autocast computes the layer, or None where it is off.
    """

    hidden: Tensor
    layer: torch.nn.Linear
    dtype: torch.dtype
    autocast: torch.dtype | None
    inner: float = 1.0
    outer: float | None = None

    def tensors(self):
        """Returns hidden, the weight and the bias, as the layer sees them."""
        tensors = (self.hidden, self.layer.weight, self.layer.bias)
        return [t if t is None or self.autocast is None else t.to(self.autocast) for t in tensors]


class Logits(Tensor):
    """Logits of an output layer that are computed when something looks into them."""

    source: Source
    count: _report.Count
    versions: tuple
    kept: dict

    @staticmethod
    def __new__(cls, source: Source, count, versions):
        hidden, layer = source.hidden, source.layer
        shape = (*hidden.shape[:-1], layer.out_features)
        trained = any(t is not None and t.requires_grad for t in (hidden, layer.weight, layer.bias))
        logits: Any = Tensor._make_wrapper_subclass(
            cls, shape, dtype=source.dtype, device=hidden.device, requires_grad=trained
        )
        logits.source, logits.count, logits.versions, logits.kept = source, count, versions, {}
        return logits

    def changed(self, **fields) -> Logits:
        return Logits(self.source._replace(**fields), self.count, self.versions)

    def computed(self) -> Tensor:
        """Returns the logits as an ordinary tensor."""
        with_grad = torch.is_grad_enabled()
        if with_grad not in self.kept:
            self._check_versions()
            inner, outer = self.source.inner, self.source.outer
            with torch.autocast(self.source.hidden.device.type, enabled=False):
                logits = F.linear(*self.source.tensors())
            logits = logits if inner == 1 else logits * inner
            logits = logits if outer is None else logits.tanh() * outer
            self.kept[with_grad] = logits.to(self.source.dtype)
        return self.kept[with_grad]

    def _check_versions(self):
        if _versions(self.source.layer) != self.versions:
            raise RuntimeError(
                "these logits were not computed, since the loss did not need them, and the output layer's weight has "
                f"changed since: read them before, or patch without {_NAME}"
            )

    def cross_entropy(
        self,
        target,
        weight=None,
        size_average=None,
        ignore_index=-100,
        reduce=None,
        reduction="mean",
        label_smoothing=0.0,
    ):
        """Computes torch.nn.functional.cross_entropy, or returns None for arguments that the fused form does not
        take."""
        if weight is not None or size_average is not None or reduce is not None or type(target) is not Tensor:
            return None
        hidden, matrix, bias = self.source.tensors()
        if hidden.dim() != 2 or target.dim() != 1 or target.dtype != torch.int64 or target.device != hidden.device:
            return None
        self._check_versions()
        inner, outer = self.source.inner, self.source.outer
        factor = inner if outer is None else inner * outer
        if factor != 1:
            hidden, bias = hidden * factor, None if bias is None else bias * factor
        wide = self.source.dtype is torch.float32 and hidden.dtype is not torch.float32
        with torch.autocast(hidden.device.type, dtype=hidden.dtype if wide else None, enabled=wide):  # a float32 loss
            loss = fused_linear_cross_entropy(
                hidden,
                matrix,
                target,
                bias,
                ignore_index=ignore_index,
                reduction=reduction,
                label_smoothing=label_smoothing,
                softcap=outer,
            )
        self.count.ran += 1
        return loss.to(self.source.dtype)

    # What models do with logits on the way to the loss. Each gives None where it cannot.

    def to_dtype(self, dtype=torch.float32, **kwargs):
        if kwargs or not isinstance(dtype, torch.dtype):
            return None
        return self.changed(dtype=dtype)

    def reshaped(self, *shape):
        shape = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        *leading, last = shape or (0,)
        if last != self.source.layer.out_features or leading.count(-1) > 1:
            return None
        hidden = self.source.hidden
        product = math.prod(size for size in leading if size != -1)
        rows = math.prod(hidden.shape[:-1])
        if -1 in leading and (product == 0 or rows % product) or -1 not in leading and rows != product:
            return None
        return self.changed(hidden=hidden.reshape(*leading, hidden.shape[-1]))

    def itself(self, **kwargs):
        return None if kwargs else self

    def item_at(self, index):
        """Rows: an index that leaves the last dimension whole."""
        parts = index if isinstance(index, tuple) else (index,)
        if not all(part is Ellipsis or isinstance(part, (int, slice)) for part in parts):
            return None
        if Ellipsis in parts:
            whole = parts[-1] == slice(None)
        else:
            whole = len(parts) < len(self.source.hidden.shape) or parts[-1] == slice(None)
        return self.changed(hidden=self.source.hidden[index]) if whole else None

    def times(self, factor):
        if isinstance(factor, bool) or not isinstance(factor, (int, float)):
            return None
        if self.source.outer is None:
            return self.changed(inner=self.source.inner * factor)
        return self.changed(outer=self.source.outer * factor) if factor > 0 else None

    def over(self, divisor):
        return self.times(1 / divisor) if isinstance(divisor, (int, float)) and divisor else None

    def capped(self):
        return self.changed(outer=1.0) if self.source.outer is None else None

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        lazy = _LAZY.get(func)
        if lazy is not None and isinstance(args[0], cls) and torch.is_grad_enabled():
            result = lazy(*args, **kwargs)
            if result is not None:
                return result
        args, kwargs = tree_map_only(cls, Logits.computed, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError(f"{func} cannot read logits that are not computed: patch without {_NAME}")


_METADATA = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad", "layout")),
    *(getattr(Tensor, name).__get__ for name in ("is_cuda", "is_mps", "is_cpu", "is_sparse", "is_meta", "is_nested")),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, torch.is_floating_point, Tensor.__len__),
}
_LAZY = {
    Tensor.float: Logits.to_dtype,
    Tensor.to: Logits.to_dtype,
    Tensor.view: Logits.reshaped,
    Tensor.reshape: Logits.reshaped,
    Tensor.contiguous: Logits.itself,
    Tensor.__getitem__: Logits.item_at,
    Tensor.__mul__: Logits.times,
    Tensor.mul: Logits.times,
    Tensor.__rmul__: Logits.times,
    Tensor.__truediv__: Logits.over,
    Tensor.div: Logits.over,
    Tensor.tanh: Logits.capped,
    torch.tanh: Logits.capped,
    F.cross_entropy: Logits.cross_entropy,
}


def _versions(layer):
    return tuple(tensor._version for tensor in (layer.weight, layer.bias) if tensor is not None)


class LanguageModels(Kind):
    """Models with an output layer over a vocabulary, while they train with labels."""

    def __init__(self):
        super().__init__((_NAME,))

    def meet_class(self, cls):
        owner = owner_of(cls, "forward")
        if owner is None or owner in self.patches or not hasattr(cls, "get_output_embeddings"):
            return
        names = list(inspect.signature(owner.forward).parameters)
        if "labels" in names:
            patch = self.patches[owner] = Patch(owner, "forward")
            patch.install(_forward(patch, names.index("labels")))


def _forward(patch, place):
    original, name = patch.original, full_name(patch.owner)

    def forward(model, *args, **kwargs):
        labels = kwargs.get("labels") if len(args) < place else args[place - 1]
        if not patch.on or labels is None or not model.training or not torch.is_grad_enabled() or is_compiling():
            return original(model, *args, **kwargs)
        layer = model.get_output_embeddings()
        if layer is None:
            return original(model, *args, **kwargs)
        if (
            getattr(vars(layer).get("forward"), "func", None) is _lazy_layer
        ):  # a subclass calls this forward, and counts
            return original(model, *args, **kwargs)
        count = _report.count_of(_NAME, name)
        if not _is_plain_layer(layer):
            count.left["an output layer that is not a plain torch.nn.Linear"] += 1
            return original(model, *args, **kwargs)
        layer.forward = functools.partial(_lazy_layer, layer, count)
        try:
            return original(model, *args, **kwargs)
        finally:
            del layer.forward

    return forward


def _is_plain_layer(layer):
    """Returns whether a layer's call does nothing else than F.linear, with weights that will still be there at the
    loss."""
    return (
        type(layer) is torch.nn.Linear
        and type(layer.weight) is torch.nn.Parameter
        and "forward" not in vars(layer)
        and not (layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks)
    )


def _lazy_layer(layer, count, hidden):
    autocast = autocast_dtype(hidden)
    fits = accelerated(hidden, layer.weight, layer.bias) and (autocast or hidden.dtype == layer.weight.dtype)
    if not fits:
        count.left["input that its kernel does not take"] += 1
        return F.linear(hidden, layer.weight, layer.bias)
    return Logits(Source(hidden, layer, autocast or hidden.dtype, autocast), count, _versions(layer))
