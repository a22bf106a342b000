"""Normalizations of rows."""

from ._rms_norm import add_rms_norm, rms_norm

__all__ = ["add_rms_norm", "rms_norm"]
