"""One finding of a check."""

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Finding:
    """A fault that breaks a rule, at its place in a program.

    Example:
        >>> [finding] = metalcore.msl.check.check("kernel void one(device double* x) { x[0] = 1; }")
        >>> finding.line
        1
    """

    file: str
    line: int
    column: int
    rule: str
    message: str

    def __str__(self):
        place = f"{self.file}:{self.line}:{self.column}" if self.column else f"{self.file}:{self.line}"
        return f"{place}: error: {self.message} [{self.rule}]"
