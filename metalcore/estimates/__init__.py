"""Counts of what kernels do, and estimates of the time they take on Apple's GPUs."""

from .counts import Counted, CountedLibrary, counting
from .figures import Estimate, estimate

__all__ = ["Counted", "CountedLibrary", "Estimate", "counting", "estimate"]
