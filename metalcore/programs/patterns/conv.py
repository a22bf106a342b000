"""Convolutions with what follows them: batch normalization, the sum with a residual, and an activation."""

from __future__ import annotations

import torch
from torch.fx import Node

from ...conv._conv2d import call_of
from ..ir import accelerated, argument, arguments, name_of, value
from ..matching import Call, Match, Sum, Value
from ..rewriting import Pattern

_ACTIVATIONS = {
    "relu": Call("relu", Value("conv")),
    "silu": Call("silu", Value("conv")),
    "gelu": Call("gelu", Value("conv"), approximate="none"),
    "gelu_tanh": Call("gelu", Value("conv"), approximate="tanh"),
}
_OPTIONS = ("stride", "padding", "dilation", "groups")
_SUM = Sum(Value("conv"), Value("residual"))


class Conv(Pattern):
    """It grows: a convolution becomes metalcore's, which takes in the sum that follows, and then the activation."""

    name = "conv"
    summary = "conv2d, with the sum with a residual and relu, gelu or silu that follow, is metalcore.conv2d"
    anchors = frozenset({"conv2d", "add", "relu", "silu", "gelu"})
    # The libraries of Apple and NVIDIA do convolutions; ours is faster or slower, which is not measured.
    by_name_on = frozenset({"cuda", "mps"})

    def match(self, node: Node) -> Match | None:
        if name_of(node) == "conv2d":
            return self._convolution(node)
        for activation, expression in _ACTIVATIONS.items():
            match = expression.match(node)
            if match is not None:
                return self._following(match, "activation", activation)
        sums = (self._following(match, "residual", match["residual"]) for match in _SUM.matches(node, Match()))
        return next((match for match in sums if match is not None and _one_shape(node, match["residual"])), None)

    def _convolution(self, node):
        tensors = [argument(node, name) for name in ("input", "weight", "bias")]
        operands = [tensor for tensor in tensors if tensor is not None]
        if not accelerated(*operands) or len({value(tensor).dtype for tensor in operands}) != 1:
            return None
        return Match(zip(("x", "weight", "bias"), tensors), [node])

    def _following(self, match, name, thing):
        """Returns what follows metalcore's convolution, if that has nothing of the kind, and nothing that comes after
        it."""
        conv = match["conv"]
        if name_of(conv) != "metalcore.conv2d" or argument(conv, "activation") != "none":
            return None
        if name == "residual" and argument(conv, "residual") is not None:
            return None
        tensors = {f"argument {i}": operand for i, operand in enumerate(arguments(conv)) if isinstance(operand, Node)}
        return Match({**tensors, "changed": name, name: thing}, [*match.nodes, conv])

    def emit(self, match, emit):
        node = match.nodes[0]
        result = self._grown(match, emit) if "changed" in match else self._taken(match, emit)
        # Views of the result were chosen for its strides.
        return result if result is not None and value(result).stride() == value(node).stride() else None

    def _taken(self, match, emit):
        node, x, weight, bias = match.nodes[0], match["x"], match["weight"], match["bias"]
        stride, padding, dilation, groups = (argument(node, name) for name in _OPTIONS)
        tensors = (None if tensor is None else value(tensor) for tensor in (x, weight, None, bias, None))
        call = call_of(*tensors, stride, padding, dilation, groups)  # pyright: ignore[reportCallIssue]
        if call is None or value(x).dim() != 4:
            return None
        options = (*call[:3], groups, "none", _lies_channels_last(value(node)))
        return emit(torch.ops.metalcore.conv2d.default, x, weight, None, bias, None, *options)

    def _grown(self, match, emit):
        conv, changed = match.nodes[-1], match["changed"]
        if changed == "activation" and conv in emit.with_gradient:
            return None  # its derivative needs what it is applied to
        schema = torch.ops.metalcore.conv2d.default._schema
        operands = {spec.name: thing for spec, thing in zip(schema.arguments, arguments(conv))}
        return emit(torch.ops.metalcore.conv2d.default, *{**operands, changed: match[changed]}.values())


def _lies_channels_last(x):
    """Returns whether the strides are those of channels that lie next to each other. Images of one pixel count as
    contiguous, too, and PyTorch gives them either strides."""
    _, channels, height, width = x.shape
    return x.stride() == (height * width * channels, 1, width * channels, channels)


def _one_shape(node, other):
    return value(node).shape == value(other).shape and value(node).dtype == value(other).dtype


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

        shift_terms = {"gamma": gamma, "bias": bias, "beta": beta}
        names = [name for name, term in shift_terms.items() if term is not None]
        weights = [n for n in (kernel, variance, gamma) if n is not None]
        shifts = [mean, variance, *(shift_terms[name] for name in names)]
        folded_constants = [
            emit.constant(f"{kernel.target}_folded", _in_float64(folded), *weights),
            emit.constant(f"{kernel.target}_shift", _in_float64(shift), *shifts),
        ]
        return emit(
            conv.target,
            match["x"],
            *folded_constants,
            *conv.args[3:],
            **{name: option for name, option in conv.kwargs.items() if name not in ("weight", "bias", "input")},
        )


def _in_float64(function):
    """Returns the function of CPU tensors in float64, so that folding rounds once. `mps` has no such dtype."""
    return lambda *tensors: function(*(tensor.to("cpu", torch.float64) for tensor in tensors))
