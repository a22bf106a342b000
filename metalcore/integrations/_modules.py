"""The overrides `rms_norm` and `gelu` for modules that compute these ops with PyTorch's simple operators, as those of
transformers do. While the override is on, the forward of their classes calls metalcore's op.

Each class of modules with "norm" or "gelu" in its name is tried (_formulas.py). Existing classes are tried when the
override is switched on, and others when PyTorch registers one of their parameters, or one of them in another module. So
a library may be imported, or a model made, before or after.
"""

from __future__ import annotations

import functools
import re
import threading

import torch
from torch.compiler import is_compiling
from torch.nn.modules import module as registration

from .._core import refused
from ..overrides import _report
from ._formulas import LENGTH, examine, on_the_cpu, settings_of

__all__ = ["switch"]

NAMES = {"rms_norm": re.compile("norm", re.IGNORECASE), "gelu": re.compile("gelu", re.IGNORECASE)}
REASONS = {
    "rms_norm": "since their numbers are not those of an RMSNorm with weight, 1 + weight or without, or gated",
    "gelu": "since their numbers are not those of GELU",
}

_lock = threading.RLock()
_active: tuple = ()  # some of NAMES
_seen: set = set()  # the classes that were tried
_undecided: dict = {}  # class that could not be made, and waits for a module -> its override
_patches: dict = {}  # the class that defines the forward -> Patch
_hooks: list = []
_trying = False  # a forward is being tried, and it may call another one that is replaced


def switch(names) -> None:
    """Replaces the forwards for the overrides in `names`, and restores those of all others."""
    global _active
    names = tuple(name for name in NAMES if name in names)
    with _lock:
        if names == _active:
            return
        _active = names
        _seen.clear()
        _undecided.clear()
        for owner, patch in list(_patches.items()):
            if patch.name not in names:
                patch.remove()
                del _patches[owner]
        while _hooks:
            _hooks.pop().remove()
        if names:
            _hooks.append(
                registration.register_module_parameter_registration_hook(
                    lambda module, name, parameter: _meet_class(type(module))
                )
            )
            _hooks.append(
                registration.register_module_module_registration_hook(lambda parent, name, module: _meet(module))
            )
            for cls in _subclasses(torch.nn.Module):
                _meet_class(cls)


def _subclasses(cls):
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _meet(module):
    cls = type(module)
    _meet_class(cls)
    if cls in _undecided:
        with _lock:
            if (name := _undecided.pop(cls, None)) is not None:
                _decide(name, module)


def _meet_class(cls):
    if cls in _seen:
        return
    with _lock:
        _seen.add(cls)
        name = next((name for name in _active if NAMES[name].search(cls.__name__)), None)
        if name is None or cls in _undecided or _owner(cls).__module__.partition(".")[0] in ("torch", "metalcore"):
            return
        try:
            with on_the_cpu():
                module = cls() if name == "gelu" else _make(cls)
        except Exception:  # it needs other arguments, so wait until somebody makes one
            _undecided[cls] = name
        else:
            _decide(name, module)


def _make(cls):
    try:
        return cls()  # without a weight, the first argument may not be the length
    except Exception:
        return cls(LENGTH)


def _owner(cls):
    """The class that defines the forward of cls."""
    return next(base for base in cls.__mro__ if "forward" in vars(base))


def _decide(name, module):
    owner = _owner(type(module))
    patch = _patches.get(owner)
    if patch is None:
        patch = Patch(name, owner)
    if patch.learn(module) is not None:
        if owner not in _patches:
            patch.install()
            _patches[owner] = patch
    elif not any(True for child in module.children() for _ in child.parameters()):  # it is not a large part of a model
        _report.never_replaced(name, _full_name(type(module)), REASONS[name])


def _full_name(cls):
    return f"{cls.__module__}.{cls.__qualname__}"


class Patch:
    """metalcore's op in place of a class's forward."""

    def __init__(self, name, owner):
        self.name, self.owner, self.on = name, owner, False
        self.original = owner.forward
        self.settings: list = []
        self.recipes: dict = {}  # key(module) -> (Recipe, Count), or None

    def key(self, module):
        """The values that decide which formula a module of the class computes. They do not contain the weight's
        length."""
        if not self.settings:
            return type(module)
        length = next((len(p) for p in module._parameters.values() if p is not None), None)
        values = [getattr(module, name, None) for name in self.settings]
        return (type(module), *[-1 if value == length else value for value in values])

    def learn(self, module):
        """The recipe for modules like this one with their count, or None."""
        global _trying
        with _lock:
            _trying = True
            try:
                recipe = examine(self.name, module, self.original)
            finally:
                _trying = False
            if not self.recipes:
                self.settings = [name for name in settings_of(module) if recipe is None or name not in recipe.read]
            entry = recipe and (recipe, _report.count_of(self.name, _full_name(type(module))))
            self.recipes[self.key(module)] = entry
            return entry

    def install(self):
        recipes, key, learn, original = self.recipes, self.key, self.learn, self.original

        @functools.wraps(original)
        def forward(module, *args, **kwargs):
            if not self.on or _trying:  # while it is off, a wrapper of the forward may still call this
                return original(module, *args, **kwargs)
            compiling = is_compiling()
            entry = recipes.get(key(module), self)
            if entry is self:
                entry = None if compiling else learn(module)
            if entry is None:
                return original(module, *args, **kwargs)
            recipe, count = entry
            if compiling:  # the graph would contain a count
                result = recipe.run(module, args, kwargs)
                return original(module, *args, **kwargs) if result is None else result
            refused_before = refused.calls()
            result = recipe.run(module, args, kwargs)
            if result is None:
                count.left["input that its kernel does not take"] += 1
                return original(module, *args, **kwargs)
            count.ran_since(refused_before)
            return result

        self.forward, self.on = forward, True
        self.owner.forward = forward

    def remove(self):
        self.on = False
        if vars(self.owner).get("forward") is self.forward:
            self.owner.forward = self.original
