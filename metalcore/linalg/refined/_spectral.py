"""Eigenvectors and singular vectors with the precision of pairs: Ogita and Aishima's corrections."""

from __future__ import annotations

import torch
from torch import Tensor

from ...double import Double
from .. import eigh as float32_eigh
from .. import svd as float32_svd
from ._common import LIMIT, Call, eye, frobenius, iterate, relative
from ._qr import refined_factors
from ._systems import Numbers

__all__ = ["eigh", "svd"]

_INSIDE = LIMIT / 8  # what a cluster's block may have beside its diagonal, relative to the matrix
_APART = 3.0  # blocks of norm 1 whose shifts differ by it have separate spectra


def _diagonal(x):
    return Double.of_pairs(x.pairs.diagonal(dim1=-3, dim2=-2).mT)


def _off_diagonal(x):
    return x - torch.diag_embed(x.diagonal(dim1=-2, dim2=-1))


def _lack(X: Double) -> Tensor:
    """Returns I - XᵀX in float32. It is exactly symmetric: rounding must not turn vectors of close values."""
    lack = (Double(eye(X)) - X.mT @ X).float()
    return (lack + lack.mT) / 2


def _loss(lack: Tensor) -> Tensor:
    """Returns the loss of orthogonality of each matrix, (batch,)."""
    return frobenius(lack) / lack.shape[-1] ** 0.5


def _differences(values):
    """Returns value j - value i, in float32, with ones in the place of zeros."""
    found = (values.unsqueeze(-2) - values.unsqueeze(-1)).float()
    return found.where(found != 0, 1.0)


def _distance(rest: Tensor, lack: Tensor) -> Tensor:
    """Returns how far apart values have to be, (batch,) on the CPU: eight times what is beside the diagonal, of which
    float32's rounding of the lack of orthogonality, times the matrix's norm, is a part."""
    return (8 * rest + 2.0**-18 * lack).cpu().double()


def _clusters(values: Tensor, distance: Tensor) -> Tensor:
    """Returns the number of each value's cluster, in ascending order of values: (batch, n) on the CPU. Neighbours at
    most `distance`, (batch,), apart are in one cluster."""
    ordered, order = values.sort(-1)
    begins = ordered.diff(dim=-1, prepend=ordered[:, :1]) > distance.unsqueeze(-1)
    return torch.empty_like(order).scatter_(-1, order, begins.cumsum(-1))


def _counts(slope: Tensor, size: Tensor) -> Tensor:
    """Returns which entries beside the diagonal are large enough to be removed. To divide noise by the difference of
    close values would turn vectors that are right."""
    return slope.abs() > (LIMIT / 2 / slope.shape[-1] * size).view(-1, 1, 1)


def _same(labels, device):
    """Returns which pairs of values are in one cluster, (batch, n, n)."""
    return (labels.unsqueeze(-1) == labels.unsqueeze(-2)).to(device)


def _blocks(matrix: Tensor, values: Tensor, labels: Tensor, centred: Tensor) -> Tensor:
    """Returns float32 matrices with a block for each cluster, of norm at most 1 and shifted apart: the matrix's block
    about its values' centre, where `centred`, else about zero.

    Args:
        matrix: (batch, n, n), without diagonal, and zero outside of blocks.
        values: (batch, n), the diagonal, on the CPU.
        labels, centred: of each value, (batch, n) on the CPU.
    """
    sums = torch.maximum(matrix.abs().sum(-1), matrix.abs().sum(-2)).cpu().double()

    def of_cluster(x, reduce):
        return torch.zeros_like(x).scatter_reduce(-1, labels, x, reduce, include_self=False).gather(-1, labels)

    centre = of_cluster(values, "mean").where(centred, 0.0)
    scale = of_cluster((values - centre).abs() + sums, "amax")
    scale = scale.where(scale > 0, 1.0)
    diagonal = ((values - centre) / scale + _APART * labels).float().to(matrix.device)
    scale = scale.float().to(matrix.device)
    return matrix / scale.unsqueeze(-1) + torch.diag_embed(diagonal)


