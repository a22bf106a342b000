"""How a rule of an operator is written, and how DTensor comes to know it.

A rule says how an operator can run on the shards of its tensors, for one dimension of a device mesh. It is a generator
that yields, for a call with the arguments `call.<name>`, what the outputs are if the inputs are so:

    @rule("softmax", "log_softmax")
    def rows(call):
        for dim in others(call.x, call.dim):
            yield Shard(dim), {"x": Shard(dim)}

Tensors that are not named are replicated, and everything replicated is always allowed. DTensor chooses among what it
is given by what redistribution costs, for each dimension of the mesh. Inputs that fit nothing are redistributed. A
tensor argument that the operator writes to is never redistributed: the call is an error instead.

These are the strategies of torch.distributed.tensor.experimental.register_sharding. Its own decorator is not used
because it caches a decision by the integers among a call's arguments, and forgets the strings and bools, on which ours
depend (the mode of qr).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy, RuntimeSchemaInfo, TupleStrategy
from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy

__all__ = ["RULES", "Partial", "Replicate", "Shard", "aligned", "batches", "others", "refused", "register", "rule"]

# By operator's name: the function of the rule.
RULES: dict[str, Callable] = {}
_LISTS: set[str] = set()


def rule(*operators: str, lists: bool = False) -> Callable:
    """Registers the decorated generator as the rule of operators of metalcore.

    lists: the operators take lists of tensors. The rule is then a function from a call to the placements of each
        argument's tensors on the whole mesh: see optim.py.
    """

    def decorate(function: Callable) -> Callable:
        for operator in operators:
            if operator in RULES:
                raise ValueError(f"metalcore::{operator} has a rule already")
            RULES[operator] = function
            if lists:
                _LISTS.add(operator)
        return function

    return decorate


def refused(*operators: str, because: str) -> None:
    """Gives operators a rule that raises: those that DTensor cannot run on shards at all."""

    def refuse(call):
        raise NotImplementedError(f"{call.operator} takes no DTensors: {because}")

    rule(*operators)(refuse)


def others(x: Any, *dims: int) -> list[int]:
    """Returns the dimensions of x except these."""
    return [dim for dim in range(x.ndim) if dim not in [each % max(x.ndim, 1) for each in dims]]


def batches(x: Any, inner: int = 2) -> range:
    """Returns the dimensions of x in front of the last `inner` ones."""
    return range(max(x.ndim - inner, 0))


def aligned(x: Any, inner: int, from_right: int) -> Shard | Replicate:
    """Returns the sharding of one tensor among those that are broadcast: of the batch dimension that is `from_right`
    places before the last batch dimension. Where x has it not, or of size 1, x is replicated."""
    dim = x.ndim - inner - 1 - from_right
    return Shard(dim) if dim >= 0 and x.shape[dim] > 1 else Replicate()


def register() -> None:
    """Makes the rules known to DTensor."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    for name, function in RULES.items():
        operator = getattr(torch.ops.metalcore, name).default
        strategy = _of_lists if name in _LISTS else _of_tensors
        # The decision depends on all positional arguments. Keyword arguments are optimizers' numbers.
        info = RuntimeSchemaInfo(0, None, needs_pytree=True)
        propagator.register_op_strategy(operator, _bound(strategy, function, operator), info)


def _bound(strategy, function, operator):
    schema = operator._schema
    names = [argument.name for argument in schema.arguments]
    written = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}

    def of(op_schema: OpSchema):
        arguments = dict(zip(names, op_schema.args_schema)) | op_schema.kwargs_schema
        return strategy(function, op_schema, {name: arguments.get(name) for name in names}, written)

    return of


def _of_tensors(function, op_schema, arguments, written):
    tensors = [name for name, value in arguments.items() if isinstance(value, OpStrategy)]
    specs = {name: arguments[name].strategies[0].output_spec for name in tensors}
    results = len(op_schema.op._schema.returns)
    call = SimpleNamespace(**{**arguments, **specs, "operator": str(op_schema.op)})
    placements = [[Replicate()] * (results + len(tensors))]
    for outputs, inputs in function(call):
        outputs = list(outputs) if isinstance(outputs, tuple) else [outputs] * results
        placements.append(outputs + [inputs.get(name, Replicate()) for name in tensors])
    strategy = expand_to_full_mesh_op_strategy(
        op_schema.get_mesh_from_args(),
        op_schema,
        placements,  # pyright: ignore[reportArgumentType]
        input_index=results,
        inplace_op=op_schema.is_inplace_op(),
    )
    kept = [place for place, name in enumerate(tensors) if name in written]
    allowed = [
        spec
        for spec in strategy.strategies
        if all(spec.input_specs[place].placements == specs[tensors[place]].placements for place in kept)  # pyright: ignore[reportOptionalSubscript]
    ]
    if not allowed:
        raise RuntimeError(
            f"{op_schema.op} cannot write to its arguments as they are placed: "
            + ", ".join(f"{name} {specs[name].placements}" for name in tensors)
        )
    return OpStrategy(allowed)


def _of_lists(function, op_schema, arguments, written):
    lists = {name: value for name, value in arguments.items() if isinstance(value, TupleStrategy) and value.children}
    specs = {name: [child.strategies[0].output_spec for child in value.children] for name, value in lists.items()}  # pyright: ignore[reportAttributeAccessIssue]
    call = SimpleNamespace(**{**arguments, **specs, "operator": str(op_schema.op)})
    output, wanted = function(call, specs)
    for name, placements in wanted.items():
        for spec, each in zip(specs[name], placements):
            # Gradients are written only to divide them by a scale.
            if name in written and name != "grads" and spec.placements != tuple(each):
                raise RuntimeError(
                    f"{op_schema.op} cannot write to {name} placed {spec.placements}: it must be {tuple(each)}"
                )
    specs_of = {
        name: [DTensorSpec(spec.mesh, tuple(each), tensor_meta=spec.tensor_meta) for spec, each in zip(specs[name], p)]
        for name, p in wanted.items()
    }
    if output is not None:
        first = next(iter(specs.values()))[0]
        inputs = [spec for name in lists for spec in specs_of[name]]
        made_output = DTensorSpec(first.mesh, tuple(output))
        return OpStrategy([OpSpec(made_output, input_specs=inputs, redistribute_cost=[[0.0] for _ in inputs])])
    singles = {name: of.strategies[0].output_spec for name, of in arguments.items() if isinstance(of, OpStrategy)}
    replicated = {
        name: DTensorSpec(spec.mesh, (Replicate(),) * spec.mesh.ndim, tensor_meta=spec.tensor_meta)
        for name, spec in singles.items()
    }
    children = []
    for index in range(len(next(iter(specs.values())))):
        names = [name for name in arguments if name in specs_of | singles]
        inputs = [specs_of[name][index] if name in lists else replicated[name] for name in names]
        children.append(OpStrategy([OpSpec(None, input_specs=inputs, redistribute_cost=[[0.0] for _ in inputs])]))
    return TupleStrategy(tuple(children))


Call = SimpleNamespace
Rule = Callable[[Call], Iterator[tuple]]
