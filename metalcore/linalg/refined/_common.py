"""What the refined functions share: their arguments as scaled pairs, the loop of corrections, and LAPACK where these do
not converge."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...double import Double
from ...double._operators import split

__all__ = ["Call", "RefinementWarning", "eye", "frobenius", "iterate", "largest", "relative"]

LIMIT = 1e-13  # the largest backward error of a result
GOAL = 2e-14  # corrections end here, above the noise of products of pairs
_MOST = 16  # corrections
_FREE = 12  # of them, which need not make the error smaller


class RefinementWarning(UserWarning):
    """Says that refinement did not converge for some matrices, which LAPACK computed in float64 on the CPU."""


def _default_device():
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


class Call:
    """The arguments of a call: matrices as one batch of pairs on the device, times powers of two.

    Args:
        name: the function's name, for errors and warnings.
        arguments: float64 tensors on the CPU, or Doubles, of matrices. Their batches broadcast.
        device: where tensors are computed. Doubles stay on their device.
        by_column: which arguments have a power for each column, and not one for the matrix.
    """

    def __init__(self, name: str, arguments: dict[str, Tensor | Double], device, by_column: Sequence[str] = ()):
        self.name = name
        self.of_double = isinstance(next(iter(arguments.values())), Double)
        for argument, value in arguments.items():
            is_float64 = isinstance(value, Tensor) and value.is_cpu and value.dtype == torch.float64
            if not (isinstance(value, Double) if self.of_double else is_float64):
                kind = (
                    "a Double, as the first argument is"
                    if self.of_double
                    else "a float64 tensor on the CPU or a Double"
                )
                raise TypeError(f"refined.{name}: {argument} must be {kind}")
            if value.ndim < 2:
                raise RuntimeError(f"refined.{name}: {argument} must have at least 2 dimensions, but has {value.ndim}")
        if self.of_double:
            self.device = next(iter(arguments.values())).device
        else:
            self.device = torch.device(device) if device is not None else _default_device()
        self.batch = torch.broadcast_shapes(*(value.shape[:-2] for value in arguments.values()))
        self.given = [self._one_batch(value) for value in arguments.values()]
        self.powers: list[Tensor] = []
        self.numbers: list[Double] = []
        finite = torch.tensor(True)
        for argument, value in zip(arguments, self.given):
            high = value.hi if isinstance(value, Double) else value
            most = high.abs().amax(-2, keepdim=True) if high.numel() else high.new_ones(*high.shape[:-2], 1, 1)
            each_finite = most.amax((-2, -1)).isfinite()
            finite = finite.to(self.device if self.of_double else "cpu") & each_finite
            if argument not in by_column:
                most = most.amax(-1, keepdim=True)
            self.powers.append(_power(most))
        self.finite = finite
        for value, power in zip(self.given, self.powers):
            if isinstance(value, Double):
                pairs = value.pairs / power.unsqueeze(-1)
                value = Double.of_pairs(pairs.where(finite.view(-1, 1, 1, 1), 0.0))
            else:
                value = Double((value / power).where(finite.view(-1, 1, 1), 0.0), self.device)
            self.numbers.append(value)

    def _one_batch(self, value):
        return value.expand(*self.batch, *value.shape[-2:]).reshape(-1, *value.shape[-2:])

    def results(
        self, refined: Tensor, parts: Sequence[tuple[Double, Tensor | float]], by_lapack: Callable
    ) -> tuple[list, Tensor]:
        """Returns the results for the batch, and which matrices the device refined.

        Args:
            refined: (batch,), whether corrections have converged.
            parts: the results as computed, each with its power.
            by_lapack: computes the results of float64 matrices on the CPU.
        """
        finite = self.finite.cpu()
        refined = refined.cpu() & finite
        values = []
        for numbers, power in parts:
            if self.of_double:
                factor = power.unsqueeze(-1) if isinstance(power, Tensor) and numbers.ndim == 3 else power
                values.append(numbers.pairs * factor)
            else:
                values.append(numbers.double() * power)
        failed = (~refined & finite).nonzero().flatten()
        if len(failed):
            warnings.warn(
                f"metalcore.linalg.refined.{self.name}: {len(failed)} of {len(refined)} matrices did not converge; "
                "LAPACK computes them in float64 on the CPU",
                RefinementWarning,
                stacklevel=3,
            )
            given = [
                x[failed.to(x.device)] if isinstance(x, Tensor) else x[failed.to(x.device)].double() for x in self.given
            ]
            for value, computed in zip(values, by_lapack(*given)):
                if self.of_double:
                    computed = split(computed).to(value.device)
                value[failed.to(value.device)] = computed
        for value in values:
            if not finite.all():
                value[(~finite).to(value.device)] = torch.nan
        results = []
        for value in values:
            value = Double.of_pairs(value) if self.of_double else value
            results.append(value.reshape(*self.batch, *value.shape[1:]))
        return results, refined.reshape(self.batch)


def _power(most):
    """Returns the power of two below each positive finite number, and else one."""
    if most.dtype == torch.float64:
        mantissa, exponent = torch.frexp(most.where(most.isfinite() & (most > 0), 1.0))
        return torch.ldexp(torch.ones_like(mantissa), exponent - 1)
    bits = most.contiguous().view(torch.int32) & 0x7F800000
    power = bits.view(torch.float32)
    return power.where((most > 2.0**-100) & (most < 2.0**100), 1.0)


def iterate(measure: Callable[[], Tensor], correct: Callable[[], None], most: int = _MOST) -> Tensor:
    """Corrects results until the errors of all matrices are small, or none of the others becomes smaller.

    Returns whether each is at most LIMIT, (batch,) on the CPU.

    Args:
        measure: returns the backward errors of the present results, (batch,).
        correct: corrects the results by what `measure` has found.
    """
    previous = None
    for step in range(most):
        error = measure().cpu()
        # Large first corrections can leave larger errors of second order, which the next steps remove.
        goes_on = ~(error <= GOAL)
        if previous is not None:
            goes_on &= error.isfinite() & (error <= previous / 2)
            goes_on |= (error > LIMIT) & (error < 1.0) & (step < _FREE)
        if not goes_on.any():
            return error <= LIMIT
        correct()
        previous = error
    return measure().cpu() <= LIMIT


def eye(like: Double) -> Tensor:
    """Returns the identity for square matrices of `like`'s last dimension, in float32."""
    return torch.eye(like.shape[-1], device=like.device)


def frobenius(x: Tensor) -> Tensor:
    """Returns the Frobenius norms of float32 matrices, whose squares may be beyond float32's range, (batch,)."""
    most = largest(x)
    unit = most.where(most > 0, 1.0)
    return (x / unit.view(-1, 1, 1)).square().sum((-2, -1)).sqrt() * most


def largest(x: Tensor) -> Tensor:
    """Returns the largest magnitude in each matrix, (batch,)."""
    return x.abs().amax((-2, -1))


def relative(error: Tensor, size: Tensor) -> Tensor:
    """Returns error / size, and 0 for 0 / 0."""
    return (error / size).where(error != 0, 0.0)
