"""Expressions that are compared with the nodes of a graph.

X, EPS = Value("x"), Number("eps")
SQUARE = Either(Call("pow", X, 2), Call("mul", X, X))
RMS = Product(X, Call("rsqrt", Sum(Call("mean", SQUARE, Number("dims"), True), EPS)))
match = RMS.match(node)       # a Match, or None
match["x"], match["eps"]
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.fx import Node

from .ir import arguments, name_of, value

__all__ = ["Call", "Cast", "Either", "Expression", "Match", "Number", "Product", "Sum", "Value", "find"]


class Match(dict):
    """What the names of an expression stand for.

    Attributes:
        nodes: the operations that the expression consists of, of which the first is the last to run.
    """

    def __init__(self, items=(), nodes=()):
        super().__init__(items)
        self.nodes: list[Node] = list(nodes)

    def copy(self) -> Match:
        return Match(self, self.nodes)

    def bind(self, name: str, thing: Any) -> Match | None:
        if name in self:
            return self if self[name] is thing or not isinstance(thing, Node) and self[name] == thing else None
        bound = self.copy()
        bound[name] = thing
        return bound

    def with_node(self, node: Node) -> Match:
        bound = self.copy()
        bound.nodes.append(node)
        return bound


class Expression:
    """What a node, or an argument, is compared with."""

    def match(self, thing: Any, match: Match | None = None) -> Match | None:
        return next(self.matches(thing, match or Match()), None)

    def matches(self, thing: Any, match: Match):
        """Yields all ways in which it stands for `thing`."""
        raise NotImplementedError


class Value(Expression):
    """Any node of a tensor. The same name stands for the same node."""

    def __init__(self, name: str):
        self.name = name

    def matches(self, thing, match):
        if not isinstance(thing, Node) or not isinstance(value(thing), Tensor):
            return
        if (bound := match.bind(self.name, thing)) is not None:
            yield bound


class Number(Expression):
    """Anything that is no node: a number, a list, None."""

    def __init__(self, name: str):
        self.name = name

    def matches(self, thing, match):
        if not isinstance(thing, Node) and (bound := match.bind(self.name, thing)) is not None:
            yield bound


class Call(Expression):
    """A call of an operator with these first arguments. All further arguments must have their defaults, except those
    that keywords give, which the operator must have."""

    def __init__(self, names: str, *args: Any, **more: Any):
        self.names, self.args, self.more = names.split(), args, more

    def matches(self, thing, match):
        if isinstance(thing, Node) and name_of(thing) in self.names:
            for args in self.orders(thing):
                if self._others_agree(thing):
                    yield from _all(self.args, args, match.with_node(thing))

    def orders(self, node):
        yield arguments(node)[: len(self.args)]

    def _others_agree(self, node):
        specs, things = node.target._schema.arguments, arguments(node)
        # Another overload may not have an option at all: `var` with `unbiased` has no `correction`.
        if len(specs) < len(self.args) or not self.more.keys() <= {spec.name for spec in specs}:
            return False
        for spec, argument in list(zip(specs, things))[len(self.args) :]:
            if argument != self.more.get(spec.name, spec.default_value):
                return False
        return True


class _Commutative(Call):
    def orders(self, node):
        first = arguments(node)[:2]
        yield first
        yield first[::-1]


class Sum(_Commutative):
    """The sum of two things, in any order. A factor (alpha) is none of it."""

    def __init__(self, a, b):
        super().__init__("add add_", a, b)


class Product(_Commutative):
    """The product of two things, in any order."""

    def __init__(self, a, b):
        super().__init__("mul mul_", a, b)


class Either(Expression):
    """One of several expressions."""

    def __init__(self, *expressions: Expression):
        self.expressions = expressions

    def matches(self, thing, match):
        for expression in self.expressions:
            yield from expression.matches(thing, match)


class Cast(Expression):
    """An expression whose value may be converted to other dtypes, or none."""

    def __init__(self, expression: Expression):
        self.expression = expression

    def matches(self, thing, match):
        yield from self.expression.matches(thing, match)
        if isinstance(thing, Node) and name_of(thing) in ("to", "_to_copy", "type_as", "float"):
            source = thing.args[0]
            if isinstance(source, Node) and source.meta["val"].device == thing.meta["val"].device:
                yield from self.matches(source, match.with_node(thing))


def find(expression: Any, thing: Any, match: Match):
    """Yields all ways in which an expression, or a plain value, stands for `thing`."""
    if isinstance(expression, Expression):
        yield from expression.matches(thing, match)
    elif isinstance(expression, (list, tuple)):
        if isinstance(thing, (list, tuple)) and len(thing) == len(expression):
            yield from _all(expression, thing, match)
    elif type(thing) is not Node and thing == expression:
        yield match


def _all(expressions, things, match):
    if not expressions:
        yield match
        return
    for extended in find(expressions[0], things[0], match):
        yield from _all(expressions[1:], things[1:], extended)
