"""Variables of the environment that switch something on or off."""

from __future__ import annotations

import os

__all__ = ["switched_on"]

_ON = ("1", "on", "yes", "true")
_OFF = ("0", "off", "no", "false")

def switched_on(variable: str, default: bool = False) -> bool:
    """Returns whether a variable of the environment is 1, on, yes or true and not 0, off, no or false, in any case. An
    empty one is as none, which has the default. csrc/backends/simulator/modes.cpp is the same in C++.

    Raises:
        ValueError: it is something else.
    """
    given = os.environ.get(variable, "")
    text = given.lower()
    if text and text not in (*_ON, *_OFF):
        raise ValueError(
            f"metalcore: {variable} must be {', '.join(_ON[:-1])} or {_ON[-1]}, or {', '.join(_OFF[:-1])} or "
            f"{_OFF[-1]}, got '{given}'"
        )
    return text in _ON if text else default
