"""Statements of one element as stages that compute four, between which four numbers at once are rounded to 16 bits: a
GPU that converts several numbers by one instruction does so where they are converted as a vector."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

WIDTH = 4
_NAME = re.compile(r"\bv\d+\b")
_STATEMENT = re.compile(r"const (\w+) (v\d+) = (.*);")


class Rounding(NamedTuple):
    """What is rounded: a register, and the type in memory that it is rounded to."""

    before: str
    type: str


class Stored(NamedTuple):
    """An element of a vector's part that is stored.

    Attributes:
        part: the text of the part that the four elements are, or "" where they are converted one by one.
        type: in memory.
        register: what is converted to that type.
        element: the statement that converts an element.
    """

    part: str
    type: str
    register: str
    element: str


def can_be_staged(statements: Sequence[str]) -> bool:
    """Whether each statement is a register's. Others have to stay where they are."""
    return all(_STATEMENT.fullmatch(statement) for statement in statements)


def staged(
    statements: Sequence[str], roundings: Mapping[str, Rounding], stored: Sequence[Stored], rows: int = 1
) -> list[str]:
    """The statements for element k of four, in loops over k.

    Args:
        statements: they compute one element, with j as its place in a thread's vector.
        roundings: by the register that has the result.
        rows: that a thread computes, each stage for all of them. Statements have r for their number. One row after the
            other, a compiler would move the second one's loads behind the first one's computation.
    """
    found = filter(None, map(_STATEMENT.fullmatch, statements))
    registers = {match[2]: (match[1], match[3]) for match in found}
    whole = [store for store in stored if store.part and store.register in registers]
    single = [store.element for store in stored if store not in whole]
    needed = _needed(registers, roundings, [*(store.register for store in whole), *single])
    stages = _stages(registers, roundings, needed)
    last = max(stages.values(), default=0)
    kept = {store.register for store in whole}
    kept |= {name for text in single for name in _NAME.findall(text) if stages[name] < last}
    for name in needed:
        if name in roundings:
            kept |= {name, roundings[name].before}
        else:
            kept |= {used for used in _NAME.findall(registers[name][1]) if stages[used] < stages[name]}
    row = "[r]" if rows > 1 else ""

    def held(name):
        return f"{name}s{row}"

    def named(text):
        return _NAME.sub(lambda match: f"{held(match[0])}[k]" if match[0] in kept else match[0], text)

    def each_row(lines):
        return loop("r", rows, lines) if row and lines else lines

    size = f"[{rows}]" if row else ""
    lines = [f"vec<{registers[name][0]}, {WIDTH}> {name}s{size};" for name in needed if name in kept]
    for stage in range(last + 1):
        body, rounded = [], []
        for name in (name for name in needed if stages[name] == stage):
            type_, text = registers[name]
            if of := roundings.get(name):
                rounded.append(f"{held(name)} = float{WIDTH}(vec<{of.type}, {WIDTH}>({held(of.before)}));")
            else:
                body.append(f"{f'{held(name)}[k]' if name in kept else f'const {type_} {name}'} = {named(text)};")
        lines += each_row(rounded)
        body += [named(text) for text in single] if stage == last else []
        if body:
            uses_place = any(re.search(r"\bj\b", line) for line in body)
            place = [f"const uint j = part * {WIDTH} + k;"] if uses_place else []
            lines += each_row(loop("k", WIDTH, [*place, *body]))
    return lines + each_row([f"{store.part} = vec<{store.type}, {WIDTH}>({held(store.register)});" for store in whole])


def loop(name: str, count: int, lines: Sequence[str]) -> list[str]:
    head = f"for (uint {name} = 0; {name} < {count}; ++{name}) {{"
    return ["#pragma unroll", head, *(line if line.startswith("#") else f"  {line}" for line in lines), "}"]


def _needed(registers, roundings, texts):
    """The registers that some texts need, in order."""
    found, left = set(), [name for text in texts for name in _NAME.findall(text)]
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += [roundings[name].before] if name in roundings else _NAME.findall(registers[name][1])
    return [name for name in registers if name in found]


def _stages(registers, roundings, needed):
    """The stage in which each register is computed. What is rounded is rounded before the next one."""
    stages: dict[str, int] = {}
    for name in needed:
        if name in roundings:
            stages[name] = stages[roundings[name].before] + 1
        else:
            stages[name] = max((stages[used] for used in _NAME.findall(registers[name][1])), default=0)
    return stages
