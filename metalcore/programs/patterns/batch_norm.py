"""Batch normalization after a convolution, folded into its weight and bias."""

from __future__ import annotations

import torch
from torch.fx import Node

from ..ir import argument, name_of, value
from ..matching import Match
from ..rewriting import Pattern


class ConvBatchNorm(Pattern):
    name = "conv_batch_norm"
    summary = "batch_norm after a convolution, with running statistics, is a part of the convolution's weight and bias"
    anchors = frozenset({"batch_norm"})
    needs_constants = True

    def match(self, node: Node) -> Match | None:
        names = ("input", "weight", "bias", "running_mean", "running_var")
        conv, *statistics = (argument(node, name) for name in names)
        if argument(node, "training") or name_of(conv) not in ("conv1d", "conv2d", "conv3d"):
            return None
        weight, bias = argument(conv, "weight"), argument(conv, "bias")
        constants = [n for n in (weight, bias, *statistics) if n is not None]
        if any(n.op != "get_attr" for n in constants) or statistics[2] is None or statistics[3] is None:
            return None
        if any(not value(n).is_floating_point() for n in constants):
            return None
        return Match({"x": argument(conv, "input"), "weight": weight, "bias": bias}, [node, conv])

    def emit(self, match, emit):
        node, conv = match.nodes
        kernel, bias = match["weight"], match["bias"]
        gamma, beta, mean, variance = (argument(node, n) for n in ("weight", "bias", "running_mean", "running_var"))
        eps, dtype, device = argument(node, "eps"), value(kernel).dtype, value(kernel).device

        def scale_of(variance, gamma):
            scale = torch.rsqrt(variance + eps)
            return scale if gamma is None else scale * gamma

        def folded(kernel, variance, gamma=None):
            wide = kernel * scale_of(variance, gamma).view(-1, *[1] * (kernel.dim() - 1))
            return wide.to(device, dtype)

        def shift(mean, variance, *others):
            named = dict(zip(names, others))
            moved = named.get("bias", 0) - mean
            return (moved * scale_of(variance, named.get("gamma")) + named.get("beta", 0)).to(device, dtype)

        given = {"gamma": gamma, "bias": bias, "beta": beta}
        names = [name for name, found in given.items() if found is not None]
        weights = [n for n in (kernel, variance, gamma) if n is not None]
        shifts = [mean, variance, *(given[name] for name in names)]
        made = [
            emit.constant(f"{kernel.target}_folded", _in_float64(folded), *weights),
            emit.constant(f"{kernel.target}_shift", _in_float64(shift), *shifts),
        ]
        return emit(
            conv.target,
            match["x"],
            *made,
            *conv.args[3:],
            **{name: given for name, given in conv.kwargs.items() if name not in ("weight", "bias", "input")},
        )


def _in_float64(function):
    """Returns the function of CPU tensors in float64, so that folding rounds once. `mps` has no such dtype."""
    return lambda *tensors: function(*(tensor.to("cpu", torch.float64) for tensor in tensors))
