"""Rotary position embedding."""

from ._rope import rope

__all__ = ["rope"]
