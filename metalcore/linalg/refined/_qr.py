"""QR factors with the precision of pairs."""

from __future__ import annotations

import torch

from ...double import Double
from .. import qr as float32_qr
from .. import solve_triangular
from ._common import Call, eye, frobenius, iterate, relative
from ._systems import Numbers

__all__ = ["qr", "refined_factors"]


def qr(A: Numbers, *, device=None, return_refined: bool = False):
    """Factors A = Q R with a backward error and a loss of orthogonality of at most 1e-13 (‖A - Q R‖ / ‖A‖ and
    ‖I - QᵀQ‖ / √n in the Frobenius norm).

    The factors come from float32, and pairs of float32 correct them: the residual A - Q R goes to Q through R⁻¹, and
    what I - QᵀQ leaves is shared by Q and R as in CholeskyQR. It converges for condition numbers up to about 1e6.
    LAPACK factors the other matrices in float64 on the CPU, with a RefinementWarning.

    Args:
        A: (*, m, n), a float64 tensor on the CPU or a Double.
        device, return_refined: as for solve.

    Returns:
        Q, (*, m, k), and R, (*, k, n), k = min(m, n), of the type of A. The signs of R's diagonal are those of
        metalcore.linalg.qr.

    Raises:
        TypeError: A is neither a float64 tensor on the CPU nor a Double.

    Example:
        >>> Q, R = metalcore.linalg.refined.qr(torch.eye(3, 2, dtype=torch.float64), device="mps")
        >>> (Q @ R).tolist()
        [[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]
    """
    call = Call("qr", {"A": A}, device)
    (matrix,) = call.numbers
    k = min(matrix.shape[-2:])
    Q, R, refined = refined_factors(matrix[..., :k])
    if k < matrix.shape[-1]:
        R = Double.of_pairs(torch.cat((R.pairs, (Q.mT @ matrix[..., k:]).pairs), -2))
    factors, refined = call.results(refined, [(Q, 1.0), (R, call.powers[0])], torch.linalg.qr)
    return (*factors, refined) if return_refined else tuple(factors)


def refined_factors(A: Double) -> tuple[Double, Double, torch.Tensor]:
    """Returns Q and R of matrices (batch, m, n), m >= n, and which of them have converged."""
    Q, R = map(Double, float32_qr(A.float()))
    identity, size = Double(eye(R)), frobenius(A.hi)
    rest = gram = R

    def measure():
        nonlocal rest, gram
        rest, gram = A - Q @ R, identity - Q.mT @ Q
        return torch.maximum(relative(frobenius(rest.hi), size), frobenius(gram.hi) / A.shape[-1] ** 0.5)

    def correct():
        nonlocal Q, R
        change = solve_triangular(R.float(), rest.float(), upper=True, left=False)
        overlap = Q.float().mT @ change
        # Q + change has the Gram matrix I - W, whose Cholesky factor is I - U, to first order.
        W = gram.float() - overlap - overlap.mT
        U = W.triu(1) + torch.diag_embed(W.diagonal(dim1=-2, dim2=-1) / 2)
        Q = Q + change
        Q = Q + Q.float() @ U
        R = R - U @ R.float()

    refined = iterate(measure, correct)
    return Q, R, refined
