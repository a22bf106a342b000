"""Operations whose elements are elements of their operands, at other coordinates."""

from . import coordinates, lookups, padding, pieces, views  # noqa: F401 - they enter their operators
from .table import READS

__all__ = ["READS"]
