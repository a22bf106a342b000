"""Right matrices of products whose elements PTX has just read from threadgroup memory, for joined_products.py.

A lane reads two elements of a row, and tensor cores want two of a column. Where they come from is known: each lane's
address does not change in the loop around the product, and the elements are at fixed distances from it. So the lanes
exchange their addresses once, before the loop, and then read what tensor cores want, instead of exchanging what they
read in each turn.
"""

import collections
import re

_LABEL = re.compile(r"(\$\w+):$")
_BRANCH = re.compile(r"(?:@!?%p\d+\s+)?bra(?:\.\w+)*\s+(\$\w+);$")
_LEAVES = re.compile(r"(?:bra|brx|ret|exit|trap)\b")  # always: nothing after it is next
_TARGET = re.compile(r"(?:@!?%p\d+\s+)?[\w.]+\s+(\{[^}]*\}|[^,{;]+)")
_REGISTER = re.compile(r"%[a-z]+\d+")
_ELEMENT = re.compile(r"ld\.shared\.[ubs]16$")
_TWO_ELEMENTS = re.compile(r"ld\.shared\.(?:v2\.[ubs]16|[ubs]32)$")
_ADDRESS = re.compile(r"\[(%rd\d+)(?:\+(-?\d+))?\]$")
_PAIR = re.compile(r"\{(%\w+), (%\w+)\}$")
_WRITES = {"st", "atom", "red", "cp", "stmatrix"}

# Element 0 of a row and how far its element 1 is, in bytes.
Place = collections.namedtuple("Place", "base offset distance")


class Loops:
    """The loops of a function's body that lanes enter by their first line alone, and registers that are set once."""

    def __init__(self, body):
        lines = [line.strip() for line in body]
        labels = {match[1]: i for i, line in enumerate(lines) if (match := _LABEL.match(line))}
        self._first = set()
        if not any(line.startswith("brx") or " brx" in line for line in lines):
            to = collections.defaultdict(list)
            for i, line in enumerate(lines):
                if match := _BRANCH.match(line):
                    to[match[1]].append(i)
            self._first = {
                at for name, at in labels.items() if to[name] and min(to[name]) > at and not _always_leaves(lines[:at])
            }
        written = collections.defaultdict(list)
        for i, line in enumerate(lines):
            if (match := _TARGET.match(line)) and "[" not in match[1]:
                for register in _REGISTER.findall(match[1]):
                    written[register].append(i if not line.startswith("@") else None)
        self._set = {register: at[0] for register, at in written.items() if len(at) == 1 and at[0] is not None}

    def begins(self, line):
        """Returns whether a loop begins at this line of the body."""
        return line in self._first

    def is_set_before(self, register, line):
        return self._set.get(register, line) < line


def _always_leaves(lines):
    last = next((line for line in reversed(lines) if line and not line.startswith("//")), "")
    return bool(_LEAVES.match(last))


class SharedColumns:
    """What registers hold of threadgroup memory, as far as nothing may have been written to it since."""

    def __init__(self):
        self._elements = {}  # register of an element -> (base, offset)
        self._rows = {}  # register of two elements -> Place

    def forget(self):
        self._elements.clear()
        self._rows.clear()

    def note(self, condition, opcode, target, operands):
        """Notes what an instruction, as joined_products takes it apart, changes."""
        if "[" in target or opcode.split(".")[0] in _WRITES:
            self.forget()
            return
        names = _REGISTER.findall(target)
        elements, address = [], _ADDRESS.match(operands)
        if not condition and address:
            base, offset = address[1], int(address[2] or 0)
            if base not in names and _ELEMENT.match(opcode):
                elements = [(base, offset)]
            elif base not in names and _TWO_ELEMENTS.match(opcode):
                elements = [(base, offset), (base, offset + 2)]
        pair = _PAIR.match(operands) if opcode == "mov.b32" and not condition else None
        row: list = [self._elements.get(name) for name in pair.groups()] if pair else []
        for name in names:
            self._drop(name)
        if len(names) == len(elements):
            self._elements |= zip(names, elements)
        elif elements:
            self._rows[names[0]] = _place(*elements)
        if len(row) == 2 and all(row) and row[0][0] == row[1][0]:
            self._rows[names[0]] = _place(*row)

    def place(self, register):
        """Returns the Place of the two elements that a register holds, or None."""
        return self._rows.get(register)

    def _drop(self, register):
        for kept in (self._elements, self._rows):
            kept.pop(register, None)
            for name in [name for name, place in kept.items() if place[0] == register]:
                del kept[name]


def _place(first, second):
    return Place(first[0], first[1], second[1] - first[1])
