"""Finds modules that compute act(gate) * up, between the linear layers of a gated MLP or inside of its experts."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F

from ..._core.routing import accelerated
from ...activation import geglu, swiglu
from .formulas import agree, copy_of

__all__ = ["examine_gate", "examine_mlp"]

_ACTIVATIONS = (
    ("swiglu", F.silu, swiglu),
    ("geglu", lambda x: F.gelu(x, approximate="tanh"), lambda gate, up: geglu(gate, up, approximate="tanh")),
    ("geglu", F.gelu, geglu),
)  # the override, the activation, and metalcore's function of the gate and the up projection
_IN, _MID = 6, 10  # the sizes of linear layers in trials
_BOUND = 64 * torch.finfo(torch.float32).eps


class _Scale(torch.nn.Module):
    """Stands for a dropout, so that a trial shows where it is."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x * self.factor


class MLP:
    """The recipe for down(dropout(act(gate(x)) * up(x))). `halves` names the one layer that computes gate and up, and
    then `gate` and `up` are their places in its result. Else they name two layers. `down` is None where another module
    has that layer, as in diffusers' feed-forward networks."""

    read = frozenset()
    override: str
    function: Callable  # metalcore's, of the gate and the up projection

    def __init__(self, halves, gate, up, down, dropouts):
        self.halves, self.gate, self.up, self.down, self.dropouts = halves, gate, up, down, dropouts

    def compute(self, module, x, product):
        layers = module._modules
        if self.halves is None:
            gate, up = layers[self.gate](x), layers[self.up](x)
        else:
            both = layers[self.halves](x).chunk(2, dim=-1)
            gate, up = both[self.gate], both[self.up]
        y = product(gate, up)
        inside, outside = self.dropouts
        if inside is not None:
            y = layers[inside](y)
        y = y if self.down is None else layers[self.down](y)
        return y if outside is None else layers[outside](y)

    def run(self, module, args, kwargs):
        if len(args) != 1 or kwargs or not accelerated(args[0]) or not self._alike(module):
            return None
        return self.compute(module, args[0], self.function)

    def _alike(self, module):
        """Returns whether the layers have one dtype. T5 converts between them where they do not."""
        weights = [getattr(module._modules[name], "weight", None) for name in self.layers]
        return len({weight.dtype for weight in weights if isinstance(weight, torch.Tensor)}) <= 1

    @property
    def layers(self):
        names = (self.gate, self.up, self.down) if self.halves is None else (self.halves, self.down)
        return tuple(name for name in names if name is not None)


def examine_mlp(module, forward):
    """Returns the recipe for a module whose class has this forward, or None if it is not a gated MLP."""
    linears = [name for name, child in module._modules.items() if hasattr(child, "in_features")]
    dropouts = [name for name, child in module._modules.items() if isinstance(child, torch.nn.Dropout)]
    others = [child for name, child in module._modules.items() if child is not None and name not in linears]
    if len(linears) not in (1, 2, 3) or module._parameters or any(True for child in others for _ in child.parameters()):
        return None
    x = torch.randn(2, 5, _IN) * 3
    factors = {name: _Scale(0.25 * (index + 1)) for index, name in enumerate(dropouts)}
    for order in itertools.permutations(linears):
        if len(order) == 3:
            sizes = ((_IN, _MID), (_IN, _MID), (_MID, _IN))
            layouts = [MLP(None, order[0], order[1], order[2], (None, None))]
        else:
            sizes = ((_IN, 2 * _MID), (_MID, _IN))
            down = order[1] if len(order) == 2 else None
            layouts = [MLP(order[0], gate, 1 - gate, down, (None, None)) for gate in (0, 1)]
        layers = {name: torch.nn.Linear(*size) for name, size in zip(order, sizes)}
        try:
            trial = copy_of(module, children={**factors, **layers})
            trial.training = True  # so that a dropout that is not a module shows
            result = forward(trial, x)
        except Exception:  # these layers are not in this order, or it takes other arguments
            continue
        for layout in layouts:
            for layout.dropouts in itertools.product((None, *dropouts), repeat=2):
                for layout.override, activation, layout.function in _ACTIVATIONS:
                    if _same(result, layout.compute(trial, x, lambda gate, up: activation(gate) * up)):
                        return layout
    return None


def _same(result, expected):
    return agree(lambda: result, lambda: expected, _BOUND, torch.float32, scale=expected.abs().max())


class Gate:
    """The recipe for a method that computes act(gate) * up from gate and up in one tensor, one after the other."""

    read = frozenset()

    def __init__(self, override, function):
        self.override, self.function = override, function

    def run(self, module, args, kwargs):
        if len(args) != 1 or kwargs or not accelerated(args[0]):
            return None
        return self.function(*args[0].chunk(2, dim=-1))


def examine_gate(module, method):
    """Returns the recipe for the method of experts that applies their gates, or None."""
    both = torch.randn(4, 2 * _MID) * 3
    gate, up = both.chunk(2, dim=-1)
    try:
        result = method(copy_of(module), both)
    except Exception:
        return None
    for override, activation, function in _ACTIVATIONS:
        if _same(result, activation(gate) * up):
            return Gate(override, function)
    return None
