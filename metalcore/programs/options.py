"""The options of `metalcore.compile` and of torch.compile(…, backend="metalcore", options={…})."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

__all__ = ["GENERATED", "SINGLE", "Options"]

# The names of the switches of generated kernels, beside those of the patterns.
GENERATED = "pointwise"
SINGLE = "single"  # only by its name


@dataclass(frozen=True)
class Options:
    """The options of a compilation.

    Attributes:
        fusions: the names of the patterns to apply ("pointwise" stands for generated kernels, and "single" for those of
            one operation); None means all of them except those that are applied by name alone.
        dynamic: what is done with a graph whose sizes change: "specialize" makes a program for each set of sizes,
            "eager" runs it as PyTorch does.
        cache_size: how many programs one graph keeps. Further sizes run as PyTorch runs them.
        memory: "allocator" takes the memory of each value from PyTorch, "arena" from one piece that the program keeps.
        fallback: whether a graph that cannot become a program runs as PyTorch runs it, with a warning, or raises an
            error.

    Example:
        >>> metalcore.programs.Options(fusions=["rms_norm"]).fusions
        ['rms_norm']
    """

    fusions: Sequence[str] | None = None
    dynamic: str = "specialize"
    cache_size: int = 16
    memory: str = "allocator"
    fallback: bool = True

    def __post_init__(self):
        from .patterns import PATTERNS

        names = [pattern.name for pattern in PATTERNS] + [GENERATED, SINGLE]
        if isinstance(self.fusions, str):
            raise TypeError("fusions must be a list of names, not one name")
        unknown = [name for name in self.fusions or () if name not in names]
        if unknown:
            raise ValueError(f"there is no fusion {', '.join(map(repr, unknown))}; there are {', '.join(names)}")
        _one_of("dynamic", self.dynamic, ("specialize", "eager"))
        _one_of("memory", self.memory, ("allocator", "arena"))
        if type(self.cache_size) is not int or self.cache_size < 1:
            raise ValueError(f"cache_size must be a number of 1 and more, not {self.cache_size!r}")
        if type(self.fallback) is not bool:
            raise TypeError(f"fallback must be True or False, not {self.fallback!r}")

    @classmethod
    def of(cls, options: Mapping[str, Any] | None) -> Options:
        """Returns the options in a mapping.

        Raises:
            ValueError, TypeError: one is unknown, or has a value that it cannot have.
        """
        names = [entry.name for entry in fields(cls)]
        unknown = [name for name in options or () if name not in names]
        if unknown:
            raise ValueError(f"there is no option {', '.join(map(repr, unknown))}; there are {', '.join(names)}")
        return cls(**(options or {}))

    @property
    def generates(self) -> bool:
        """Whether pointwise operations are joined to generated kernels."""
        return self.fusions is None or GENERATED in self.fusions or self.generates_single

    @property
    def generates_single(self) -> bool:
        """Whether an operation alone becomes a generated kernel as well."""
        return self.fusions is not None and SINGLE in self.fusions


def _one_of(name, choice, choices):
    if choice not in choices:
        raise ValueError(f"{name} must be {' or '.join(map(repr, choices))}, not {choice!r}")
