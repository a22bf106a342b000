"""What is wrong with a file."""

__all__ = ["ProgramFileError"]


class ProgramFileError(ValueError):
    """The error of a file that is damaged, is no program or weights file, or has what such a file may not have. Nothing
    of it has run.

    Example:
        >>> from pathlib import Path
        >>> _ = Path("damaged.mcprog").write_bytes(b"damaged")
        >>> try:
        ...     metalcore.load("damaged.mcprog")
        ... except metalcore.programs.ProgramFileError as error:
        ...     print(error)
        damaged.mcprog: it is no file of this kind, or its beginning is damaged
    """
