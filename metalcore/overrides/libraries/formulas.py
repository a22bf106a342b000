"""Finds the formula of a module that computes an RMSNorm or a GELU with PyTorch's simple operators.

Libraries copy such a class into each of their models, under names that say little: Llama's and Gemma's RMSNorm differ
in a 1 + weight, and T5's is called LayerNorm. So the module's own forward runs on a few numbers on the CPU, in each
dtype, beside the formulas below. A formula that gives the module's numbers, except for roundings, replaces it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.compiler import is_compiling
from torch.utils._python_dispatch import _disable_current_modes

from ..._core.operators import needs_gradient
from ..._core.routing import accelerated
from ...activation import gelu, quick_gelu
from ...normalization import rms_norm_gated
from ...normalization._rms_norm import _rms_norm

__all__ = ["LENGTH", "agree", "copy_of", "examine_gelu", "examine_norm", "on_the_cpu", "settings_of", "stand_in"]

LENGTH = 24  # the length of rows for modules without a weight
_HALF = (torch.float16, torch.bfloat16)
_PAIRS = [
    (torch.float32, torch.float32),
    *((x, x) for x in _HALF),
    *((x, torch.float32) for x in _HALF),
    *((torch.float32, x) for x in _HALF),
]  # dtypes of x and of the weight


# The formulas' arguments are x, the weight, eps, the gate, the number of elements that are normalized together, and the
# dtype of the result.


def _as(x, dtype):
    return x if x.dtype is dtype else x.to(dtype)  # without a conversion it costs a tenth of x.to


def _norm(x, weight, eps, out, offset=0.0):
    if x.dtype is not out:
        x = x.to(torch.promote_types(x.dtype, out))
    elif out in _HALF and (needs_gradient(x) or weight is not None and needs_gradient(weight)) and not is_compiling():
        x = x.clone()  # the modules save a float32 copy: callers may change x, as by `x += layer(norm(x))`
    return _rms_norm(x, 1, weight, eps, offset)


def _plain(x, weight, eps, gate, group, out):
    return _as(_norm(x, weight, eps, out), out)


def _one_plus(x, weight, eps, gate, group, out):
    return _as(_norm(x, weight, eps, out, 1.0), out)


def _gated(x, weight, eps, gate, group, out, **options):
    if x.dtype is out and out in _HALF and needs_gradient(x) and not is_compiling():
        x, gate = x.clone(), gate.clone()  # as in `_norm`
    wide = torch.promote_types(x.dtype, out)
    return _as(rms_norm_gated(_as(x, wide), _as(gate, wide), weight, eps, group_size=group, **options), out)


def _then_gate(activation):
    return functools.partial(_gated, activation=activation)


def _gate_first(x, weight, eps, gate, group, out):
    if gate is not None:
        return _gated(x, weight, eps, gate, group, out, norm_before_gate=False)
    if group is None:
        return _as(_norm(x.float(), weight, eps, out), out)
    y = _norm(x.float().unflatten(-1, (-1, group)), None, eps, out).flatten(-2)
    return _as(y if weight is None else weight * y, out)


class Formula(NamedTuple):
    compute: Callable
    needs_weight: bool
    gated: bool
    roundings: int  # the most roundings to x's dtype, of the module and of `compute` together


NORMS = [
    Formula(_plain, False, False, 3),
    Formula(_one_plus, True, False, 3),
    Formula(_gate_first, False, False, 3),
    Formula(_then_gate("silu"), False, True, 5),
    Formula(_then_gate("sigmoid"), False, True, 5),
    Formula(_gate_first, False, True, 3),
]


class Case(NamedTuple):
    """A formula that stands for a module called without a gate, or with one."""

    compute: Callable
    eps: str  # the name of the module's attribute
    group: Callable | None  # a function of the module and the row's length
    dtypes: dict  # (dtype of x, dtype of the weight) -> dtype of the result


class Recipe:
    """How to compute what a kind of module computes."""

    override = "rms_norm"

    def __init__(self, weight, is_parameter, gate, cases):
        self.weight, self.is_parameter = weight, is_parameter  # the name of the module's tensor, if it has one
        self.gate = gate  # the name of forward's second argument, if it has one
        self.cases = cases  # whether there is a gate -> Case
        self.read = {case.eps for case in cases.values()}  # attributes that are read at each call

    def run(self, module, args, kwargs):
        """Returns the module's result, or None if its own forward must compute it."""
        gate = None
        if len(args) != 1 or kwargs:
            if len(args) + len(kwargs) != 2 or not args or kwargs and self.gate not in kwargs:
                return None
            gate = args[1] if len(args) == 2 else kwargs[self.gate]
        x, case = args[0], self.cases.get(gate is not None)
        # nn.Module's own look-up of a parameter takes as long as the rest of this function.
        weight = self.weight and (
            module._parameters.get(self.weight, None) if self.is_parameter else module._buffers.get(self.weight, None)
        )
        if case is None or not accelerated(x, weight, gate):
            return None
        out = case.dtypes.get((x.dtype, weight.dtype if weight is not None else None))
        shape = x.shape
        if out is None or not shape or not 0 < x.numel() < 2**31:
            return None
        if weight is not None and weight.shape != shape[-1:] or gate is not None and gate.shape != shape:
            return None
        group = case.group and case.group(module, shape[-1])
        return case.compute(x, weight, getattr(module, case.eps), gate, group, out)


