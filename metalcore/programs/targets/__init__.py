"""What programs are compiled for.

program = metalcore.compile(model, (x,), dtype=torch.float16, target=targets.EXAMPLE_NPU)
"""

from .checking import TargetError, Violation, check
from .target import APPLE, CPU, EXAMPLE_NPU, NVIDIA, TARGETS, Target, target_of

__all__ = [
    "APPLE",
    "CPU",
    "EXAMPLE_NPU",
    "NVIDIA",
    "TARGETS",
    "Target",
    "TargetError",
    "Violation",
    "check",
    "target_of",
]
