"""Convolutions."""

from ._conv2d import conv2d

__all__ = ["conv2d"]
