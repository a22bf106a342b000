"""Programs: PyTorch code traced, fused and planned, as a list of operations for one set of shapes.

program = metalcore.compile(model.eval(), (x,))        # for inference; parameters are part of it
y = program(x)
print(program.report())

fast = torch.compile(model, backend="metalcore")       # forward and backward
"""

from .backend import Compiled, observe
from .bisection import Finding, bisect
from .compiling import compile
from .files import ProgramFileError, load
from .options import Options
from .patterns import PATTERNS
from .planning import Plan, Planned
from .profiling import Profile, Timing
from .program import Program
from .report import Report, Step
from .rewriting import Emitter, Pattern, Rewritten
from .targets import Target, TargetError
from .tracing import NotTraceable, trace

__all__ = [
    "PATTERNS",
    "Compiled",
    "Emitter",
    "Finding",
    "NotTraceable",
    "Options",
    "Pattern",
    "Plan",
    "Planned",
    "Profile",
    "Program",
    "ProgramFileError",
    "Report",
    "Rewritten",
    "Step",
    "Target",
    "TargetError",
    "Timing",
    "bisect",
    "compile",
    "load",
    "observe",
    "trace",
]