class GeluRecipe:
    """The recipe for a module that computes GELU or an approximation of it."""

    read = frozenset()

    def __init__(self, override, compute, dtypes):
        self.override, self.compute, self.dtypes = override, compute, dtypes

    def run(self, module, args, kwargs):
        if len(args) == 1 and not kwargs and accelerated(args[0]) and args[0].dtype in self.dtypes:
            return self.compute(args[0])
        return None


GELUS = [
    ("gelu", lambda x: gelu(x, "tanh")),
    ("gelu", gelu),
    ("quick_gelu", quick_gelu),
]


def settings_of(module) -> list[str]:
    """Returns the names of the attributes that may make two modules of a class compute different things. A trial sees
    no others: see copy_of."""
    return [name for name, value in vars(module).items() if name not in _OF_ALL and _is_setting(name, value, module)]


_OF_ALL = frozenset(vars(torch.nn.Module()))  # the attributes of every module
_VALUES = (bool, int, float, str, type(None), torch.dtype)


def _is_setting(name, value, module):
    if name.startswith("_"):
        return False
    if isinstance(value, functools.partial):
        parts = (value.func, *value.args, *value.keywords.values())
        return all(_is_setting(name, part, module) for part in parts)
    if isinstance(value, tuple):
        return all(isinstance(part, _VALUES) for part in value)
    if isinstance(value, types.MethodType):
        return value.__self__ is module
    return isinstance(value, (*_VALUES, types.FunctionType, types.BuiltinFunctionType))


def stand_in(name, module):
    """Returns what stands for a setting's value in comparisons. It keeps no module in memory, and equal functions are
    equal."""
    value = getattr(module, name, None)
    if value is None or type(value) in _VALUES:
        return value
    if not _is_setting(name, value, module):  # another module had a setting of this name
        return type(value)
    if isinstance(value, functools.partial):
        return (value.func, value.args, *value.keywords.items())
    return value.__func__ if isinstance(value, types.MethodType) else value


