"""The wheel for Macs, built and checked on Linux; the steps of the check, and what stops it."""

import contextlib
import time


class CheckFailed(Exception):
    """A fault that was found; the message names it."""


@contextlib.contextmanager
def step(name):
    """Prints the step's name and time, and its notes (`say(...)`)."""
    notes, start = [], time.monotonic()
    yield notes.append
    print(f"{name:<48} {time.monotonic() - start:6.1f} s", *notes, sep="\n    ", flush=True)
