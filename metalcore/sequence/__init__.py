"""Ops along the time of a sequence, as models have that are not only attention."""

from ._causal_conv1d import causal_conv1d
from ._causal_conv1d_update import causal_conv1d_update
from ._delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from ._linear_attention import (
    chunk_gla,
    chunk_kda,
    chunk_simple_gla,
    fused_recurrent_gla,
    fused_recurrent_kda,
    fused_recurrent_simple_gla,
)
from ._mamba_chunk_scan import mamba_chunk_scan_combined
from ._selective_scan import selective_scan
from ._selective_state_update import selective_state_update

__all__ = [
    "causal_conv1d",
    "causal_conv1d_update",
    "chunk_gated_delta_rule",
    "chunk_gla",
    "chunk_kda",
    "chunk_simple_gla",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gla",
    "fused_recurrent_kda",
    "fused_recurrent_simple_gla",
    "mamba_chunk_scan_combined",
    "selective_scan",
    "selective_state_update",
]
