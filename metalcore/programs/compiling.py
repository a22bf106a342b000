"""metalcore.compile: a module or an exported program becomes a Program for inference."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_map

from .options import Options
from .passes.clean import clean
from .passes.folding import fold_constants
from .passes.functional import make_functional
from .passes.packing import pack_weights
from .patterns import choose
from .program import Program, finish
from .rewriting import Pattern, Rewritten, rewrite
from .tracing import trace

__all__ = ["compile", "optimize"]


def compile(
    program: torch.nn.Module | torch.export.ExportedProgram,
    args: tuple = (),
    kwargs: dict[str, Any] | None = None,
    *,
    dtype: torch.dtype | None = None,
    fusions: Sequence[str] | None = None,
    memory: str = "arena",
) -> Program:
    """Makes a program for inference of a module, for arguments like these.

    Parameters are part of the program: what depends on them alone is computed now, and batch norms are folded into
    convolutions. Parameters that the module gets later do not count, except where they are changed in place.

    Args:
        program: a module, or what torch.export.export returned for one.
        args, kwargs: examples of the arguments, for a module. A program is for their shapes, dtypes and devices.
        dtype: convert a copy of the module, and floating-point arguments, to this dtype first.
        fusions: the names of the patterns to apply; all by default, none if empty.
        memory: "arena" or "allocator", as in `Options`.

    Returns:
        A `Program`. It computes without gradients.

    Raises:
        ValueError, TypeError: an option has a value that it cannot have, or `dtype` is given with an exported program.
        RuntimeError: the module cannot be exported, or its shapes are dynamic.
    """
    options = Options(fusions=fusions, memory=memory, fallback=False)
    if dtype is not None:
        if not isinstance(program, torch.nn.Module):
            raise ValueError("dtype is for modules: convert the module before it is exported")
        program = copy.deepcopy(program).to(dtype)
        args, kwargs = tree_map(lambda thing: _converted(thing, dtype), (args, kwargs or {}))
    traced = trace(program, args, kwargs)
    with torch.no_grad():
        fused = optimize(traced.module, choose(options.fusions), constants=True, by_name=options.fusions is not None)
        return finish(traced.module, options, fused, specs=(traced.in_spec, traced.out_spec))


def _converted(thing, dtype):
    return thing.to(dtype) if isinstance(thing, Tensor) and thing.is_floating_point() else thing


def optimize(
    module: GraphModule,
    patterns: Sequence[Pattern],
    *,
    constants: bool,
    leaves: Collection[Node] = (),
    by_name: bool = False,
    limit: dict[str, int] | None = None,
) -> list[Rewritten]:
    """Cleans a traced graph, folds constants if its parameters are `constants`, and applies patterns. Autograd will
    differentiate it with respect to the `leaves`, some of its inputs."""
    make_functional(module)
    clean(module, differentiable=not constants)
    fused = rewrite(module, [p for p in patterns if constants or not p.needs_constants], limit, leaves, by_name)
    if constants:
        pack_weights(module)
        fold_constants(module)
    clean(module, differentiable=not constants)
    module.recompile()
    return fused
