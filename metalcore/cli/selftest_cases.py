"""What selftest runs: every op, with its PyTorch namesake, on tensors that the kernels' different plans take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import metalcore

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Case:
    """`ours` and `theirs` take tensors of `shapes` and give a tensor or several, which are compared.

    Attributes:
        terms: how many numbers the longest sum has, on which the bound of the error depends.
        roundings: how often a result is rounded to its own dtype on the way.
        make: random numbers -> the input, where not every input will do.
    """

    ours: Callable
    theirs: Callable
    shapes: tuple
    terms: int = 1
    roundings: int = 1
    backward: bool = True
    make: Callable = lambda value: value


def _add_rms_norm(x, residual, weight):
    total = x + residual
    return F.rms_norm(total, total.shape[-1:], weight, eps=1e-6), total


def _in_order(silu, softmax):
    """Between PyTorch's own ops, which must see each other's results."""

    def chain(x):
        for _ in range(10):
            x = silu(x) + softmax(x / 2, -1)
        return x

    return chain


_STEPS = 3


def _adamw(optimizer):
    """The parameters and moments after some steps, each with other gradients."""

    def steps(*tensors):
        half = len(tensors) // 2
        params = [torch.nn.Parameter(tensor.clone()) for tensor in tensors[:half]]
        made = optimizer(params, lr=0.5, weight_decay=0.1)  # so large that the steps, not the start, make the result
        for step in range(_STEPS):
            for param, grad in zip(params, tensors[half:]):
                param.grad = grad * 2**step  # exact in every dtype
            made.step()
        return [
            *(param.detach() for param in params),
            *(made.state[param][name] for param in params for name in ("exp_avg", "exp_avg_sq")),
        ]

    return steps


def _well_conditioned(a):
    """A matrix whose singular values are within a small factor of each other, so that Q and R hardly amplify errors."""
    return a / a.shape[-2] ** 0.5 + 2 * torch.eye(*a.shape[-2:])


def _elementwise(ours, theirs, **options):
    return Case(ours, theirs, ((64, 1000),), **options)


def _rows(length, rows=16):
    return Case(
        lambda x, w: metalcore.rms_norm(x, (length,), w, 1e-6),
        lambda x, w: F.rms_norm(x, (length,), w, 1e-6),
        ((rows, length), (length,)),
        terms=max(rows, length),
    )


def _qr(*shape):
    return Case(
        lambda a: metalcore.qr(a), lambda a: torch.linalg.qr(a), (shape,), terms=max(shape[-2:]), make=_well_conditioned
    )


def _spd(a):
    """A well-conditioned symmetric positive-definite matrix."""
    return a @ a.mT / a.shape[-1] + torch.eye(a.shape[-1])


def _cholesky(*shape):
    return Case(
        lambda a: metalcore.cholesky(a), lambda a: torch.linalg.cholesky(a), (shape,), terms=shape[-1], make=_spd
    )


def _square(ours, theirs, n, *columns, batch=3):
    """A function of matrices that are far from singular, and of right-hand sides of so many columns."""
    return Case(
        ours,
        theirs,
        ((batch, n, n), *((batch, n, k) for k in columns)),
        terms=n,
        make=lambda value: _well_conditioned(value) if value.shape[-2] == value.shape[-1] else value,
    )


def _triangular(n, columns, batch=3):
    return Case(
        lambda a, b: metalcore.solve_triangular(a, b, upper=False),
        lambda a, b: torch.linalg.solve_triangular(a, b, upper=False),
        ((batch, n, n), (batch, n, columns)),
        terms=n,
        make=lambda value: _well_conditioned(value) if value.shape[-2] == value.shape[-1] else value,
    )


def _separated(a):
    """A matrix whose singular values, or its symmetric part's eigenvalues, are about one apart. Vectors depend on it as
    the largest over that distance: by n."""
    m, n = a.shape[-2:]
    return a / (10 * min(m, n)) + torch.diag(torch.arange(1.0, max(m, n) + 1))[:m, :n]


def _svd(*shape):
    return Case(
        lambda a: metalcore.svd(a, False).S,
        lambda a: torch.linalg.svd(a, False).S,
        (shape,),
        terms=max(shape[-2:]) ** 2,
        make=_separated,
    )


def _eigh(batch, n):
    return Case(
        lambda a: metalcore.eigh(a + a.mT).eigenvalues,
        lambda a: torch.linalg.eigh(a + a.mT).eigenvalues,
        ((batch, n, n),),
        terms=n**2,
        make=_separated,
    )


def _geqrf(*shape):
    return Case(
        lambda a: tuple(metalcore.geqrf(a)),
        lambda a: tuple(torch.geqrf(a)),
        (shape,),
        terms=max(shape[-2:]),
        backward=False,
        make=_well_conditioned,
    )


def _reflectors(name, theirs, shape, *others):
    """Of reflectors below the diagonal of a matrix of small numbers, with tau one in all: nearly orthogonal."""

    def of(function):
        return lambda a, *rest: function(a / 16, torch.ones_like(a[..., 0, :]), *rest)

    return Case(
        of(lambda *given: getattr(metalcore, name)(*given)), of(theirs), (shape, *others), terms=max(shape[-2:])
    )


def _values(ours, theirs, *shape, make=_separated):
    """A function of a matrix that is made of singular values or eigenvalues, as `_svd`."""
    return Case(ours, theirs, (shape,), terms=max(shape[-2:]) ** 2, make=make)


def _low_rank(u, s, vh):
    """The best approximation of rank 3: made of vectors, and the same whichever signs these have."""
    return (u[..., :3] * s[..., None, :3]) @ vh[..., :3, :]


def _vectors(found):
    """Eigenvalues and vectors as a singular value decomposition has them, those of the largest values first."""
    values, vectors = found
    return vectors.flip(-1), values.flip(-1), vectors.flip(-1).mT


def _factored(a):
    """LU and pivots that do not depend on who factors: a matrix whose rows are in their places already."""
    return a, torch.arange(1, a.shape[-1] + 1, dtype=torch.int32, device=a.device).expand(a.shape[:-1])


def _few_columns(a):
    """A matrix of rank 5."""
    return _separated(a) * (torch.arange(a.shape[-1]) < 5)


def _unit_lower(v):
    """Reflectors as LAPACK leaves them, with the ones on the diagonal and the zeros above that are understood."""
    return v.tril(-1) + torch.eye(*v.shape[-2:], dtype=v.dtype, device=v.device)


def _larft(v, tau):
    """LAPACK's loop over the columns of T (dlarft, forward, columnwise)."""
    v, columns = _unit_lower(v), []
    for i in range(v.shape[-1]):
        column = torch.zeros_like(tau)
        if i:
            left = torch.stack(columns, -1)
            column = -tau[..., i, None] * (left @ (v[..., :i].mT @ v[..., i, None])).squeeze(-1)
        columns.append(column + tau * (torch.arange(v.shape[-1], device=tau.device) == i))
    return torch.stack(columns, -1)


