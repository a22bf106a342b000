"""Kinds of modules that an override replaces: which classes are tried, and what is put in their place."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable

import torch
from torch.compiler import is_compiling

from .. import _report
from .formulas import on_the_cpu, settings_of, stand_in
from .patches import Patch, full_name, owner_of, run_counted

__all__ = ["Kind", "Modules"]

# What constructors call the length of a norm's weight. A class with a first argument of another name is not made for a
# trial: a number may mean anything to it, such as the descriptor of an open file, which it would read and close.
_LENGTHS = {
    *("hidden_size", "dim", "dims", "normalized_shape", "size", "num_features", "num_channels", "n", "d", "d_model"),
    *("feat_size", "n_embd", "embed_dim", "head_dim", "width", "channels", "features"),
}

_lock = threading.RLock()
_trying = False  # a forward is being tried, and it may call another one that is replaced


class Kind:
    """What overrides replace in a library.

    Attributes:
        overrides: the names of the overrides that it belongs to.
        active: those of them that are on.
        seen: the classes that it has met since.
        undecided: those of which it wants to see a module.
        patches: what it has replaced. The key is the class or the file that defines it.
    """

    def __init__(self, overrides):
        self.overrides, self.active = tuple(overrides), ()
        self.seen: set = set()
        self.undecided: set = set()
        self.patches: dict = {}

    def restore(self) -> None:
        """Gives everything back."""
        for patch in self.patches.values():
            patch.remove()
        for memory in (self.patches, self.seen, self.undecided):
            memory.clear()

    def begin(self) -> None:
        """Prepares, when some of its overrides have been switched on."""

    def meet_class(self, cls) -> None:
        """Looks at a class of modules for the first time."""

    def meet_module(self, module) -> None:
        """Looks at a module of an undecided class."""


class Modules(Kind):
    """Modules whose method `member` computes an op. `examine(module, method)` finds its recipe, which has

        override: the name of the override that it belongs to
        read: names of the attributes that it reads at each call
        run(module, args, kwargs): the result, or None if the original must compute it.

    A class is tried with a module that is made from one of `arguments`, where its constructor takes a length and
    numbers, or else with the first one that somebody makes. If `arguments` is None, each class is replaced whose name
    matches, and tried with each module that somebody makes or calls. `reason` tells why others that look alike are not
    replaced.
    """

    def __init__(
        self,
        overrides,
        pattern,
        examine: Callable,
        reason: str = "",
        arguments: tuple | None = None,
        member="forward",
    ):
        super().__init__(overrides)
        self.pattern, self.examine, self.reason, self.arguments = pattern, examine, reason, arguments
        self.member = member

    def meet_class(self, cls):
        owner = owner_of(cls, self.member)
        if not self.pattern.search(cls.__name__) or owner is None:
            return
        if owner.__module__.partition(".")[0] in ("torch", "metalcore"):
            return
        if self.arguments is None:
            if owner not in self.patches:
                self.patches[owner] = ModulePatch(self, owner)
                self.patches[owner].install_learner()
            self.undecided.add(cls)
            return
        for arguments in self.arguments if _can_be_made(cls) else ():
            try:
                with on_the_cpu():
                    module = cls(*arguments)
            except Exception:  # it needs other arguments, so wait until somebody makes one
                continue
            return self._decide(module)
        self.undecided.add(cls)

    def meet_module(self, module):
        if self.arguments is None:  # known before its first call, it is there in a compiled graph
            self.patches[owner_of(type(module), self.member)].recipe_of(module)
        else:
            self.undecided.discard(type(module))
            self._decide(module)

    def _decide(self, module):
        owner = owner_of(type(module), self.member)
        patch = self.patches.get(owner) or ModulePatch(self, owner)
        if patch.learn(module) is not None:
            if owner not in self.patches:
                patch.install_learner()
                self.patches[owner] = patch
        elif patch.unlike and not any(True for child in module.children() for _ in child.parameters()):
            # A module with others in it is a large part of a model.
            _report.never_replaced(self.overrides[0], full_name(type(module)), self.reason)


def _can_be_made(cls):
    """Returns whether one may make an object of this class to see what it computes: its constructor takes a length and
    numbers."""
    if type(cls) is not type or cls.__new__ is not object.__new__:
        return False
    if cls.__init__ is torch.nn.Module.__init__:
        return True
    return all(
        parameter.name in (*_LENGTHS, "activation", "approximate")
        or parameter.kind is parameter.VAR_KEYWORD  # which gets nothing
        or isinstance(parameter.default, (int, float, torch.dtype, torch.device, type(None)))
        for parameter in list(inspect.signature(cls.__init__).parameters.values())[1:]
    )


class ModulePatch(Patch):
    """metalcore's op in place of a method of a class of modules."""

    def __init__(self, kind: Modules, owner):
        super().__init__(owner, kind.member)
        self.kind = kind
        self.unlike = False  # no formula gave the numbers of the last module that was tried
        self.settings: dict = {}  # type of a module, or of a child without parameters -> names
        self.recipes: dict = {}  # key(module) -> (recipe, Count), or None

    def key(self, module):
        """Returns what decides which formula a module computes: its settings, which do not contain the weight's length,
        and its children with theirs."""
        names = self.settings.get(type(module))
        if names is None:
            return type(module)
        length = next((len(p) for p in module._parameters.values() if p is not None), None)
        values = [stand_in(name, module) for name in names]
        values = values if length is None else [-1 if value == length else value for value in values]
        return (type(module), *values, *[self.key(child) for child in module._modules.values()])

    def _note_settings(self, module, read=()):
        self.settings.setdefault(type(module), [name for name in settings_of(module) if name not in read])
        for child in module.children():
            if not isinstance(child, torch.nn.Dropout) and not any(True for _ in child.parameters()):
                self._note_settings(child)

    def learn(self, module):
        """Returns the recipe for modules like this one with their count, or None."""
        global _trying
        with _lock:
            _trying = True
            try:
                with on_the_cpu():
                    recipe = self.kind.examine(module, self.original)
            finally:
                _trying = False
            self._note_settings(module, () if recipe is None else recipe.read)
            self.unlike = recipe is None
            if recipe is not None and recipe.override not in self.kind.active:
                recipe = None
            entry = recipe and (recipe, _report.count_of(recipe.override, full_name(type(module))))
            self.recipes[self.key(module)] = entry
            return entry

    def recipe_of(self, module):
        """Returns what learn() gives, or has given for a module like this one."""
        entry = self.recipes.get(self.key(module), self)
        return self.learn(module) if entry is self else entry

    def install_learner(self):
        recipes, key, learn, original = self.recipes, self.key, self.learn, self.original

        def method(module, *args, **kwargs):
            if not self.on or _trying:
                return original(module, *args, **kwargs)
            entry = recipes.get(key(module), self)
            if entry is self:
                entry = None if is_compiling() else learn(module)
            if entry is None:
                return original(module, *args, **kwargs)
            recipe, count = entry
            return run_counted(
                count, lambda: recipe.run(module, args, kwargs), lambda: original(module, *args, **kwargs)
            )

        self.install(method)