def _wanted(not_now: bool, inside: Tensor, rest: Tensor, size: Tensor) -> tuple[bool, Tensor]:
    """Returns whether clusters are to be turned now, and those of which matrices: where most of what is beside the
    diagonal is inside of them."""
    inside = frobenius(inside)
    wanted = (inside > _INSIDE * size) & (rest > LIMIT / 2 * size) & (inside > rest / 4)
    return not not_now and bool(wanted.any()), wanted


def _turns(vectors: Tensor, wanted: Tensor, keys: Tensor, same: Tensor) -> Double:
    """Returns the turns of clusters from the eigenvectors of their blocks.

    Args:
        vectors: (batch, n, n), in the order of the blocks' shifts.
        wanted: (batch,), which matrices are to be turned. Others get identities.
        keys: (batch, n) on the CPU, by which the shifts are ordered.
        same: (batch, n, n), which entries are in a block. What rounding left in the others is dropped.
    """
    places = keys.sort(stable=True).indices.argsort(-1).to(vectors.device)
    turns = vectors.gather(-1, places.unsqueeze(-2).expand_as(vectors)).where(same, 0.0)
    identity = torch.eye(turns.shape[-1], device=turns.device)
    turns = Double(turns.where(wanted.view(-1, 1, 1), identity))
    return turns + turns.float() @ (_lack(turns) / 2)


def _columns(x: Double, order: Tensor) -> Double:
    """Returns matrices with their columns in another order, (batch, n)."""
    index = order.to(x.device).view(len(order), 1, -1, 1)
    return Double.of_pairs(x.pairs.gather(-2, index.expand(-1, x.shape[-2], -1, 2)))


def eigh(A: Numbers, UPLO: str = "L", *, device=None, return_refined: bool = False):
    """Computes eigenvalues and eigenvectors of symmetric matrices with a backward error and a loss of orthogonality of
    at most 1e-13 (‖XᵀA X - diag(L)‖ / ‖A‖ and ‖I - XᵀX‖ / √n in the Frobenius norm).

    Products of pairs of float32 refine the eigenvectors of float32 (Ogita and Aishima, "Iterative refinement for
    symmetric eigenvalue decomposition", 2018; for clusters of eigenvalues, II, 2019: each cluster is diagonalized by
    itself in float32, about its centre). It converges for every symmetric matrix of moderate size; LAPACK takes those
    for which it does not, in float64 on the CPU, with a RefinementWarning.

    Args:
        A: (*, n, n), a float64 tensor on the CPU or a Double.
        UPLO: "L" or "U", the triangle that is read.
        device, return_refined: as for solve.

    Returns:
        L, (*, n), ascending, and X, (*, n, n), of the type of A.

    Raises:
        TypeError: A is neither a float64 tensor on the CPU nor a Double.
        RuntimeError: A is not square, or UPLO is another text.

    Example:
        >>> L, X = metalcore.linalg.refined.eigh(torch.diag(torch.tensor([2.0, 1.0]).double()), device="mps")
        >>> L.tolist()
        [1.0, 2.0]
    """
    call = Call("eigh", {"A": A}, device)
    (matrix,) = call.numbers
    if matrix.shape[-1] != matrix.shape[-2]:
        raise RuntimeError(f"refined.eigh: A must be square, not {matrix.shape[-2]}x{matrix.shape[-1]}")
    if UPLO not in ("L", "U"):
        raise RuntimeError(f"refined.eigh: UPLO must be 'L' or 'U', not {UPLO!r}")
    read = torch.ones(matrix.shape[-2:], dtype=torch.bool, device=matrix.device)
    read = (read.tril() if UPLO == "L" else read.triu()).unsqueeze(-1)
    matrix = Double.of_pairs(matrix.pairs.where(read, matrix.pairs.transpose(-3, -2)))
    X = Double(float32_eigh(matrix.float())[1])
    size, values = frobenius(matrix.hi), matrix
    rest, slope, lack = size, matrix.hi, matrix.hi
    turned, steps = False, 0  # whether the last correction turned clusters, which the next one makes orthogonal

    def measure():
        nonlocal values, lack, slope, rest
        product, lack = X.mT @ (matrix @ X), _lack(X)
        values = _diagonal(product) * (lack.diagonal(dim1=-2, dim2=-1) + 1.0)
        mean = (values.float().unsqueeze(-2) + values.float().unsqueeze(-1)) / 2
        slope = _off_diagonal((product.float() + product.float().mT) / 2 + lack * mean)
        rest = frobenius(slope)
        return torch.maximum(relative(rest, size), _loss(lack))

    def correct():
        nonlocal X, turned, steps
        numbers = values.double()
        labels = _clusters(numbers, _distance(rest, size * _loss(lack)))
        same = _same(labels, matrix.device)
        # matrix skew part, which turns X, to second order, and a symmetric one, which makes it orthogonal.
        turn = (slope / _differences(values)).where(~same & _counts(slope, size), 0.0)
        E = lack / 2 + turn + turn @ turn / 2
        X = X + X.float() @ E
        inside = slope.where(same, 0.0)
        turned, wanted = _wanted(turned or steps == 0, inside, rest, size)
        if turned:
            vectors = float32_eigh(_blocks(inside, numbers, labels, labels >= 0))[1]
            X = X @ _turns(vectors, wanted, labels, same)
        steps += 1

    refined = iterate(measure, correct)
    order = values.double().argsort(-1)
    ordered = _columns(values.unsqueeze(-2), order)[:, 0]
    power = call.powers[0]
    power_of_values = power[..., 0] if not call.of_double else power
    results = [(ordered, power_of_values), (_columns(X, order), 1.0)]
    parts, refined = call.results(refined, results, lambda A: torch.linalg.eigh(A, UPLO))
    return (*parts, refined) if return_refined else tuple(parts)