def _larfb(v, t, c):
    v = _unit_lower(v)
    return c - v @ (t @ (v.mT @ c))


# The lambdas look metalcore's functions up when they are called, so that it is those of the moment that are tested.
CASES = {
    "silu": _elementwise(lambda x: metalcore.silu(x), F.silu),
    "silu, strided": _elementwise(lambda x: metalcore.silu(x.mT[3::2, 1:]), lambda x: F.silu(x.mT[3::2, 1:])),
    "gelu": _elementwise(lambda x: metalcore.gelu(x), F.gelu),
    "gelu, tanh": _elementwise(lambda x: metalcore.gelu(x, "tanh"), lambda x: F.gelu(x, approximate="tanh")),
    "softmax": _elementwise(lambda x: metalcore.softmax(x, -1), lambda x: F.softmax(x, -1), terms=1000),
    "softmax, dim 0": _elementwise(lambda x: metalcore.softmax(x, 0), lambda x: F.softmax(x, 0), terms=64),
    "softmax, empty": Case(lambda x: metalcore.softmax(x, -1), lambda x: F.softmax(x, -1), ((0, 8),)),
    "log_softmax": _elementwise(lambda x: metalcore.log_softmax(x, -1), lambda x: F.log_softmax(x, -1), terms=1000),
    "rms_norm": _rows(1000),
    "rms_norm, short rows": _rows(24, rows=500),
    "rms_norm, long rows": _rows(20000, rows=3),
    "add_rms_norm": Case(
        lambda x, r, w: metalcore.add_rms_norm(x, r, w, 1e-6),
        _add_rms_norm,
        ((16, 1000), (16, 1000), (1000,)),
        terms=1000,
        roundings=2,
    ),
    "qr, 16x12": _qr(40, 16, 12),
    "qr, 100x40": _qr(3, 100, 40),
    "qr, 1200x20": _qr(1, 1200, 20),
    "qr, 2100x12": _qr(1, 2100, 12),
    "qr, 160x140": _qr(1, 160, 140),
    "cholesky, 16x16": _cholesky(40, 16, 16),
    "cholesky, 100x100": _cholesky(3, 100, 100),
    "cholesky, 200x200": _cholesky(1, 200, 200),
    "cholesky_ex": Case(
        lambda a: metalcore.cholesky_ex(a).L, lambda a: torch.linalg.cholesky(a), ((3, 20, 20),), terms=20, make=_spd
    ),
    "cholesky_solve": _square(
        lambda a, b: metalcore.cholesky_solve(b, a), lambda a, b: torch.cholesky_solve(b, a), 20, 5
    ),
    "svd, 20x12": _svd(7, 20, 12),
    "svd, 60x40": _svd(2, 60, 40),
    "svd, 140x140": _svd(1, 140, 140),
    "eigh, 12x12": _eigh(7, 12),
    "eigh, 40x40": _eigh(2, 40),
    "eigh, 140x140": _eigh(1, 140),
    "svd, vectors": Case(
        lambda a: _low_rank(*metalcore.svd(a, False)),
        lambda a: _low_rank(*torch.linalg.svd(a, False)),
        ((3, 20, 12),),
        terms=20**2,
        make=_separated,
    ),
    "eigh, vectors": Case(
        lambda a: _low_rank(*_vectors(metalcore.eigh(a + a.mT))),
        lambda a: _low_rank(*_vectors(torch.linalg.eigh(a + a.mT))),
        ((3, 12, 12),),
        terms=12**2,
        make=_separated,
    ),
    "svdvals": _values(lambda a: metalcore.svdvals(a), torch.linalg.svdvals, 3, 30, 20),
    "eigvalsh": _values(lambda a: metalcore.eigvalsh(a + a.mT), lambda a: torch.linalg.eigvalsh(a + a.mT), 3, 20, 20),
    "cond": _values(lambda a: metalcore.cond(a), torch.linalg.cond, 3, 12, 12, make=_well_conditioned),
    "matrix_rank": Case(
        lambda a: metalcore.matrix_rank(a, rtol=0.01).to(a.dtype),
        lambda a: torch.linalg.matrix_rank(a, rtol=0.01).to(a.dtype),
        ((3, 20, 12),),
        backward=False,
        make=_few_columns,
    ),
    # Of as many columns as there are: then nothing depends on the random numbers.
    "svd_lowrank": _values(lambda a: metalcore.svd_lowrank(a, 12)[1], torch.linalg.svdvals, 3, 20, 12),
    "pca_lowrank": _values(
        lambda a: metalcore.pca_lowrank(a, 12)[1],
        lambda a: torch.linalg.svdvals(a - a.mean(-2, keepdim=True)),
        3,
        20,
        12,
    ),
    "pinv": Case(lambda a: metalcore.pinv(a), torch.linalg.pinv, ((7, 20, 12),), terms=20, make=_well_conditioned),
    "pinv, hermitian": Case(
        lambda a: metalcore.pinv(a + a.mT, hermitian=True),
        lambda a: torch.linalg.pinv(a + a.mT, hermitian=True),
        ((7, 12, 12),),
        terms=12,
        make=lambda a: _well_conditioned(a) + 2 * torch.eye(12),
    ),
    "solve, 3x3": _square(lambda a, b: metalcore.solve(a, b), lambda a, b: torch.linalg.solve(a, b), 3, 5),
    "solve, 12x12": _square(lambda a, b: metalcore.solve(a, b), lambda a, b: torch.linalg.solve(a, b), 12, 5),
    "solve, 60x60": _square(lambda a, b: metalcore.solve(a, b), lambda a, b: torch.linalg.solve(a, b), 60, 5),
    # One matrix: PyTorch 2.13's own results on a CPU are wrong for batches of 150 rows and more, by oneMKL's DLASWP.
    "solve, 170x170": _square(
        lambda a, b: metalcore.solve(a, b), lambda a, b: torch.linalg.solve(a, b), 170, 5, batch=1
    ),
    "solve_ex": _square(lambda a, b: metalcore.solve_ex(a, b).result, lambda a, b: torch.linalg.solve(a, b), 12, 5),
    "lstsq": Case(
        lambda a, b: metalcore.lstsq(a, b).solution,
        lambda a, b: torch.linalg.lstsq(a, b).solution,
        ((3, 20, 12), (3, 20, 5)),
        terms=20,
        make=lambda value: _well_conditioned(value) if value.shape[-1] == 12 else value,
    ),
    "inv": _square(lambda a: metalcore.inv(a), lambda a: torch.linalg.inv(a), 20),
    "inv_ex": _square(lambda a: metalcore.inv_ex(a).inverse, lambda a: torch.linalg.inv(a), 20),
    "det": _square(lambda a: metalcore.det(a), lambda a: torch.linalg.det(a), 5),
    "lu": _square(lambda a: metalcore.lu(a)[1:], lambda a: torch.linalg.lu(a)[1:], 30),
    "lu_factor": _square(lambda a: metalcore.lu_factor(a).LU, lambda a: torch.linalg.lu_factor(a).LU, 100),
    "lu_factor_ex": _square(lambda a: metalcore.lu_factor_ex(a).LU, lambda a: torch.linalg.lu_factor(a).LU, 20),
    "lu_solve": _square(
        lambda a, b: metalcore.lu_solve(*_factored(a), b), lambda a, b: torch.linalg.lu_solve(*_factored(a), b), 20, 5
    ),
    "slogdet": _square(lambda a: metalcore.slogdet(a)[1], lambda a: torch.linalg.slogdet(a)[1], 40),
    "trsm": _square(
        lambda a, b: metalcore.trsm(a, b), lambda a, b: torch.linalg.solve_triangular(a, b, upper=False), 20, 5
    ),
    "syrk": Case(lambda a: metalcore.syrk(a), lambda a: a @ a.mT, ((3, 70, 40),), terms=70),
    "solve_triangular, 12x12": _triangular(12, 5),
    "solve_triangular, 33x33": _triangular(33, 5, batch=1100),
    "solve_triangular, 100x100": _triangular(100, 1),
    "solve_triangular, 160x160": _triangular(160, 20),
    "geqrf, 60x20": _geqrf(3, 60, 20),
    "geqrf, 160x140": _geqrf(1, 160, 140),
    "householder_product, 30x20": _reflectors("householder_product", torch.linalg.householder_product, (4, 30, 20)),
    "householder_product, 160x140": _reflectors("householder_product", torch.linalg.householder_product, (1, 160, 140)),
    "ormqr, 160x140": _reflectors("ormqr", torch.ormqr, (1, 160, 140), (1, 160, 30)),
    "larft": Case(
        lambda v, tau: metalcore.larft(v / 16, tau / 4),
        lambda v, tau: _larft(v / 16, tau / 4),
        ((3, 40, 20), (3, 20)),
        terms=40,
    ),
    "larfb": Case(
        lambda v, t, c: metalcore.larfb(v / 16, t / 4, c),
        lambda v, t, c: _larfb(v / 16, t / 4, c),
        ((3, 40, 20), (3, 20, 20), (3, 40, 30)),
        terms=40,
    ),
    "AdamW": Case(
        _adamw(lambda *a, **k: metalcore.optim.AdamW(*a, **k)),
        _adamw(torch.optim.AdamW),
        ((300, 57), (5,), (300, 57), (5,)),
        terms=_STEPS,
        roundings=_STEPS,
        backward=False,
    ),
    "silu and softmax in turns": _elementwise(
        _in_order(lambda x: metalcore.silu(x), lambda x, dim: metalcore.softmax(x, dim)),
        _in_order(F.silu, F.softmax),
        terms=1000,
        roundings=40,
    ),
}

SHADER = """
#include <metal_stdlib>
using namespace metal;

// Sums 256 consecutive elements, scaled: simdgroups, threadgroup memory, a barrier and bytes as an argument.
kernel void sum256(device const float* in [[buffer(0)]], device float* out [[buffer(1)]],
                   constant float& factor [[buffer(2)]],
                   uint group [[threadgroup_position_in_grid]], uint index [[thread_position_in_threadgroup]],
                   uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup float partial[8];
  float sum = simd_sum(in[group * 256 + index]);
  if (lane == 0) partial[simdgroup] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (index == 0) {
    float total = 0.0f;
    for (uint i = 0; i < 8; ++i) total += partial[i];
    out[group] = factor * total;
  }
}
"""
