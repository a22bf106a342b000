"""Errors of the MSL front end and the host compiler."""

import re

TOO_DEEP = "the program is nested too deeply"  # said of Python's own limit, which depends on the depth of the caller


class MSLError(SyntaxError, RuntimeError):
    """MSL that cannot be compiled; the message names the file, the line and what is wrong there.

    It is a SyntaxError because `torch.mps.compile_shader` raises one, and a RuntimeError because PyTorch's other errors
    are.
    """


class CompilerNotFoundError(RuntimeError):
    """No C++ compiler that can build translated kernels was found on this machine."""


def with_line(message, source, filename):
    """Returns the message of an error at a line of the source, with that line below it."""
    place = re.match(re.escape(filename) + r":(\d+):", message)
    lines = source.splitlines()
    if place is None or "\n" in message or not 0 < int(place[1]) <= len(lines):
        return message
    return f"{message}\n{lines[int(place[1]) - 1]}"


def quote_error(file, line, column, text, source, filename):
    """Returns a compiler's error as `file:line:column: text`, and below it the line where that is one of the source,
    whose name is `filename`."""
    message = ":".join(str(part) for part in (file, line, column) if part) + ": " + text
    lines = source.splitlines()
    if file == filename and int(line) <= len(lines):
        message += "\n" + lines[int(line) - 1]
        if column:
            message += "\n" + " " * (int(column) - 1) + "^"
    return message


def error_at(token, message):
    """Returns an MSLError in the form that compilers use, so that editors can jump to the place."""
    return MSLError(f"{token.file}:{token.line}: error: {message}")
