"""Counts of what kernels do, and estimates of the time they take on Apple's GPUs."""

from .counts import Counted, CountedLibrary, counting

__all__ = ["Counted", "CountedLibrary", "counting"]
