"""Products of matrices run on shards of rows, of columns, of terms (which makes partial sums) and of the batch."""

from __future__ import annotations

from ._rule import Partial, Shard, aligned, rule


@rule("matmul")
def matmul(call):
    a, b = call.a, call.b
    dims = max(a.ndim, b.ndim)
    rows, columns = Shard(dims - 2), Shard(dims - 1)
    yield rows, {"a": Shard(a.ndim - 2), "residual": rows}
    yield columns, {"b": Shard(b.ndim - 1), "bias": Shard(0), "residual": columns}
    for dim in range(dims - 2):
        right = dims - 3 - dim
        yield Shard(dim), {"a": aligned(a, 2, right), "b": aligned(b, 2, right), "residual": Shard(dim)}
    if call.activation == "none":
        yield Partial(), {"a": Shard(a.ndim - 1), "b": Shard(b.ndim - 2), "bias": Partial(), "residual": Partial()}


# One row, which every rank has. Columns of several matrices lie one behind the other, unless a gate joins two of them.
@rule("joined_linear")
def joined_linear(call):
    if call.b is None or call.gate != "none":
        columns = Shard(call.x.ndim - 1)
        inputs = {name: Shard(0) for name in ("a", "b", "bias_a", "bias_b")}
        yield columns, {**inputs, "residual": columns}


# Groups begin at any place of the dimension that they share, which stays whole.
@rule("grouped_gemm")
def grouped_gemm(call):
    columns = Shard(1 if call.b.ndim == 3 else 2)
    yield columns, {"b": Shard(call.b.ndim - 1)}
    if call.b.ndim == 3:
        yield Partial(), {"a": Shard(1), "b": Shard(1)}
    else:
        yield Shard(1), {"a": Shard(0)}
    yield Partial(), {"a": Partial()}
    yield Partial(), {"b": Partial()}
