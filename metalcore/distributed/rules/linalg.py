"""Linear algebra runs on shards of the batch without communication. What is linear in the right-hand sides also runs on
shards of their columns (or rows), and on partial sums of them."""

from __future__ import annotations

from ._rule import Partial, Replicate, Shard, aligned, batches, rule


@rule(
    *("geqrf", "inv_ex", "qr_scaled", "qr_pivoted", "schur", "cholesky_ex", "lu_factor_ex", "det", "slogdet"),
    *("matrix_exp", "matrix_exp_scaled", "ldl_factor_ex"),
)
def decomposition(call):
    for dim in batches(call.A):
        yield Shard(dim), {"A": Shard(dim)}


@rule("square_root_triangular")
def square_root_triangular(call):
    for dim in batches(call.C):
        yield Shard(dim), {"C": Shard(dim)}


@rule("logarithm_triangular")
def logarithm_triangular(call):
    for dim in batches(call.T):
        yield Shard(dim), {"T": Shard(dim)}


def _if(is_output, dim):
    """Returns the placement of an output, which has no elements where it is not asked for."""
    return Shard(dim) if is_output else Replicate()


@rule("qr")
def qr(call):
    for dim in batches(call.A):
        yield (_if(call.mode != "r", dim), Shard(dim)), {"A": Shard(dim)}


@rule("lstsq")
def lstsq(call):
    for dim in batches(call.A):
        yield Shard(dim), {"A": Shard(dim), "B": Shard(dim)}


@rule("lu")
def lu(call):
    for dim in batches(call.A):
        yield (_if(call.pivot, dim), Shard(dim), Shard(dim)), {"A": Shard(dim)}


@rule("svd")
def svd(call):
    for dim in batches(call.A):
        vectors = _if(call.compute_uv, dim)
        yield (vectors, Shard(dim), vectors), {"A": Shard(dim)}


@rule("eigh", "eig")
def eigh(call):
    for dim in batches(call.A):
        yield (Shard(dim), _if(call.compute_v, dim)), {"A": Shard(dim)}


@rule("eigh_tridiagonal")
def eigh_tridiagonal(call):
    for dim in range(call.d.ndim - 1):
        yield (Shard(dim), _if(call.compute_v, dim)), {"d": Shard(dim), "e": Shard(dim)}


@rule("householder_product")
def householder_product(call):
    for dim in batches(call.A):
        yield Shard(dim), {"A": Shard(dim), "tau": Shard(dim)}


@rule("info_any")
def info_any(call):
    for dim in range(call.info.ndim):
        yield Partial(), {"info": Shard(dim)}  # its caller asks only whether it is 0


def _broadcast(right, factors, linear):
    """Yields the rules of operators on a right-hand side and factors with inner dimensions, whose batches are
    broadcast.

    Args:
        right: name and spec of the right-hand side.
        factors: name -> (spec, number of inner dimensions).
        linear: the inner dimension of the right-hand side, -1 or -2, along which it can be divided.
    """
    name, B = right
    batch = max(B.ndim - 2, *(spec.ndim - inner for spec, inner in factors.values()))
    for place in range(batch):
        inputs = {each: aligned(spec, inner, place) for each, (spec, inner) in factors.items()}
        yield Shard(batch - 1 - place), inputs | {name: aligned(B, 2, place)}
    yield Shard(batch + 2 + linear), {name: Shard(B.ndim + linear)}
    yield Partial(), {name: Partial()}


@rule("solve_triangular")
def solve_triangular(call):
    return _broadcast(("B", call.B), {"A": (call.A, 2)}, -1 if call.left else -2)


@rule("cholesky_solve")
def cholesky_solve(call):
    return _broadcast(("B", call.B), {"L": (call.L, 2)}, -1)


@rule("lu_solve")
def lu_solve(call):
    return _broadcast(("B", call.B), {"LU": (call.LU, 2), "pivots": (call.pivots, 1)}, -1 if call.left else -2)


@rule("ldl_solve")
def ldl_solve(call):
    return _broadcast(("B", call.B), {"LD": (call.LD, 2), "pivots": (call.pivots, 1)}, -1)


@rule("sylvester_triangular")
def sylvester_triangular(call):
    for dim in batches(call.A):
        yield Shard(dim), {"A": Shard(dim), "B": Shard(dim), "C": Shard(dim)}


@rule("ormqr")
def ormqr(call):
    factors = {"input": (call.input, 2), "tau": (call.tau, 1)}
    return _broadcast(("other", call.other), factors, -1 if call.left else -2)


@rule("solve_ex")
def solve_ex(call):
    for dim in batches(call.A):
        factors = _if(call.factors, dim)
        yield (Shard(dim), factors, factors, Shard(dim)), {"A": Shard(dim), "B": Shard(dim)}
    solution = Shard(call.B.ndim - (1 if call.left else 2))
    yield (solution, Replicate(), Replicate(), Replicate()), {"B": solution}
    yield (Partial(), Replicate(), Replicate(), Replicate()), {"B": Partial()}


@rule("syrk")
def syrk(call):
    for place in range(call.A.ndim - 2):
        inputs = {"A": aligned(call.A, 2, place)}
        if call.C is not None:
            inputs["C"] = aligned(call.C, 2, place)
        yield Shard(call.A.ndim - 3 - place), inputs
    # The terms of the product's sums.
    inputs = {"A": Shard(call.A.ndim - (2 if call.transpose else 1))}
    yield Partial(), inputs | ({"C": Partial()} if call.C is not None else {})
