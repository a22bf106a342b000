"""The exponential of matrices."""

from __future__ import annotations

import math

import torch

from .._core.operators import autograd, composed_kernel, cpu_kernel, fake_kernel, ops
from .._core.registry import Op, Sample, register
from .._core.routing import accelerated
from .._core.samples import turned
from ._common import COMPUTED, NUMBERS, host_numbers, in_float32, square
from ._pytorch import by_torch, override

__all__ = ["matrix_exp"]

_NEAR = 1.5  # the largest column sum of what the polynomial takes


def matrix_exp(A: torch.Tensor) -> torch.Tensor:
    """Computes the exponentials of square matrices, as torch.linalg.matrix_exp.

    A Taylor polynomial of degree 12 takes A / 2^s, whose largest column sum is at most 3/2, and s squarings follow. A
    simdgroup computes one or several matrices of up to 32 rows (complex ones: 16), and a threadgroup one of up to 64
    (complex: 32), each with its own s. Larger ones take products of the whole batch, and the host waits for their
    largest s.

    Args:
        A: (*, n, n), any strides. float32 or complex64; float16 and bfloat16 are computed in float32, and the result is
            cast back. Other input goes to PyTorch's op.

    Returns:
        (*, n, n). A matrix that holds NaN or infinity has a NaN result. It has gradients of any order, from the
        exponential of the block matrix (Aᴴ, G; 0, Aᴴ) as in PyTorch.

    Raises:
        RuntimeError: the matrices are not square. The message is PyTorch's.

    Source: Paterson and Stockmeyer, "On the Number of Nonscalar Multiplications Necessary to Evaluate Polynomials",
        1973; Higham, "Functions of Matrices", 2008, chapter 10.

    Example:
        >>> metalcore.matrix_exp(torch.tensor([[0.0, 2.0], [0.0, 0.0]], device="mps")).tolist()
        [[1.0, 2.0], [0.0, 1.0]]
    """
    if not accelerated(A, dtypes=NUMBERS) or not square(A):
        return by_torch(torch.linalg.matrix_exp, A)
    return in_float32(_matrix_exp, A)


def _polynomial(A):
    """Returns the Taylor polynomial of degree 12 of A by five products, as a polynomial of A³."""
    A2 = A @ A
    A3 = A @ A2
    result = A3 / math.factorial(12)
    for k in (9, 6, 3, 0):
        result = result if k == 9 else A3 @ result
        result.add_(A, alpha=1 / math.factorial(k + 1)).add_(A2, alpha=1 / math.factorial(k + 2))
        result.diagonal(dim1=-2, dim2=-1).add_(1 / math.factorial(k))
    return result


@composed_kernel("matrix_exp_scaled")
def _(A):
    # The host knows how often each matrix is squared: fewer ops on the device, since matrices often agree.
    lengths = host_numbers(A.abs().sum(-2).amax(-1).flatten(), 1.0)
    finite = [math.isfinite(length) for length in lengths]
    squarings = [math.ceil(math.log2(x / _NEAR)) if _NEAR < x < math.inf else 0 for x in lengths]
    most = max(squarings)

    def of_matrices(numbers):
        return torch.tensor(numbers, device=A.device).view(*A.shape[:-2], 1, 1)

    each = None if min(squarings) == most else of_matrices(squarings)
    half = most // 2 if each is None else each // 2  # powers of two beyond float32's range are two factors
    rest = most - half if each is None else each - half
    X = _polynomial(A * _power(-half) * _power(-rest))
    for step in range(most):
        X = X @ X if each is None else torch.where(each > step, X @ X, X)
    return X if all(finite) else torch.where(of_matrices(finite), X, torch.nan)


def _power(exponent):
    return torch.exp2(exponent) if isinstance(exponent, torch.Tensor) else 2.0**exponent


@fake_kernel("matrix_exp_scaled")
def _(A):
    return A.new_empty(A.shape)


@cpu_kernel("matrix_exp")
def _(A):
    return torch.linalg.matrix_exp(A).contiguous() if A.device.type == "cpu" else ops.matrix_exp_scaled(A)


@fake_kernel("matrix_exp")
def _(A):
    return A.new_empty(A.shape)


def _save(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])


def _backward(ctx, grad):
    """Returns the upper right block of exp(Aᴴ, grad; 0, Aᴴ), which is linear in grad."""
    (A,) = ctx.saved_tensors
    if grad.numel() == 0:
        return torch.zeros_like(A)
    with torch.no_grad():  # a small gradient adds no squarings; a power of two, in two factors, rounds nothing
        largest = grad.abs().amax((-2, -1), keepdim=True).clamp(min=1e-37)
        half = ((largest.log2().ceil() + A.shape[-1].bit_length() + 4) / 2).ceil()
    scaled = grad * torch.exp2(-half) * torch.exp2(-half)
    n, Ah = A.shape[-1], A.mH
    blocks = torch.cat([torch.cat([Ah, scaled], -1), torch.cat([torch.zeros_like(A), Ah], -1)], -2)
    return _matrix_exp(blocks)[..., :n, n:] * torch.exp2(half) * torch.exp2(half)


_matrix_exp = autograd("matrix_exp", _backward, _save)


# The override of PyTorch's kernel


def _override(A):
    if accelerated(A, dtypes=COMPUTED) and square(A):
        return ops.matrix_exp(A)


def _samples():
    def small(a):
        return a / a.shape[-1]

    return (
        *(
            Sample(f"{n}x{n}", ((batch, n, n),), prepare=(small,), terms=n)
            for batch, n in ((40, 5), (3, 12), (3, 32), (2, 40), (2, 70))
        ),
        *(
            Sample(f"{n}x{n}, complex", ((5, n, n),), prepare=(small,), arguments=turned, terms=2 * n)
            for n in (6, 16, 20)
        ),
    )


register(
    Op(
        "matrix_exp",
        matrix_exp,
        namesake="torch.linalg.matrix_exp",
        operators=("matrix_exp", "matrix_exp_scaled"),
        override=(override("linalg_matrix_exp", _override, dtypes=COMPUTED),),
        waits=True,  # for the largest column sums of large matrices
        samples=_samples,
    )
)