def svd(A: Numbers, *, device=None, return_refined: bool = False):
    """Computes thin singular value decompositions A = U diag(S) Vh with a backward error and a loss of orthogonality of
    at most 1e-13 (‖UᵀA V - diag(S)‖ / ‖A‖, and ‖I - UᵀU‖ / √k, ‖I - VᵀV‖ / √k in the Frobenius norm).

    Products of pairs of float32 refine the singular vectors of float32 (Ogita and Aishima, "Iterative refinement of
    singular value decomposition based on matrix multiplication", 2020); clusters of singular values, that at zero among
    them, are diagonalized by themselves in float32. A matrix that is not square is first factored by qr, which bounds
    its condition number to about 1e6; square ones may be singular. LAPACK takes matrices that do not converge, in
    float64 on the CPU, with a RefinementWarning.

    Args:
        A: (*, m, n), a float64 tensor on the CPU or a Double.
        device, return_refined: as for solve.

    Returns:
        U, (*, m, k), S, (*, k), descending, and Vh, (*, k, n), k = min(m, n), of the type of A.

    Raises:
        TypeError: A is neither a float64 tensor on the CPU nor a Double.

    Example:
        >>> U, S, Vh = metalcore.linalg.refined.svd(torch.diag(torch.tensor([1.0, -2.0]).double()), device="mps")
        >>> S.tolist()
        [2.0, 1.0]
    """
    call = Call("svd", {"A": A}, device)
    (matrix,) = call.numbers
    wide = matrix.shape[-2] < matrix.shape[-1]
    matrix = matrix.mT if wide else matrix
    Q, factored = None, torch.tensor(True)
    if matrix.shape[-2] > matrix.shape[-1]:
        Q, matrix, factored = refined_factors(matrix)
    U, values, V, refined = _square_svd(matrix)
    order = values.double().argsort(-1, descending=True)
    U, V = _columns(U if Q is None else Q @ U, order), _columns(V, order)
    values = _columns(values.unsqueeze(-2), order)[:, 0]
    U, V = (V, U) if wide else (U, V)
    power = call.powers[0] if call.of_double else call.powers[0][..., 0]
    parts, refined = call.results(
        refined & factored,
        [(U, 1.0), (values, power), (V.mT, 1.0)],
        lambda A: torch.linalg.svd(A, full_matrices=False),
    )
    return (*parts, refined) if return_refined else tuple(parts)


