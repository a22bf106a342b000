"""Statements of one element as stages that compute four, between which four numbers at once are rounded to 16 bits: a
GPU that converts several numbers by one instruction does so where they are converted as a vector.

Sums, differences and products of two numbers of 16 bits are those of their type. float32 has enough bits for the exact
result, or for one that rounds to the same number, so that a rounding follows to the same bits; a GPU that computes two
such numbers by one instruction needs no conversions then.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

WIDTH = 4
_DTYPES = {"half": torch.float16, "bfloat": torch.bfloat16}
_NAME = re.compile(r"\bv\d+\b")
_STATEMENT = re.compile(r"const (\w+) (v\d+) = (.*);")


class Rounding(NamedTuple):
    """What is rounded: a register, and the type in memory that it is rounded to."""

    before: str
    type: str


class Pair(NamedTuple):
    """A sum, difference or product of numbers of 16 bits.

    Attributes:
        text: of four results, with {} for each operand that is a register.
        registers: these operands, which are rounded.
    """

    text: str
    registers: tuple[str, ...]


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
    """Returns whether each statement is a register's. Others have to stay where they are."""
    return all(_STATEMENT.fullmatch(statement) for statement in statements)


def staged(
    statements: Sequence[str], roundings: Mapping[str, Rounding], stored: Sequence[Stored], rows: int = 1
) -> list[str]:
    """Returns the statements for element k of four, in loops over k.

    Args:
        statements: they compute one element, with j as its place in a thread's vector.
        roundings: by the register that has the result.
        rows: that a thread computes, each stage for all of them. Statements have r for their number. One row after the
            other, a compiler would move the second one's loads behind the first one's computation.
    """
    matches = filter(None, map(_STATEMENT.fullmatch, statements))
    registers = {match[2]: (match[1], match[3]) for match in matches}
    whole = [store for store in stored if store.part and store.register in registers]
    single = [store.element for store in stored if store not in whole]
    pairs = {name: _pair(registers[of.before][1], of.type, roundings) for name, of in roundings.items()}
    stored_pairs = {store.part: _pair(registers[store.register][1], store.type, roundings) for store in whole}

    def operands(pair, register):
        return pair.registers if pair else (register,)

    def uses(name):
        if name in roundings:
            return operands(pairs[name], roundings[name].before)
        return _NAME.findall(registers[name][1])

    in_single = [name for text in single for name in _NAME.findall(text)]
    in_whole = [name for store in whole for name in operands(stored_pairs[store.part], store.register)]
    needed = _needed(registers, uses, [*in_single, *in_whole])
    stages = _stages(roundings, pairs, uses, needed)
    last = max(stages.values(), default=0)

    survivors = {store.register for store in whole if not stored_pairs[store.part]}
    survivors |= {name for name in in_single if stages[name] < last or name in roundings}
    for name in needed:
        if name not in roundings:
            survivors |= {used for used in uses(name) if stages[used] < stages[name] or used in roundings}
        elif not pairs[name]:
            survivors.add(roundings[name].before)
    # Roundings that pairs take as they are.
    chosen = [pairs[name] for name in needed if name in roundings] + list(stored_pairs.values())
    narrow = {name for pair in chosen if pair for name in pair.registers}
    row = "[r]" if rows > 1 else ""

    def held(name):
        return f"{name}s{row}"

    def held_narrow(name):
        return f"{name}_{roundings[name].type}s{row}"

    def named(text):
        return _NAME.sub(lambda match: f"{held(match[0])}[k]" if match[0] in survivors else match[0], text)

    def each_row(lines):
        return loop("r", rows, lines) if row and lines else lines

    def rounded(pair, register, type_):
        if pair:
            return pair.text.format(*map(held_narrow, pair.registers))
        return f"vec<{type_}, {WIDTH}>({held(register)})"

    size = f"[{rows}]" if row else ""
    lines = [f"vec<{registers[name][0]}, {WIDTH}> {name}s{size};" for name in needed if name in survivors]
    lines += [
        f"vec<{roundings[name].type}, {WIDTH}> {name}_{roundings[name].type}s{size};"
        for name in needed
        if name in narrow
    ]
    for stage in range(last + 1):
        whole_rounded, body = [], []
        for name in (name for name in needed if stages[name] == stage):
            type_, text = registers[name]
            if of := roundings.get(name):
                rounded_text = rounded(pairs[name], of.before, of.type)
                if name in narrow:
                    whole_rounded.append(f"{held_narrow(name)} = {rounded_text};")
                    rounded_text = held_narrow(name)
                if name in survivors:
                    whole_rounded.append(f"{held(name)} = float{WIDTH}({rounded_text});")
            else:
                body.append(f"{f'{held(name)}[k]' if name in survivors else f'const {type_} {name}'} = {named(text)};")
        lines += each_row(whole_rounded)
        body += [named(text) for text in single] if stage == last else []
        if body:
            uses_place = any(re.search(r"\bj\b", line) for line in body)
            place = [f"const uint j = part * {WIDTH} + k;"] if uses_place else []
            lines += each_row(loop("k", WIDTH, [*place, *body]))
    stores = [f"{store.part} = {rounded(stored_pairs[store.part], store.register, store.type)};" for store in whole]
    return lines + each_row(stores)


def loop(name: str, count: int, lines: Sequence[str]) -> list[str]:
    head = f"for (uint {name} = 0; {name} < {count}; ++{name}) {{"
    return ["#pragma unroll", head, *(line if line.startswith("#") else f"  {line}" for line in lines), "}"]


def _needed(registers, uses, wanted):
    """Returns the registers that some need, in order."""
    names, left = set(), list(wanted)
    while left:
        name = left.pop()
        if name not in names:
            names.add(name)
            left += uses(name)
    return [name for name in registers if name in names]


def _stages(roundings, pairs, uses, needed):
    """Returns the stage in which each register is computed. What is computed before it is rounded is in the stage
    before."""
    stages: dict[str, int] = {}
    for name in needed:
        after_one = name in roundings and not pairs[name]
        stages[name] = max((stages[used] for used in uses(name)), default=0) + after_one
    return stages


_PAIR = re.compile(r"(.+) ([-+*]) (.+)")
_LOADED = re.compile(r"float\((as_type<vec<(\w+), 4>>\(\w+(?:\[r\])?\.words\[)j / 4(\]\))\[j % 4\]\)")
_LITERAL = re.compile(r"\(?(-?\d[\d.e+-]*)f\)?")


def _pair(text, type_, roundings):
    """Returns what a register's text is as a Pair of a type, or None."""
    if not (match := _PAIR.fullmatch(text)):
        return None
    left, right = (_narrow_operand(operand, type_, roundings) for operand in (match[1], match[3]))
    if left is None or right is None:
        return None
    return Pair(f"{left} {match[2]} {right}", tuple(name for name in (match[1], match[3]) if name in roundings))


def _narrow_operand(text, type_, roundings):
    """Returns four operands of 16 bits: of a register "{}", or None for what has more bits or another type."""
    if text in roundings:
        return "{}" if roundings[text].type == type_ else None
    if match := _LOADED.fullmatch(text):
        return f"{match[1]}part{match[3]}" if match[2] == type_ else None
    if match := _LITERAL.fullmatch(text):
        number = torch.tensor(float(match[1]))
        if number.to(_DTYPES[type_]) == number:
            return f"vec<{type_}, {WIDTH}>({type_}({text}))"
    return None
