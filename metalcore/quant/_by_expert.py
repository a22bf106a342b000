"""Products of many rows with experts: each expert's rows are put together."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

__all__ = ["multiply_by_expert"]


def multiply_by_expert(
    x: Tensor,
    experts: Tensor,
    count: int,
    rows: int,
    multiply: Callable[[Tensor, int], Tensor],
    missing: float = float("nan"),
) -> Tensor:
    """Returns each row of x times the matrix of its expert. The host waits for the experts' numbers.

    Args:
        x: (tokens, length) or (tokens, experts of a token, length).
        experts: (tokens, experts of a token), of which `count` exist.
        rows: the length of the result's rows.
        multiply: returns some rows times the matrix of an expert.
        missing: what an expert that does not exist makes.
    """
    result = x.new_full((*experts.shape, rows), missing)
    for expert in experts.unique().tolist():
        if 0 <= expert < count:
            of = (experts == expert).nonzero(as_tuple=True)
            result = result.index_put(of, multiply(x[of[: x.dim() - 1]], expert))
    return result
