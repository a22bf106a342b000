"""What is known from coordinates alone."""

from __future__ import annotations

import torch

from ..nodes import plain, result_dtype
from ..numbers import Unsupported, converted, kind, literal, register
from .table import reads, zero


@reads("arange", "arange.start", "arange.start_step", "prims.iota")
def _arange(lowering, node, arguments, at):
    dtype = result_dtype(node)
    start, step = plain(arguments.get("start", 0)), plain(arguments.get("step", 1))
    if kind(dtype) == "f":
        text = f"{literal(start, torch.float32)} + float({at[0]}) * {literal(step, torch.float32)}"  # pyright: ignore[reportArgumentType]
        return lowering.rounded(text, dtype, dtype).text
    if not all(isinstance(number, int) for number in (start, step)):
        raise Unsupported("whole numbers in steps that are none")
    text = f"{literal(start, torch.int64)} + long({at[0]}) * {literal(step, torch.int64)}"  # pyright: ignore[reportArgumentType]
    return lowering.statement(register(dtype), converted(text, torch.int64, dtype))


@reads("eye", "eye.m")
def _eye(lowering, node, arguments, at):
    dtype = result_dtype(node)
    return lowering.statement(register(dtype), f"{at[0]} == {at[1]} ? {literal(1, dtype)} : {zero(dtype)}")
