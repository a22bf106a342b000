"""Packed weights run on shards of rows: of the inputs, of the weight's outputs, of indices."""

from __future__ import annotations

from ._rule import Partial, Shard, others, rule


@rule("quantize")
def quantize(call):
    for dim in others(call.numbers, -1):
        yield (Shard(dim), Partial()), {"numbers": Shard(dim)}  # a number that is not 0 if some rank's is not


@rule("quant_rows")
def quant_rows(call):
    if call.rows is None:
        for dim in others(call.packed, -1):
            yield Shard(dim), {"packed": Shard(dim)}
    else:
        for dim in others(call.rows):
            yield Shard(dim), {"rows": Shard(dim)}


def _products(call, weights):
    """Yields the placements of products with weights, whose tensors of these names have the weights' rows first."""
    last = call.x.ndim - 1
    for dim in others(call.x, -1):
        yield Shard(dim), {"x": Shard(dim)}
    if call.transposed:  # the weight's rows are the terms of the sums
        yield Partial(), {"x": Shard(last), **dict.fromkeys(weights, Shard(0))}
    else:
        yield Shard(last), dict.fromkeys(weights, Shard(0))
    yield Partial(), {"x": Partial()}


@rule("quant_matmul")
def quant_matmul(call):
    return _products(call, ("packed",))


@rule("quant_matmul_experts")
def quant_matmul_experts(call):
    if call.x.ndim == call.experts.ndim + 1 and call.x.shape[0] == call.experts.shape[0]:
        yield Shard(0), {"x": Shard(0), "experts": Shard(0)}
    if not call.transposed:
        yield Shard(call.experts.ndim), {"packed": Shard(1)}


@rule("blockwise_matmul", "scaled_matmul")
def matmul_of_blocks(call):
    for dim in others(call.x, -1):  # blocks, or the numbers of a scale, stay whole
        yield Shard(dim), {"x": Shard(dim)}
    yield Partial(), {"x": Partial()}


@rule("quantize_blockwise", "dequantize_blockwise", "scaled_quantize")
def blocks(call):
    return iter(())  # shards of numbers are no shards of blocks


_AFFINE = ("packed", "scales", "offsets")


@rule("affine_rows")
def affine_rows(call):
    if call.rows is None:
        yield Shard(0), dict.fromkeys(_AFFINE, Shard(0))
    else:
        for dim in others(call.rows):
            yield Shard(dim), {"rows": Shard(dim)}


@rule("affine_matmul")
def affine_matmul(call):
    return _products(call, _AFFINE)


@rule("scaled_rows")
def scaled_rows(call):
    if call.rows is not None:  # scales are of several rows, which stay together
        for dim in others(call.rows):
            yield Shard(dim), {"rows": Shard(dim)}


@rule("affine_matmul_experts", "scaled_matmul_experts")
def matmul_experts(call):
    if call.x.shape[0] == call.experts.shape[0]:
        yield Shard(0), {"x": Shard(0), "experts": Shard(0)}
