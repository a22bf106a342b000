"""Of which operators' calls the functions of linear algebra consist that have no operator of their own."""

from __future__ import annotations

__all__ = ["COMPOSED"]

_VALUES = {"full_matrices": False, "compute_uv": False}


def _singular_values(shapes, options):
    return [("eigh", shapes, {"compute_v": False}) if options.get("hermitian") else ("svd", shapes, _VALUES)]


def _cond(shapes, options):
    return _singular_values(shapes, {}) if options.get("p") in (None, 2, -2, "nuc") else [("inv", shapes, {})]


def _pinv(shapes, options):
    return [("eigh", shapes, {}) if options.get("hermitian") else ("svd", shapes, {"full_matrices": False})]


def _trsm(shapes, options):
    return [("solve_triangular", shapes, {"left": options.get("side", "L") == "L"})]


def _larft(shapes, options):
    (*batch, _, k), _ = shapes
    return [("solve_triangular", [(*batch, k, k), (*batch, k, k)], {})]


def _lstsq(shapes, options):
    A, B = shapes
    (*batch, m, n), k = A, 1 if len(B) == 1 or A[:-1] == B else B[-1]
    least = min(m, n)
    return [
        ("qr_scaled", [(*batch, max(m, n), least)], {}),
        ("solve_triangular", [(*batch, least, least), (*batch, least, k)], {}),
    ]


def _svd_lowrank(shapes, options):
    ((*batch, m, n),) = shapes
    q, niter = (6 if options.get("q") is None else options["q"]), options.get("niter", 2)
    tall, short = (("qr", [(*batch, side, q)], {}) for side in (max(m, n), min(m, n)))
    return [tall, *niter * [short, tall], ("svd", [(*batch, min(m, n), q)], {"full_matrices": False})]


def _pca_lowrank(shapes, options):
    ((*_, m, n),) = shapes
    return _svd_lowrank(shapes, {"q": min(6, m, n), **options})


# The shapes and options of a call -> the operators that it calls, each with shapes and options. What is PyTorch's own
# of such a call, such as products of matrices, is left out. The operators know two options more than the functions:
# whether singular vectors or eigenvectors are computed.
COMPOSED = {
    "svdvals": _singular_values,
    "eigvalsh": lambda shapes, options: _singular_values(shapes, {"hermitian": True}),
    "matrix_rank": _singular_values,
    "cond": _cond,
    "pinv": _pinv,
    "trsm": _trsm,
    "larft": _larft,
    "lstsq": _lstsq,
    "svd_lowrank": _svd_lowrank,
    "pca_lowrank": _pca_lowrank,
}
