"""Derivatives of decompositions where values repeat: divisions that stay finite."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["Broadened", "check_broadening", "division"]


def check_broadening(name: str, A: Tensor, broadening: float) -> bool:
    """Returns whether there is a broadening. Raises ValueError for one that function `name` does not take."""
    number = isinstance(broadening, (int, float)) and not isinstance(broadening, bool)
    if not number or not 0 <= broadening < math.inf:
        raise ValueError(f"metalcore.{name}: broadening must be a finite number of at least 0, not {broadening!r}")
    if broadening and A.is_complex():
        raise ValueError(f"metalcore.{name}: broadening is for real matrices, and A is {A.dtype}")
    return broadening > 0


def division(largest: Tensor | None, broadening: float) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns the function (y, x) -> y / x, or with a broadening y x / (x² + d²), d = broadening * largest (Liao et al.
    2019, arXiv:1903.09650). A matrix of zeros, where d is zero, has zeros there.

    largest: of the values that the divisors x are made of; it broadcasts with x.
    """
    if not broadening or largest is None:
        return torch.div
    unit = largest.detach()
    unit = unit.where(unit > 0, 1.0)

    def divide(y, x):
        share = x / unit
        root = torch.hypot(share, torch.full_like(share, broadening))  # share² might underflow
        return y * (share / root / root / unit)

    return divide


class Broadened(torch.autograd.Function):
    """A decomposition with a derivative that is finite where divisors are zero. Its last argument is the broadening.

    What inherits has `forward` and `backward`, which finds the results in ctx.saved_tensors.
    """

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.broadening = inputs[-1]
        ctx.save_for_backward(*output)
        ctx.set_materialize_grads(False)
