"""What is wrong with a file."""

__all__ = ["ProgramFileError"]


class ProgramFileError(ValueError):
    """A file is damaged, is no program or weights file, or has what such a file may not have. Nothing of it has run."""
