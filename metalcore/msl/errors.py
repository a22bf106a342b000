"""Errors of the MSL front end and the host compiler."""


class MSLError(SyntaxError, RuntimeError):
    """MSL that cannot be compiled; the message names the file, the line and what is wrong there.

    A SyntaxError because that is what `torch.mps.compile_shader` raises, a RuntimeError because everything else in
    PyTorch is one.
    """


class CompilerNotFoundError(RuntimeError):
    """No C++ compiler that can build translated kernels was found on this machine."""


def error_at(token, message):
    """An MSLError in the form compilers use, so that editors can jump to the place."""
    return MSLError(f"{token.file}:{token.line}: error: {message}")