@contextlib.contextmanager
def on_the_cpu():
    """Makes and runs modules on the CPU in float32, without the modes that are set and without derivatives. It keeps
    the state of the random numbers."""
    with (
        _disable_current_modes(),
        torch.device("cpu"),
        torch.random.fork_rng(devices=[]),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        yield


def copy_of(module, weights=(), children=()):
    """Returns a copy of the module with other tensors and children, and with separate attributes. Of the attributes it
    has the settings only: a forward that reads another one, such as a configuration, fails, and so nobody takes its
    numbers for those of a module whose configuration differs."""
    seen = _OF_ALL.union(settings_of(module))
    copied = object.__new__(type(module))
    copied.__dict__.update((name, value) for name, value in vars(module).items() if name in seen)
    copied.__dict__.update(_parameters=dict(module._parameters), _buffers=dict(module._buffers))
    others = {name: child and copy_of(child) for name, child in module._modules.items() if name not in children}
    copied.__dict__["_modules"] = {**module._modules, **others, **dict(children)}
    for name, weight in dict(weights).items():
        if name in copied._buffers:
            copied._buffers[name] = weight
        else:
            copied._parameters[name] = torch.nn.Parameter(weight, requires_grad=False)
    return copied


def examine_gelu(module, forward):
    x = torch.linspace(-5, 5, 41, dtype=torch.float32)
    for override, compute in GELUS:
        dtypes = {
            dtype
            for dtype in (torch.float32, *_HALF)
            if agree(
                lambda x=x.to(dtype): forward(copy_of(module), x),
                lambda x=x.to(dtype): compute(x.float()),
                16 * torch.finfo(dtype).eps,
                dtype,
                scale=x.abs(),
            )
        }
        if torch.float32 in dtypes:
            return GeluRecipe(override, compute, dtypes)
    return None


def examine_norm(module, forward):
    tensors = [name for kind in (module._parameters, module._buffers) for name, t in kind.items() if t is not None]
    if len(tensors) > 1 or any(True for child in module.children() for _ in child.parameters()):
        return None
    weight = tensors[0] if tensors else None
    shape = (LENGTH,) if weight is None else tuple(getattr(module, weight).shape)
    if len(shape) != 1 or shape[0] == 0:
        return None
    try:
        arguments = list(inspect.signature(forward).parameters.values())[2:]
    except ValueError:
        return None
    gate = arguments[0].name if arguments else None
    gates = [g for g in (False, True) if g and gate or not g and (gate is None or arguments[0].default is None)]
    cases = {gated: case for gated in gates if (case := _find(module, forward, weight, shape[0], gated))}
    return Recipe(weight, weight in module._parameters, gate, cases) if cases else None


def _find(module, forward, weight, length, gated):
    floats = [name for name, value in vars(module).items() if type(value) is float]
    for formula in NORMS:
        if formula.gated is not gated and formula.compute is not _gate_first or formula.needs_weight and not weight:
            continue
        for group in _groups(module, length) if formula.compute is _gate_first else [None]:
            for eps in floats:
                trial = Trial(module, forward, weight, length, gated, formula, eps, group)
                if trial.run(torch.float32, torch.float32):
                    results = [(pair, trial.run(*pair)) for pair in _PAIRS if weight or pair[0] is pair[1]]
                    dtypes = {(x, w if weight else None): out for (x, w), out in results if out}
                    # bfloat16 holds the squares of its numbers, so only float16 shows squares that are not float32.
                    in_half = all(any(x is half for x, _ in dtypes) for half in _HALF)
                    dtypes = {pair: out for pair, out in dtypes.items() if in_half or pair[0] not in _HALF}
                    return Case(formula.compute, eps, group, dtypes)
    return None


def _groups(module, length):
    """Returns functions that compute the length of a group from a module's attributes."""
    yield None
    for name, value in vars(module).items():
        if type(value) is int and 1 < value < length and length % value == 0:
            yield lambda module, length, name=name: getattr(module, name)
            yield lambda module, length, name=name: length // getattr(module, name)


class Trial(NamedTuple):
    """A module beside a formula."""

    module: torch.nn.Module
    forward: Callable
    weight: str | None
    length: int
    gated: bool
    formula: Formula
    eps: str
    group: Callable | None

    def run(self, x_dtype, weight_dtype):
        """Returns the dtype of the module's result if the formula gives the same numbers, or None."""
        generator = torch.Generator("cpu").manual_seed(1)

        def numbers(*shape):
            return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)

        # Float16 cannot hold the squares of some rows, and other rows are small beside eps.
        x = (numbers(2, 3, self.length) * torch.tensor([300.0, 0.1, 3.0], dtype=torch.float32)[:, None]).to(x_dtype)
        gate = numbers(2, 3, self.length).to(x_dtype) if self.gated else None
        weight = self.weight and numbers(self.length).to(weight_dtype)
        module = copy_of(self.module, {self.weight: weight} if self.weight else {})
        setattr(module, self.eps, 0.25)
        arguments = (x, gate) if self.gated else (x,)
        try:
            result = self.forward(module, *arguments)
            group = self.group and self.group(module, self.length)
            eps = max(torch.finfo(x_dtype).eps, torch.finfo(result.dtype).eps)
            bound = self.formula.roundings * eps / 2 + 64 * torch.finfo(torch.float32).eps
            same = agree(
                lambda: result,
                lambda: self.formula.compute(x, weight, 0.25, gate, group, result.dtype),
                bound,
                result.dtype,
            )
        except Exception:  # this forward takes other arguments, or does something else
            return None
        return result.dtype if same else None


def agree(ours, theirs, bound, dtype, scale=None):
    """Returns whether two functions give the same numbers, to a bound relative to `scale`, or by default to the
    numbers."""
    try:
        result, expected = ours(), theirs()
        if result.shape != expected.shape or result.dtype is not dtype:
            return False
        result, expected = result.float(), expected.float()
        tiny = 4 * torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        return bool(((result - expected).abs() <= bound * (expected.abs() if scale is None else scale) + tiny).all())
    except Exception:
        return False
