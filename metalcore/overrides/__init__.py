"""Switches that put metalcore's kernels behind PyTorch's own functions.

    metalcore.enable_pytorch_overrides()                     # the default ones, until disable_pytorch_overrides()
    with metalcore.enable_pytorch_overrides("silu", "qr"):   # these two, inside the block
        ...

How each one works, and why:

`relu`, `silu`, `gelu`, `softmax`, `log_softmax`, `layer_norm`, `group_norm`, and of linear algebra
`solve_triangular`, `qr`, `cholesky`, `lu_factor`, `lu_solve`, `solve`, `inv`, `det`, `slogdet`, `eigh`, `svd`,
`lstsq`
    A kernel at the device's own dispatch key, for the operator that PyTorch's function ends in (`aten::silu`,
    `aten::_softmax`, `aten::linalg_qr` ...) and, but for linear algebra, for the operator of its derivative. Replacing
    the Python names would miss `from torch.nn.functional import silu`, tensor methods, and callers in C++; a kernel
    catches them all. It lies below autograd, autocast, functorch and the tracers, which go on as if nothing had
    changed: gradients come from PyTorch's own formulas, and a compiled graph holds PyTorch's operators, so it is right
    whether the override is on or off when it runs.
    The kernels of activations, softmaxes and norms are in C++ (csrc/ops/common/replacement.h); those of linear algebra
    in Python. `embedding` and `embedding_bag` are of this kind, for the operators of both passes. `relu_`, `silu_` and
    `gelu_` are replaced as well, which modules with `inplace=True` call.
    `gelu` also takes modules that write the op out in Python, in the way that `rms_norm` does.
`rms_norm`
    As those above, for `aten::_fused_rms_norm` and its derivative, in which PyTorch's function ends on NVIDIA GPUs. On
    Apple's, PyTorch takes `aten::rms_norm` apart into simple operators if it needs a gradient. So there another kernel,
    which calls `aten::_fused_rms_norm`, is placed where the taking apart happens, at the device's autograd key (and at
    the device's key, where inference tensors arrive). Traced code keeps PyTorch's decomposition there: call
    `metalcore.rms_norm` or use `metalcore.nn.RMSNorm` to keep the kernel inside a compiled graph.
    `cross_entropy` and `kl_div` are placed at the autograd key because they have no kernel of their own. They save what
    PyTorch's functions save, and no more: neither the logits nor the input. So a program may change these after the
    forward pass. The gradient of `cross_entropy` is computed there, ahead of its use.
    Most models have an RMSNorm of their own that is written out in simple operators: Llama's, T5's, Gemma's with its
    1 + weight, gated ones. Their classes are found by trying what they compute, whichever library they are in, and get
    another forward (metalcore/overrides/libraries). Models may be imported and made before or after. What is
    decided when a class is met holds in compiled graphs too.
`scaled_dot_product_attention`
    Placed as that of `rms_norm`, on `mps` only: PyTorch's kernels for NVIDIA GPUs are faster. It also takes the place
    of transformers' attention "sdpa", whose masks it need not write out: on `mps` always, and on `cuda` where there is
    a mask of windows, padding or packed sequences, a soft cap or sinks, which PyTorch has no fast kernel for.
`swiglu`, `geglu`, `rope`, `causal_conv1d`, `causal_conv1d_update`, `chunk_gated_delta_rule`,
`fused_recurrent_gated_delta_rule`, `chunk_kda`, `fused_recurrent_kda`, `selective_scan`, `selective_state_update`,
`mamba_chunk_scan_combined`, `fused_linear_cross_entropy`
    PyTorch has no such functions, and libraries write them out: in MLPs, in functions that rotate queries and keys or
    go along a sequence, and in language models' losses. These are found and replaced as the modules of `rms_norm` are.
`adamw`, `sgd`, `muon`
    `torch.optim.AdamW.step` is replaced, which each step looks up. It runs the step of `metalcore.optim.AdamW` if a
    parameter is on a supported device by then: a model may go there after its optimizer was made. The optimizer stays a
    `torch.optim.AdamW`, also in copies, pickles and checkpoints, and subclasses are left alone. Its moments have the
    parameter's dtype, as PyTorch's do (`metalcore.optim.AdamW` itself has float32 ones). torch.compile traces PyTorch's
    step. On a Mac, steps whose groups have `fused=True` are by default those of PyTorch's Metal kernels.
`clip_grad_norm_`, `clip_grad_value_`
    `torch.nn.utils.clip_grad_norm_` is written in Python, of two functions that it looks up in its module when it runs.
    These are replaced there, so that it does not matter when and from where it was imported. clip_grad_value_ is
    replaced by its name: `from torch.nn.utils import clip_grad_value_` before the override keeps PyTorch's.

`safe`
    No override of an op: routes around the faults of PyTorch's MPS backend that `python -m metalcore doctor` has found
    on the machine (metalcore/doctor). It switches on the overrides that a fault needs, and beneath them, or where there
    is none, puts kernels that send a call that a fault touches to metalcore's op or to the CPU.

On by default is what was not measured to be slower than PyTorch's own on the device (_gains.py): on `cuda` all of them,
by the figures of benchmarks/results. On a Mac, where nobody has measured any, PyTorch's own Metal kernels stay on by
default, and `python -m metalcore tune` decides.

Whatever a kernel does not take (a dtype, a layout, an `out=` form) goes to the kernel that was there before,
which is also put back when the override is switched off. Tensors of other devices never come here.
`metalcore.report()` tells what was replaced, what was not and why, and how often each ran.

The switches hold for the whole process, because kernels do, and because backward runs on a thread of its own. They may
be used from several threads: an override is on as long as any `with` block or plain call asks for it. Do not switch
while another thread is inside one of the overridden functions.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch

from .._core.registry import OPS, FunctionOverride, OptimizerOverride
from .._core.routing import DEVICES
from ..mac_kernels import has_own, this_release
from . import _dispatcher, _functions, _report, _safe, _switches, libraries
from ._gains import by_default, kind_of, left_calls, measured_gains, why_off
from ._report import Report
from ._switches import Request, Switches

__all__ = ["active_overrides", "disable_pytorch_overrides", "enable_pytorch_overrides", "report"]

_installed: dict[tuple[str, str], tuple[object, _dispatcher.Installed]] = {}  # by name and device type
_warned = False


def enable_pytorch_overrides(*names: str, exclude: str | Iterable[str] = ()) -> Request:
    """Makes PyTorch's own functions use metalcore's kernels on the devices that metalcore supports.

    Args:
        names: of ops that have an override, such as "silu" and "qr". `python -m metalcore ops` lists them. No name
            means all, except those that were measured to be slower than PyTorch's own on the device. "safe" goes around
            the faults of PyTorch's MPS backend that `python -m metalcore doctor` has found on this machine; where it
            has not run, its probes run first, which takes a minute.
        exclude: names to leave out.

    Returns:
        A context manager that takes back this call at the end of its `with` block; it need not be used as one.

    Raises:
        ValueError: for a name that is not an override.

    Calling it again adds to what is enabled. Input that a kernel does not take, and tensors of other devices, go to
    PyTorch's own op. Nothing is printed: `metalcore.report()` tells what was replaced, and how often it ran. Where
    there is no device that metalcore has kernels for, a UserWarning says so, once.

    Example:
        >>> with metalcore.enable_pytorch_overrides("qr"):
        ...     Q, R = torch.linalg.qr(torch.randn(5, 3, device="mps"))  # runs metalcore.qr
        >>> Q.shape
        torch.Size([5, 3])
    """
    exclude = (exclude,) if isinstance(exclude, str) else tuple(exclude)
    chosen = _overrides.choose("enable_pytorch_overrides", names, exclude)
    if names:
        if _safe.NAME in chosen:
            chosen += [name for name in _safe.prepare() if name not in (*chosen, *exclude)]
        return request(chosen)
    return request([name for name in chosen if name != _safe.NAME], by_name=False)


def request(names: list[str], by_name: bool = True) -> Request:
    """Enables overrides of names that are known to be right, for a caller's caller. Without `by_name` those that are
    off by default are left out."""
    if not by_name:
        kinds, release = {device: kind_of(device) for device in devices()}, this_release()
        off = {name: by_default(name, kinds, release, measured_gains(kinds)) for name in names}
        result = _request([name for name in names if off[name] is None], by_name)
        for name, reason in off.items():
            if reason:
                _report.never_replaced(name, f"{name} on {' and '.join(kinds)}", reason)
        return result
    return _request(names, by_name)


def _request(names, by_name):
    global _warned
    if not devices() and not _warned:
        _warned = True
        warnings.warn(f"metalcore's overrides accelerate nothing here: {_why_no_device()}", stacklevel=4)
    return _overrides.request(names, by_name)


def disable_pytorch_overrides() -> None:
    """Gives every function back to PyTorch, whoever enabled it; enclosing `with` blocks then have nothing to undo.

    Example:
        >>> request = metalcore.enable_pytorch_overrides("qr")
        >>> metalcore.disable_pytorch_overrides()
        >>> metalcore.active_overrides()
        ()
    """
    _overrides.clear()


def active_overrides() -> tuple[str, ...]:
    """Returns the names of the overrides that are on, in the order of the registry.

    Example:
        >>> with metalcore.enable_pytorch_overrides("softmax", "qr"):
        ...     metalcore.active_overrides()
        ('softmax', 'qr')
    """
    return _overrides.active()


def report() -> Report:
    """Reports what the overrides have replaced, what not and why, and how often each ran: see `metalcore.Report`.

    The counts begin when overrides are enabled while none are, and stay when they are disabled. Calls that a graph of
    torch.compile has in it are counted where they reach an operator; modules, while Python runs their forward.

    Example:
        >>> with metalcore.enable_pytorch_overrides("qr"):
        ...     report = metalcore.report()
        >>> "qr" in str(report)
        True
    """
    return _report.report_of(active_overrides(), devices())


def devices() -> tuple[str, ...]:
    """Returns the types of the devices that metalcore has kernels for and that are there."""
    return tuple(filter(_is_available, sorted(DEVICES)))


def refresh() -> None:
    """Applies the requests again, when a device has appeared."""
    _overrides.apply()


def _apply():
    """Makes the registered kernels, the modules and the optimizers' constructors agree with the requests."""
    active = _overrides.active()
    available = devices()
    # Routes lie beneath overrides, which hold the kernels that they were put on.
    rebuilt = _safe.use(_safe.NAME in active and "mps" in available) or _safe.is_on()
    for name, device in list(_installed):
        if rebuilt or name not in active:
            _installed.pop((name, device))[1].remove()
    if active and not _applied:
        _report.start()
    _applied[:] = active
    if rebuilt:
        _safe.take_out_routes()
        _safe.lay_routes()
    unasked = _overrides.by_default()
    _switches.UNASKED = unasked if "mps" in available and kind_of("mps") == "mps" else frozenset()
    for name in NAMES:
        override = OPS[name].override
        if isinstance(override, OptimizerOverride):
            own = override.fused is not None and has_own(override.fused, this_release())
            _functions.switch_step(
                OPS[name], override, name in active and bool(available), own and name in _switches.UNASKED
            )
        elif isinstance(override, FunctionOverride):
            _functions.switch_functions(name, override, name in active and bool(available))
        elif override and name in active:
            for device in available:
                _install(name, override, device, name in unasked)
    if rebuilt:
        _safe.put_routes({place for _, installed in _installed.values() for place in installed.places})
    libraries.switch(active if available else ())


