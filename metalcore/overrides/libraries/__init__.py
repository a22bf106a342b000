"""The overrides that reach modules and functions of other libraries, such as transformers, which compute an op with
PyTorch's simple operators. While an override is on, they call metalcore's op.

Each kind of them (KINDS) is tried on a few numbers, whatever its class is called. Existing classes are met when an
override is switched on, and others when PyTorch registers one of their parameters or children, or one of them in
another module. So a library may be imported, or a model made, before or after.
"""

from __future__ import annotations

import re
import threading

import torch
from torch.nn.modules import module as registration

from . import formulas, gated
from .kinds import Modules
from .loss import LanguageModels
from .patches import subclasses
from .rotary import RotaryFunctions
from .sdpa import TransformersSdpa
from .sequences import SequenceFunctions

__all__ = ["NAMES", "switch"]

KINDS = (
    Modules(
        ("rms_norm",),
        re.compile("norm", re.IGNORECASE),
        formulas.examine_norm,
        "since their numbers are not those of an RMSNorm with weight, 1 + weight or without, or gated",
        arguments=((), (formulas.LENGTH,)),  # without a weight, the first argument may not be the length
    ),
    Modules(
        ("gelu", "quick_gelu"),
        re.compile("gelu", re.IGNORECASE),
        formulas.examine_gelu,
        "since their numbers are not those of GELU or its approximation by a sigmoid",
        arguments=((),),
    ),
    Modules(
        ("swiglu", "geglu"),
        re.compile("mlp|feed_?forward|ffn|glu|gate|dense", re.IGNORECASE),
        gated.examine_mlp,
    ),
    Modules(
        ("swiglu", "geglu"),
        re.compile("expert|moe", re.IGNORECASE),
        gated.examine_gate,
        member="_apply_gate",
    ),
    RotaryFunctions(),
    SequenceFunctions(),
    LanguageModels(),
    TransformersSdpa(),
)
NAMES = tuple(dict.fromkeys(name for kind in KINDS for name in kind.overrides))

_lock = threading.RLock()
_active: tuple = ()  # some of NAMES
_seen: set = set()  # the classes that were met
_hooks: list = []


def switch(names) -> None:
    """Replaces what belongs to the overrides in `names`, and restores what belongs to all others."""
    global _active
    names = tuple(name for name in NAMES if name in names)
    with _lock:
        changed = set(names) ^ set(_active)
        if not changed:
            return
        _active = names
        _seen.clear()
        for kind in KINDS:
            if changed & set(kind.overrides):
                kind.restore()
                kind.active = tuple(name for name in kind.overrides if name in names)
                if kind.active:
                    kind.begin()
        while _hooks:
            _hooks.pop().remove()
        if names:
            _hooks.append(
                registration.register_module_parameter_registration_hook(
                    lambda module, name, parameter: _meet_class(type(module))
                )
            )
            _hooks.append(
                registration.register_module_module_registration_hook(
                    lambda parent, name, module: _meet_pair(parent, module)
                )
            )
            for cls in subclasses(torch.nn.Module):
                _meet_class(cls)


def _meet_pair(parent, module):
    _meet_class(type(parent))  # a whole model has no parent
    _meet(module)


def _meet(module):
    _meet_class(type(module))
    for kind in KINDS:
        if type(module) in kind.undecided:
            with _lock:
                kind.meet_module(module)


def _meet_class(cls):
    if cls in _seen:
        return
    with _lock:
        _seen.add(cls)
        for kind in KINDS:
            if kind.active and cls not in kind.seen:
                kind.seen.add(cls)
                kind.meet_class(cls)
