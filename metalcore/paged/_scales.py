"""What queries, keys and values of a quantized cache are multiplied by."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["scaled"]


def scaled(function: str, q: Tensor, kv_heads: int, scale: float, q_scale, k_scale, v_scale):
    """Returns the queries, the factor of scores, and what the results are multiplied by, or None. The host does not
    read tensors: those of queries and keys go into the queries, which are float32 then, so that nothing is rounded."""
    heads = q.shape[1]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    for name, factor, count in (("q_scale", q_scale, heads), ("k_scale", k_scale, kv_heads)):
        if isinstance(factor, Tensor):
            q = q.to(wide) * _of_heads(function, name, factor, count, q)
        elif factor is not None:
            scale *= _number(function, name, factor)
    if v_scale is None or isinstance(v_scale, Tensor):
        return q, scale, None if v_scale is None else _of_heads(function, "v_scale", v_scale, kv_heads, q)
    return q, scale, _number(function, "v_scale", v_scale)


def _number(function, name, factor):
    if type(factor) not in (int, float):
        raise TypeError(f"metalcore.paged.{function}: {name} must be a number or a tensor, not {type(factor).__name__}")
    return float(factor)


def _of_heads(function, name, factor, count, q):
    """Returns the factors of the heads of queries, with a dimension for their elements."""
    if not factor.is_floating_point() or factor.numel() not in (1, count) or factor.dim() > 1:
        raise ValueError(
            f"metalcore.paged.{function}: {name} must be a floating-point number or {count} of them, not "
            f"{tuple(factor.shape)} of {factor.dtype}"
        )
    if factor.device != q.device:
        raise RuntimeError(f"metalcore.paged.{function}: {name} must be on q's device, {q.device}, not {factor.device}")
    factor = factor.reshape(-1).to(torch.float64 if q.dtype == torch.float64 else torch.float32)
    return (factor if factor.numel() == 1 else factor.repeat_interleave(q.shape[1] // count)).unsqueeze(-1)