def _install(name, override, device, by_default):
    """Puts an override's kernels into PyTorch's dispatcher for a type of device, or as many as are on by default."""
    off = {one: one.elsewhere for one in override if device not in one.devices}
    leaves: frozenset = frozenset()
    if by_default:
        kind, figures = kind_of(device), measured_gains((device,)).get(device, {})
        for one in override:
            if one not in off and (reason := why_off(name, one, kind, this_release(), figures)):
                off[one] = reason
        leaves = frozenset(one for one in override if left_calls(name, one, kind, figures))
    here = tuple(one for one in override if one not in off)
    wanted = here, leaves
    if (name, device) in _installed and _installed[name, device][0] != wanted:
        _installed.pop((name, device))[1].remove()
    for operator, reason in {one.operator: reason for one, reason in off.items()}.items():
        if operator not in [one.operator for one in here]:
            _report.never_replaced(name, f"aten::{operator} on {device}", reason)
    if here and (name, device) not in _installed:
        _installed[name, device] = wanted, _dispatcher.Installed(name, here, device, leaves)


def _is_available(device):
    return torch.backends.mps.is_available() if device == "mps" else torch.get_device_module(device).is_available()


def _why_no_device():
    if not DEVICES:
        return "this build of metalcore has no kernels that this PyTorch could run"
    hint = ""
    if "mps" in DEVICES and not torch.backends.mps.is_available():
        hint = " (`import metalcore.simulator` simulates an mps device)"
    return f"PyTorch finds no {' or '.join(sorted(DEVICES, reverse=True))} device{hint}"


_applied: list = []  # the overrides that were on after the last change
# The names of all overrides.
NAMES = tuple(name for name, op in OPS.items() if op.override or name in libraries.NAMES)
_overrides = Switches((*NAMES, _safe.NAME), _apply)
