"""One finding of a check."""

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Finding:
    """A place in a program that breaks a rule."""

    file: str
    line: int
    column: int
    rule: str
    message: str

    def __str__(self):
        place = f"{self.file}:{self.line}:{self.column}" if self.column else f"{self.file}:{self.line}"
        return f"{place}: error: {self.message} [{self.rule}]"
