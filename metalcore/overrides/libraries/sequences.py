"""Functions along the time of a sequence in the files of transformers' models, such as causal_conv1d_fn and
torch_chunk_gated_delta_rule. A file's functions are tried when a class of modules from it is met."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..._core.routing import accelerated, on_cuda
from ...sequence import (
    causal_conv1d,
    causal_conv1d_update,
    chunk_gated_delta_rule,
    chunk_kda,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_kda,
    mamba_chunk_scan_combined,
    selective_scan,
    selective_state_update,
)
from ...sequence._delta_formulas import SIZES
from ...sequence._taps import WIDTHS
from .. import _report
from .formulas import agree, on_the_cpu
from .kinds import Kind
from .patches import Patch, full_name, run_counted

__all__ = ["SequenceFunctions"]


class Replaced(NamedTuple):
    """What stands for the functions of one name.

    Attributes:
        override: the name of our op.
        package: transformers takes its functions on NVIDIA GPUs where it is installed.
        arguments: what a function takes, in this order. Its first argument may have another name.
        take: computes the function from a dict of arguments, or returns None.
        examples: makes arguments to try a function with.
        numbers: whose numbers a function must have.
    """

    override: str
    package: str
    arguments: tuple[str, ...]
    take: Callable
    examples: Callable
    numbers: str


class SequenceFunctions(Kind):
    """Functions with the names and arguments of the packages causal-conv1d, flash-linear-attention and mamba-ssm, or of
    transformers' stand-ins for them."""

    def __init__(self):
        super().__init__(tuple(dict.fromkeys(row.override for row in _FUNCTIONS.values())))

    def meet_class(self, cls):
        file = sys.modules.get(cls.__module__)
        if file is None or file in self.seen or cls.__module__.partition(".")[0] in ("torch", "metalcore"):
            return
        self.seen.add(file)
        for member, row in _FUNCTIONS.items():
            function = vars(file).get(member)
            if row.override not in self.active or not isinstance(function, types.FunctionType):
                continue
            if not _same(inspect.unwrap(function), row):
                reason = f"since their numbers are not those of {row.numbers}"
                _report.never_replaced(row.override, full_name(function), reason)
                continue
            patch = self.patches[file, member] = Patch(file, member)
            patch.install(_replacement(patch, row, _report.count_of(row.override, full_name(function))))


def _replacement(patch, row, count):
    packaged = importlib.util.find_spec(row.package) is not None  # its kernels are for NVIDIA GPUs
    names = _names(patch.original, row)

    def function(*args, **kwargs):
        if not patch.on:
            return patch.original(*args, **kwargs)

        def computed():
            given = _given(names, args, kwargs)
            first = given[row.arguments[0]]
            return row.take(given) if accelerated(first) and not (packaged and on_cuda(first)) else None

        return run_counted(count, computed, lambda: patch.original(*args, **kwargs))

    return function


def _names(function, row):
    """Returns the names of the function's arguments, of which the first has the table's."""
    return (row.arguments[0], *list(inspect.signature(function).parameters)[1:])


def _given(names, args, kwargs):
    return dict(zip(names, args)) | kwargs


def _same(function, row):
    """Returns whether the function computes what ours does, on a few numbers."""
    if [name for name in _names(function, row) if name in row.arguments] != [*row.arguments]:
        return False
    first, *_ = row.arguments

    def theirs(given):
        return function(given[first], **{name: value for name, value in given.items() if name != first})

    def same(example):
        try:
            expected = _numbers_of(theirs, example)
        except Exception:  # it takes other arguments, or does something else
            return False
        bound, scale = 512 * torch.finfo(torch.float32).eps, expected.abs().max()
        return agree(lambda: _numbers_of(row.take, example), lambda: expected, bound, torch.float32, scale)

    with on_the_cpu():
        return all(same(example) for example in row.examples())


def _numbers_of(compute, example):
    """Returns the numbers of results, and of arguments, which a step may change."""
    given = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in example.items()}
    result: Any = compute(given)
    results = result if isinstance(result, tuple) else (result,)
    return torch.cat([x.flatten() for x in (*results, *given.values()) if isinstance(x, torch.Tensor)])


def _random(*shapes):
    generator = torch.Generator("cpu").manual_seed(1)
    return [torch.randn(shape, generator=generator, dtype=torch.float32) for shape in shapes]


# Convolutions


