"""Normalizations of rows and of groups."""

# The registry, and the tables that are made of it, have the order in which ops are imported.
# isort: off
from ._rms_norm import add_rms_norm, rms_norm
from ._rms_norm_gated import rms_norm_gated
from ._layer_norm import add_layer_norm, layer_norm
from ._group_norm import group_norm

__all__ = ["add_layer_norm", "add_rms_norm", "group_norm", "layer_norm", "rms_norm", "rms_norm_gated"]