def _square_svd(A: Double) -> tuple[Double, Double, Double, Tensor]:
    """Returns U, the singular values, V, and which matrices have converged. The values are in no order."""
    left_vectors, _, Vh = float32_svd(A.float())
    U, V = Double(left_vectors), Double(Vh.mT)
    size, values = frobenius(A.hi), A
    rest, slope, lack_u, lack_v = size, A.hi, A.hi, A.hi
    turned, steps = False, 0  # as in eigh

    def measure():
        nonlocal values, slope, lack_u, lack_v, rest
        product, lack_u, lack_v = U.mT @ (A @ V), _lack(U), _lack(V)
        values = _diagonal(product) * ((lack_u + lack_v).diagonal(dim1=-2, dim2=-1) / 2 + 1.0)
        row, column = values.float().unsqueeze(-2), values.float().unsqueeze(-1)
        slope = _off_diagonal(product.float() + (lack_u * row + column * lack_v) / 2)
        rest = frobenius(slope)
        return torch.maximum(relative(rest, size), torch.maximum(_loss(lack_u), _loss(lack_v)))

    def correct():
        nonlocal U, V, turned, steps
        numbers = values.double()
        distance = _distance(rest, size * torch.maximum(_loss(lack_u), _loss(lack_v))).unsqueeze(-1)
        # Values that are as small as the distance are in one cluster with their negatives.
        labels = _clusters(numbers.abs(), distance[:, 0])
        near_zero = (labels == 0) & (numbers.abs().amin(-1, keepdim=True) <= distance)
        same, zero = _same(labels, A.device), near_zero.to(A.device)
        zero = zero.unsqueeze(-1) & zero.unsqueeze(-2)
        row, column = values.float().unsqueeze(-2), values.float().unsqueeze(-1)
        total = (row + column).where(row + column != 0, 1.0)
        divisor = _differences(values) * total
        # A cluster away from zero: only the relative rotation of its two sides.
        relative_turn = (slope - slope.mT) / (2 * total)
        counts = _counts(torch.maximum(slope.abs(), slope.mT.abs()), size) & ~zero
        turn_u = ((row * slope + column * slope.mT) / divisor).where(~same, relative_turn).where(counts, 0.0)
        turn_v = ((column * slope + row * slope.mT) / divisor).where(~same, -relative_turn).where(counts, 0.0)
        U = U + U.float() @ (lack_u / 2 + turn_u + turn_u @ turn_u / 2)
        V = V + V.float() @ (lack_v / 2 + turn_v + turn_v @ turn_v / 2)
        inside = slope.where(zero, (slope + slope.mT) / 2).where(same, 0.0)
        turned, wanted = _wanted(turned or steps == 0, inside, rest, size)
        if turned:
            # Blocks away from zero are shifted by 3 and more, so that they are positive definite.
            shifted = labels + 1 - near_zero.any(-1, keepdim=True).long()
            P, _, Qh = float32_svd(_blocks(inside, numbers, shifted, ~near_zero))
            U, V = U @ _turns(P, wanted, -shifted, same), V @ _turns(Qh.mT, wanted, -shifted, same)
        steps += 1

    refined = iterate(measure, correct)
    negative = (values.hi < 0).unsqueeze(-2).unsqueeze(-1)
    U = Double.of_pairs(torch.where(negative, -U.pairs, U.pairs))
    return U, values.abs(), V, refined