def _convolutions(length, **states):
    names = "x", *states, "weight", "bias"
    for activation in (None, "silu"):
        yield dict(zip(names, _random((2, 3, length), *states.values(), (3, 4), (3,)))) | {"activation": activation}


def _convolution_fits(given):
    weight, activation = given["weight"], given.get("activation")
    return weight.dim() == 2 and weight.shape[1] in WIDTHS and activation in (None, "silu", "swish")


def _convolution(given):
    """Returns what causal_conv1d_fn does, or None."""
    numbers = given.get("seq_idx")
    if not _convolution_fits(given) or given.keys() & {"initial_states", "return_final_states", "final_states_out"}:
        return None
    # Models pass on what their attention is given as well, which the package's function does not take.
    ends = [given[name] for name in ("cu_seqlens", "cu_seq_lens_q") if given.get(name) is not None]
    ends = ends[0] if ends and numbers is None and given["x"].shape[0] == 1 else None
    options = {"seq_idx": numbers, "activation": given.get("activation"), "cu_seqlens": ends}
    return causal_conv1d(given["x"], given["weight"], given.get("bias"), **options)


def _convolution_step(given):
    """Returns what causal_conv1d_update does, or None."""
    if not _convolution_fits(given):
        return None
    names = "x", "conv_state", "weight", "bias", "activation", "cache_seqlens", "conv_state_indices"
    return causal_conv1d_update(*(given.get(name) for name in names))


# Gated delta rules

_DELTA = "query", "key", "value", "g", "beta"
_DELTA_OPTIONS = "initial_state", "output_final_state", "use_qk_l2norm_in_kernel", "cu_seqlens"


def _delta_rules(heads=2, of_gates=(2, 5, 4)):
    of_keys, of_heads = (2, 5, heads, 8), (2, 5, 4)
    query, key, value, g, beta, state = _random(of_keys, of_keys, (2, 5, 4, 6), of_gates, of_heads, (2, 4, 8, 6))
    given = dict(zip(_DELTA, (query, key / 4, value, -g.abs(), beta.sigmoid())))
    yield given | {"initial_state": None, "output_final_state": False}
    yield given | {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}


def _delta_rule(op):
    def take(given):
        """Returns what torch_chunk_gated_delta_rule does, or None."""
        query, key, value, _, _ = tensors = [given[name] for name in _DELTA]
        sizes = query.shape[-1] in SIZES and value.shape[-1] in SIZES
        if not sizes or not query.dtype == key.dtype == value.dtype or given.get("scale") is not None:
            return None
        return op(*tensors, **{name: given[name] for name in _DELTA_OPTIONS if name in given})

    return take


def _kimi_rules():
    return _delta_rules(4, (2, 5, 4, 8))  # gates of each key, and as many heads of keys as of values


# State spaces

_SPACE = "x", "dt", "A", "B", "C", "D"
_STEP = "state", "hidden_states", *_SPACE[1:]
_STATE_OPTIONS = "D", "z", "dt_bias", "dt_softplus"
_CHUNK_OPTIONS = "D", "dt_bias", "initial_states", "seq_idx", "dt_softplus", "dt_limit", "return_final_states"


def _scans():
    x, dt, A, B, C, D, z, bias = _random((2, 3, 5), (2, 3, 5), (3, 4), *[(2, 4, 5)] * 2, (3,), (2, 3, 5), (3,))
    given = dict(zip(_SPACE, (x, dt.abs(), -A.abs(), B, C, D)))
    yield given
    yield given | {"z": z, "delta_bias": bias, "delta_softplus": True, "return_last_state": True}


def _scan(given):
    """Returns what selective_scan_fn does, or None."""
    x, dt, A, B, C = (given[name] for name in _SPACE[:5])
    if B.dim() != 3 or C.dim() != 3 or not x.dtype == B.dtype == C.dtype or A.is_complex():
        return None
    options = {name: given[name] for name in ("D", "z", "delta_bias", "delta_softplus") if name in given}
    last = given.get("return_last_state", False)
    result: Any = selective_scan(x, dt, A, B, C, **options, return_last_state=last)
    return (result[0], result[1].to(x.dtype)) if last else result


def _state_updates(heads):
    """Yields arguments with and without heads, which have groups of B and C."""
    rows, groups = (2, 4, 3) if heads else (2, 3), (2, 2, 4) if heads else (2, 4)
    shapes = [(*rows, 4), rows, rows, (*rows[1:], 4), groups, groups, rows[1:], rows, rows[1:]]
    state, x, dt, A, B, C, D, z, bias = _random(*shapes)
    given = dict(zip(_STEP, (state, x, dt.abs(), -A.abs(), B, C, D)))
    yield given
    yield given | {"z": z, "dt_bias": bias, "dt_softplus": True}


