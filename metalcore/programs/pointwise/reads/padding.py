"""Padding, and nearest upsampling."""

from __future__ import annotations

import torch

from ..nodes import fake, plain, result_dtype
from ..numbers import Unsupported, literal
from .table import plus, reads, within


@reads("constant_pad_nd", "pad")
@reads(*(f"{name}_pad{n}d" for name in ("reflection", "replication") for n in (1, 2, 3)))
def _pad(lowering, node, arguments, at):
    source, name = node.args[0], node.target.overloadpacket.__name__
    shape, dtype = fake(source).shape, result_dtype(node)
    pads = arguments["pad"] if "pad" in arguments else arguments["padding"]
    mode = arguments.get("mode") or {"reflection": "reflect", "replication": "replicate"}.get(
        name.split("_")[0], "constant"
    )
    made, inside = list(at), []
    for k in range(len(pads) // 2):
        d, left, right = len(shape) - 1 - k, plain(pads[2 * k]), plain(pads[2 * k + 1])
        if left == right == 0:
            continue
        size, place = shape[d], plus(lowering, at[d], -left)  # pyright: ignore[reportArgumentType]
        if mode == "constant":
            inside.append(within(place, size)) if left > 0 or right > 0 else None  # pyright: ignore[reportOperatorIssue]
        elif mode == "replicate":
            place = lowering.index(f"min(max({place}, 0), {size - 1})")
        elif mode == "reflect":
            place = lowering.index(f"{size - 1} - abs({size - 1} - abs({place}))")
        elif mode == "circular":
            place = lowering.index(f"int(uint({place} + {size}) % {size}u)")
        else:
            raise Unsupported(f"padding of mode {mode!r}")
        made[d] = place
    if not inside:
        return lowering.value(source, tuple(made)).text
    filling = lowering.operand(arguments.get("value") or 0, dtype)
    return lowering.when(" && ".join(inside), dtype, filling, lambda: lowering.value(source, tuple(made)).text)


def _nearest(lowering, node, arguments, at):
    source, exact = node.args[0], "exact" in node.target.overloadpacket.__name__
    spatial = len(at) - 2
    scales = arguments.get("scale_factors") or [
        arguments.get(name)
        for name in {1: ("scales",), 2: ("scales_h", "scales_w")}.get(spatial, ("scales_d", "scales_h", "scales_w"))
    ]
    made = list(at)
    for d, scale in zip(range(2, len(at)), scales):
        size, new = fake(source).shape[d], fake(node).shape[d]
        step = literal(1.0 / scale if scale else size / new, torch.float32)
        place = f"(float({at[d]}) + 0.5f) * {step}" if exact else f"float({at[d]}) * {step}"
        made[d] = (
            lowering.index(f"min(int(floor({place})), {size - 1})")
            if size != new or scale not in (None, 1.0)
            else at[d]
        )
    return lowering.value(source, tuple(made)).text


for _n in (1, 2, 3):
    for _overload in ("default", "vec"):
        reads(f"upsample_nearest{_n}d.{_overload}", f"_upsample_nearest_exact{_n}d.{_overload}")(_nearest)
