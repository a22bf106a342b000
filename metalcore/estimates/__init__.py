"""Counts of what kernels do, and estimates of the time they take on Apple's GPUs."""

from .chips import Chip
from .counts import Counted, CountedLibrary, Memory, counting
from .figures import Estimate, estimate

__all__ = ["Chip", "Counted", "CountedLibrary", "Estimate", "Memory", "counting", "estimate"]