def _state_update(given):
    """Returns what selective_state_update does, or None."""
    state, x, dt, A, B, C = (given[name] for name in _STEP[:6])
    if not x.dtype == B.dtype == C.dtype or state.dtype not in (x.dtype, torch.float32) or A.shape != state.shape[1:]:
        return None
    options = {name: given[name] for name in _STATE_OPTIONS if name in given}
    return selective_state_update(state, x, dt, A, B, C, **options)


def _chunk_scans():
    x, dt, A, B, C, D, bias, state = _random(
        (2, 5, 4, 3), (2, 5, 4), (4,), *[(2, 5, 2, 4)] * 2, (4,), (4,), (2, 4, 3, 4)
    )
    given = dict(zip(_SPACE, (x, dt.abs(), -A.abs(), B, C, D))) | {"chunk_size": 4}
    yield given
    yield given | {
        "dt_bias": bias,
        "initial_states": state,
        "dt_softplus": True,
        "dt_limit": (0.1, 1.0),
        "return_final_states": True,
    }


def _chunk_scan(given):
    """Returns what mamba_chunk_scan_combined does, or None."""
    x, dt, A, B, C = (given[name] for name in _SPACE[:5])
    if not x.dtype == B.dtype == C.dtype or given.get("cu_seqlens") is not None or given.get("z") is not None:
        return None
    options = {name: given[name] for name in _CHUNK_OPTIONS if name in given}
    result: Any = mamba_chunk_scan_combined(x, dt, A, B, C, given["chunk_size"], **options)
    return result


_CONVOLUTIONS = "a convolution that ends at the position"
_GATED_DELTA_RULE = "the gated delta rule"
_KIMI_RULE = "Kimi's delta attention"
_STATE_SPACE = "a state space"
_FUNCTIONS = {
    "causal_conv1d_fn": Replaced(
        "causal_conv1d",
        "causal_conv1d",
        ("x", "weight", "bias", "activation"),
        _convolution,
        lambda: _convolutions(6),
        _CONVOLUTIONS,
    ),
    "causal_conv1d_update": Replaced(
        "causal_conv1d_update",
        "causal_conv1d",
        ("x", "conv_state", "weight", "bias", "activation"),
        _convolution_step,
        lambda: _convolutions(1, conv_state=(2, 3, 4)),
        _CONVOLUTIONS,
    ),
    "torch_chunk_gated_delta_rule": Replaced(
        "chunk_gated_delta_rule", "fla", _DELTA, _delta_rule(chunk_gated_delta_rule), _delta_rules, _GATED_DELTA_RULE
    ),
    "torch_recurrent_gated_delta_rule": Replaced(
        "fused_recurrent_gated_delta_rule",
        "fla",
        _DELTA,
        _delta_rule(fused_recurrent_gated_delta_rule),
        _delta_rules,
        _GATED_DELTA_RULE,
    ),
    "chunk_kimi_delta_attention": Replaced("chunk_kda", "fla", _DELTA, _delta_rule(chunk_kda), _kimi_rules, _KIMI_RULE),
    "recurrent_kimi_delta_attention": Replaced(
        "fused_recurrent_kda", "fla", _DELTA, _delta_rule(fused_recurrent_kda), _kimi_rules, _KIMI_RULE
    ),
    "mamba_selective_scan": Replaced("selective_scan", "mamba_ssm", _SPACE, _scan, _scans, _STATE_SPACE),
    "mamba_selective_state_update": Replaced(
        "selective_state_update",
        "mamba_ssm",
        _STEP,
        _state_update,
        lambda: _state_updates(False),
        _STATE_SPACE,
    ),
    "mamba2_selective_state_update": Replaced(
        "selective_state_update",
        "mamba_ssm",
        _STEP,
        _state_update,
        lambda: _state_updates(True),
        _STATE_SPACE,
    ),
    "mamba2_chunk_scan": Replaced(
        "mamba_chunk_scan_combined",
        "mamba_ssm",
        ("x", "dt", "A", "B", "C", "chunk_size", "D"),
        _chunk_scan,
        _chunk_scans,
        _STATE_SPACE,
    ),
}
