"""Switches that are on as long as somebody asks for it."""

from __future__ import annotations

import threading
from collections import Counter

__all__ = ["Request", "Switches"]

# On a Mac, the names of overrides that are on and that nobody asked for (metalcore/overrides/libraries/sdpa.py).
UNASKED: frozenset[str] = frozenset()


class Switches:
    """Named switches that several callers may turn on; one is on as long as any of them asks for it.

    `apply()` is called, one thread at a time, whenever what is on may have changed.
    """

    def __init__(self, names, apply):
        self.names = tuple(names)
        self._apply = apply
        self._lock = threading.RLock()
        self._counts: Counter = Counter()
        self._named: Counter = Counter()  # of those, how many asked for it by name
        self._epoch = 0  # counts clear(): what was requested before it is forgotten

    def choose(self, function: str, names, exclude) -> list[str]:
        """Returns the switches that a caller means: `names`, or all, without `exclude`; ValueError for an unknown
        one."""
        exclude = (exclude,) if isinstance(exclude, str) else tuple(exclude)
        for name in (*names, *exclude):
            if name not in self.names:
                raise ValueError(f"{function}: {name!r} is not one of {', '.join(self.names)}")
        return [name for name in self.names if name in (names or self.names) and name not in exclude]

    def request(self, names, by_name=True) -> Request:
        with self._lock:
            self._counts.update(names)
            self._named.update(names if by_name else ())
            request = Request(self, names, self._epoch, by_name)
            self._apply()
        return request

    def withdraw(self, request: Request):
        with self._lock:
            if request.epoch == self._epoch:
                self._counts.subtract(request.names)
                self._named.subtract(request.names if request.by_name else ())
            request.epoch = None
            self._apply()

    def clear(self):
        with self._lock:
            self._epoch += 1
            self._counts.clear()
            self._named.clear()
            self._apply()

    def apply(self):
        with self._lock:
            self._apply()

    def active(self) -> tuple[str, ...]:
        with self._lock:
            return tuple(name for name in self.names if self._counts[name] > 0)

    def by_default(self) -> frozenset[str]:
        """Returns those that are on, and that nobody asked for by name."""
        with self._lock:
            return frozenset(name for name in self.names if self._counts[name] > 0 and self._named[name] <= 0)


class Request:
    """One caller's request. It holds until its `with` block ends, or else until everything is switched off."""

    def __init__(self, switches, names, epoch, by_name=True):
        self._switches, self.names, self.epoch, self.by_name = switches, names, epoch, by_name

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._switches.withdraw(self)
