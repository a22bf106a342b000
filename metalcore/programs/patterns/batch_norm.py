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
        tensors = {
            name: emit.constant(argument(node, name)) for name in ("weight", "bias", "running_mean", "running_var")
        }
        kernel, bias = emit.constant(match["weight"]), emit.constant(match["bias"])
        # In float64 where there is one, so that folding rounds once.
        wide = {name: None if t is None else t.detach().cpu().double() for name, t in tensors.items()}
        scale = torch.rsqrt(wide["running_var"] + argument(node, "eps"))
        scale = scale if wide["weight"] is None else scale * wide["weight"]
        shift = (0 if bias is None else bias.detach().cpu().double()) - wide["running_mean"]  # pyright: ignore[reportOperatorIssue]
        shift = shift * scale + (0 if wide["bias"] is None else wide["bias"])
        folded = kernel.detach().cpu().double() * scale.view(-1, *[1] * (kernel.dim() - 1))  # pyright: ignore[reportOptionalMemberAccess]
        made = [
            emit.parameter(f"{match['weight'].target}_folded", folded.to(kernel)),
            emit.parameter(f"{match['weight'].target}_shift", shift.to(kernel)),
        ]
        return emit(
            conv.target,
            match["x"],
            *made,
            *conv.args[3:],
            **{name: given for name, given in conv.kwargs.items() if name not in ("weight", "bias", "input")},
        )
