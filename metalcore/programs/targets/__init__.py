"""What programs are compiled for.

program = metalcore.compile(model, (x,), dtype=torch.float16, target=targets.EXAMPLE_NPU)
"""

from .target import APPLE, CPU, EXAMPLE_NPU, NVIDIA, TARGETS, Target, TargetError, Violation, check, target_of

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
