"""Joins loads of four neighbouring 16-bit elements in NVRTC's PTX.

Programs that hold fragments of matrices in registers load a lane's elements one by one, since MSL promises no alignment
of more than one element. Here the loads of a block wait until one of their elements is used. Then one test decides for
all of them: where each four lie in 8 bytes that can be read at once, they are, and otherwise they are loaded as before.
This is done for elements that are used as pairs alone, as tensor cores take them. What is not understood stays as it
is.
"""

import re
from collections import Counter, defaultdict
from typing import NamedTuple

__all__ = ["widen_loads"]

_LOAD = re.compile(r"ld\.global(\.nc)?\.u16\s+(%rs\d+), \[(%rd\d+)(?:\+(-?\d+))?\];")
_PAIR = re.compile(r"mov\.b32 (%r\d+), \{(%rs\d+),\s*(%rs\d+)\};")
_WRITES = re.compile(r"(?:@!?%p\d+\s+)?[\w.]+\s+(\{[^}]*\}|[^,;]+)")  # what an instruction writes, or another operand
_REGISTER = re.compile(r"%[a-z]+\d+")
# Loads do not go past these: labels, branches, barriers and what writes memory.
_ENDS = re.compile(r"\$|[{}]|\.|@|bra|ret|exit|trap|call|bar|barrier|membar|fence|st\.|atom|red\.|cp\.")
_COUNT = 4  # elements of a load


class _Group(NamedTuple):
    """Four loads in a row.

    Attributes:
        loads: their lines.
        elements: the registers that they write.
        base: the register of the address, of whose first element `offset` is the distance in bytes.
    """

    loads: list
    elements: list
    base: str
    offset: int


def widen_loads(ptx):
    """Returns the PTX (bytes) with joined loads."""
    out, body = [], None
    for line in ptx.decode().split("\n"):
        if line == "}" and body is not None:
            out += _Body(body).lines()
            body = None
        if body is None:
            out.append(line)
            if line == "{":
                body = []
        else:
            body.append(line)
    return "\n".join(out).encode()


class _Body:
    """A function's body."""

    def __init__(self, lines):
        self._body, self._out = lines, []
        self._words = {}  # pair of elements -> register of both
        self._waiting = []  # groups
        self._joins = 0
        self._paired = _paired(lines)
        self._names = {}  # register of a pair -> that in its place
        written = Counter(register for line in lines for register in _written(line))
        self._once = {register for register, count in written.items() if count == 1}

    def lines(self):
        at = 0
        while at < len(self._body):
            line = self._body[at]
            text = line.strip()
            if group := self._group(at):
                self._waiting.append(group)
                at += _COUNT
                continue
            waiting = {element for group in self._waiting for element in group.elements}
            if waiting and (_ENDS.match(text) or waiting.intersection(_REGISTER.findall(text))):
                self._flush()
            pair = _PAIR.match(text)
            word = self._words.get(pair.groups()[1:]) if pair else None
            if pair and word and pair[1] in self._once:
                self._names[pair[1]] = word
            else:
                self._out.append(f"\tmov.b32 {pair[1]}, {word};" if pair and word else line)
            at += 1
        if not self._joins:
            return self._body
        registers = [f"\t.reg .b32 %wl<{len(self._words) + 2}>;", "\t.reg .pred %wp;"]
        return registers + [_REGISTER.sub(lambda name: self._names.get(name[0], name[0]), line) for line in self._out]

    def _group(self, at):
        """Returns the group of loads that begins at a line, or None."""
        lines = self._body[at : at + _COUNT]
        loads = [match for line in lines if (match := _LOAD.fullmatch(line.strip()))]
        if len(loads) < _COUNT:
            return None
        offsets = [int(load[4] or 0) for load in loads]
        elements = [load[2] for load in loads]
        in_row = offsets == [offsets[0] + 2 * i for i in range(_COUNT)]
        paired = {(elements[0], elements[1]), (elements[2], elements[3])} <= self._paired
        if not in_row or not paired or len({load[3] for load in loads}) > 1:
            return None
        return _Group(lines, elements, loads[0][3], offsets[0])

    def _flush(self):
        """Writes the loads that wait. All lanes take the same way, since they may multiply together behind it."""
        self._joins += 1
        narrow, join = f"$wide_narrow_{self._joins}", f"$wide_join_{self._joins}"
        address, other = "%wl0", "%wl1"
        tests = [f"mov.b32 {address}, 0;"]
        for base, offset in dict.fromkeys((group.base, group.offset % 8) for group in self._waiting):
            tests += [f"cvt.u32.u64 {other}, {base};"]
            tests += [f"add.u32 {other}, {other}, {offset};"] if offset else []
            tests += [f"or.b32 {address}, {address}, {other};"]
        tests += [f"and.b32 {address}, {address}, 7;", f"setp.ne.b32 %wp, {address}, 0;"]
        tests += [f"activemask.b32 {address};", f"vote.sync.any.pred %wp, %wp, {address};", f"@%wp bra {narrow};"]
        wide, single = [], []
        for group in self._waiting:
            words = [f"%wl{len(self._words) + 2 + i}" for i in range(2)]
            pairs = [tuple(group.elements[:2]), tuple(group.elements[2:])]
            self._words |= dict(zip(pairs, words))
            wide.append(f"ld.global.v2.u32 {{{words[0]}, {words[1]}}}, [{group.base}+{group.offset}];")
            single += [line.strip() for line in group.loads]
            single += [f"mov.b32 {word}, {{{low},{high}}};" for word, (low, high) in zip(words, pairs)]
        lines = [*tests, *wide, f"bra.uni {join};", f"{narrow}:", *single, f"{join}:"]
        self._out += [line if line.endswith(":") else f"\t{line}" for line in lines]
        self._waiting.clear()


def _written(line):
    text = line.strip()
    match = None if text.startswith((".", "//")) else _WRITES.match(text)
    return _REGISTER.findall(match[1]) if match else []


def _paired(lines):
    """Returns the pairs of elements that are loaded once each and used as a pair alone."""
    pairs, uses, loads = Counter(), Counter(), defaultdict(int)
    for line in lines:
        text = line.strip()
        if match := _LOAD.fullmatch(text):
            loads[match[2]] += 1
        elif match := _PAIR.match(text):
            pairs[match.groups()[1:]] += 1
        if not text.startswith("."):
            uses.update(register for register in _REGISTER.findall(text) if register.startswith("%rs"))
    return {
        (low, high)
        for (low, high), count in pairs.items()
        if uses[low] == count + 1 and uses[high] == count + 1 and loads[low] == loads[high] == 1
    }
