"""Random choice of a model's next token."""

from ._sample import sample

__all__ = ["sample"]
