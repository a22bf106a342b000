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
from .passes.folding import Recipe, fold_constants, pack_weights
from .passes.functional import make_functional, write_at_end
from .patterns import choose
from .program import Program, finish
from .rewriting import Pattern, Rewritten, rewrite
from .source import Source, program_device
from .targets import Target, TargetError, check, target_of
from .targets.padding import pad_channels
from .targets.target import check_static
from .tracing import Traced, trace

__all__ = ["compile", "optimize", "source_of"]


def compile(
    program: torch.nn.Module | torch.export.ExportedProgram,
    args: tuple = (),
    kwargs: dict[str, Any] | None = None,
    *,
    dtype: torch.dtype | None = None,
    fusions: Sequence[str] | None = None,
    memory: str = "arena",
    target: Target | None = None,
) -> Program:
    """Makes a program for inference of a module, for arguments like these.

    Parameters are part of the program: what depends on them alone is computed now, and batch norms are folded into
    convolutions. Parameters that the module gets later do not count, except where they are changed in place.

    Args:
        program: a module, or what torch.export.export returned for one.
        args, kwargs: examples of the arguments, for a module. A program is for their shapes, dtypes and devices.
        dtype: convert a copy of the module, and floating-point arguments, to this dtype first.
        fusions: the names of the patterns to apply; all by default, or those of the target, none if empty.
        memory: "arena" or "allocator", as in `Options`.
        target: what the program has to fit, one of `metalcore.programs.targets` or another `Target`. Channels are
            padded as it asks. By default nothing is asked for.

    Returns:
        A `Program`. It computes without gradients.

    Raises:
        TypeError: the program is no module, but a function.
        ValueError, TypeError: an option has a value that it cannot have, or `dtype` is given with an exported program.
        RuntimeError: the module cannot be exported, or its shapes are dynamic.
        TargetError: the program does not fit its target; the message has each place, why, and what would help.

    Example:
        >>> model, x = torch.nn.Linear(4, 3, device="mps").eval(), torch.ones(2, 4, device="mps")
        >>> program = metalcore.compile(model, (x,))
        >>> torch.equal(program(x), model(x))
        True
    """
    if not isinstance(program, (torch.nn.Module, torch.export.ExportedProgram)):
        raise TypeError(
            f"metalcore.compile takes a torch.nn.Module or what torch.export.export returned, not {program!r}; "
            "torch.compile(…, backend='metalcore') takes functions, and a module's forward() may call one"
        )
    if target is not None and not isinstance(target, Target):
        raise TypeError(f"target must be one of metalcore.programs.targets, not {target!r}")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype must be a floating-point torch.dtype, not {dtype!r}")
    if fusions is None and target is not None:
        fusions = target.fusions
    options = Options(fusions=fusions, memory=memory, fallback=False)
    if dtype is not None:
        if not isinstance(program, torch.nn.Module):
            raise ValueError("dtype is for modules: convert the module before it is exported")
        program = copy.deepcopy(program).to(dtype)
        args, kwargs = tree_map(lambda thing: _converted(thing, dtype), (args, kwargs or {}))
    if target is not None and isinstance(program, torch.export.ExportedProgram):
        _refuse(check_static(program, target), target)
    traced = trace(program, args, kwargs)
    by_name = options.fusions is not None
    with torch.no_grad():
        fused, recipe = optimize(traced.module, choose(options.fusions), constants=True, by_name=by_name, target=target)
        source = source_of(traced, recipe, options, fused, target)
        result = finish(traced.module, options, fused, source=source)
    if target is not None:
        _refuse(check(source.graph, result.report().steps, target), target)
    return result


def _refuse(violations, target):
    if violations:
        raise TargetError(target, violations)


def source_of(
    traced: Traced,
    recipe: Recipe | None,
    options: Options,
    fused: Sequence[Rewritten],
    target: Target | None = None,
) -> Source:
    """Returns what a program of a traced and optimized graph is made from."""
    specs = traced.in_spec, traced.out_spec
    name = (target or target_of(program_device(traced.module.graph))).name
    return Source.of(traced.module, recipe, traced.state, options, tuple(fused), specs, name)


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
    target: Target | None = None,
) -> tuple[list[Rewritten], Recipe | None]:
    """Cleans a traced graph, folds constants if its parameters are `constants`, and applies patterns. Channels are
    padded for a target. Autograd will differentiate it with respect to the `leaves`, some of its inputs.

    Returns:
        Where patterns were applied, and how constants were folded.
    """
    make_functional(module)
    clean(module, differentiable=not constants)
    if constants and write_at_end(module):
        clean(module)
    fused = rewrite(module, [p for p in patterns if constants or not p.needs_constants], limit, leaves, by_name)
    if target is not None:
        pad_channels(module, target)
    if constants:
        pack_weights(module)
    recipe = fold_constants(module) if constants else None
    clean(module, differentiable=not constants)
    module.recompile()
    return fused, recipe
