"""Operations whose elements are elements of their operands, at other coordinates."""

from . import lookups, pieces, views  # noqa: F401 - they enter their operators
from .views import READS

__all__ = ["READS"]
