"""Joins products of 8 by 8 matrices in NVRTC's PTX: tensor cores multiply 16 by 16 matrices by ones of 16 by 8.

Programs multiply one matrix at a time, and cuda/target/matrix_product.h marks each of these products in the PTX.
Products wait here until one of their sums is used. Then two sums that have the same right matrices become the upper and
the lower half of one sum, and two products in a row that are added to one sum become one of twice the depth. Right
matrices, which have to be transposed between the lanes, are transposed once, two at a time, or are read from
threadgroup memory once more as tensor cores want them (shared_columns.py). What is not understood stays as it is.
"""

import collections
import re

from .shared_columns import Loops, SharedColumns

_MARK = re.compile(r"// msl\.product" + r" (%\w+)" * 7 + "$")
_END = "// end inline asm"
_REGISTER = re.compile(r"%[a-z]+\d+")
_INSTRUCTION = re.compile(r"(@!?%p\d+\s+)?([\w.]+)\s+((?:\{[^};]*\}|[^,{;])+?)(?:,\s*([^;]*))?;$")
# Instructions after which another one may be next, or lanes wait for each other.
_ENDS = {"bra", "brx", "ret", "exit", "trap", "call", "bar", "barrier"}
# Instructions whose result depends on their operands alone.
_PURE = {"mov", "cvt", "prmt", "and", "or", "xor", "shl", "shr", "selp"}

# Lane 4 n + c gets the rows 2 c and 2 c + 1 of column n. A shuffle fetches one row of two matrices. In odd columns the
# order of the rows is the other way round, so that a lane gives each shuffle one of its two columns. The lanes are
# those of cuda/target/matrix_product.h.
_LANES = """\
	.reg .b32 %mx<{count}>;
	.reg .b64 %my<{addresses}>;
	.reg .pred %mp, %mq;
	mov.u32 %mx0, %laneid;
	and.b32 %mx1, %mx0, 4;
	setp.ne.b32 %mp, %mx1, 0;
	and.b32 %mx1, %mx0, 8;
	setp.ne.b32 %mq, %mx1, 0;
	and.b32 %mx1, %mx0, 1;
	shl.b32 %mx1, %mx1, 2;
	and.b32 %mx2, %mx0, 2;
	shl.b32 %mx2, %mx2, 3;
	or.b32 %mx1, %mx1, %mx2;
	shr.u32 %mx3, %mx0, 3;
	or.b32 %mx1, %mx1, %mx3;
	selp.b32 %mx2, 8, 0, %mp;
	or.b32 %mx2, %mx1, %mx2;
	xor.b32 %mx3, %mx2, 8;
	selp.b32 %mx4, 0x7632, 0x5410, %mq;
	selp.b32 %mx5, 0x5410, 0x7632, %mq;
	selp.b32 %mx6, 0x1054, 0x5410, %mp;
	selp.b32 %mx7, 0x3276, 0x7632, %mp;"""
_FIRST = 8  # the registers above

# The addresses that the lanes have which hold the rows 2 c and 2 c + 1 of column n, in a loop's addresses `base`.
_COLUMN = """\
	{{ .reg .b32 %ma<6>; .reg .b64 %md;
	or.b32 %ma5, %mx1, 8;
	mov.b64 {{%ma0, %ma1}}, {base};
	shfl.sync.idx.b32 %ma2, %ma0, %mx1, 31, -1;
	shfl.sync.idx.b32 %ma3, %ma1, %mx1, 31, -1;
	mov.b64 {even}, {{%ma2, %ma3}};
	shfl.sync.idx.b32 %ma2, %ma0, %ma5, 31, -1;
	shfl.sync.idx.b32 %ma3, %ma1, %ma5, 31, -1;
	mov.b64 {odd}, {{%ma2, %ma3}};
	selp.b64 %md, {distance}, 0, %mp;
	add.s64 {even}, {even}, %md;
	add.s64 {odd}, {odd}, %md; }}"""


def join_products(ptx):
    """Returns the PTX (bytes) with joined products."""
    if b"// msl.product" not in ptx:
        return ptx
    out, body = [], None
    for line in ptx.decode().split("\n"):
        if body is not None and line != "}":
            body.append(line)
            continue
        if body is not None:
            out += _Function(body).lines()
            body = None
        elif line == "{":
            body = []
        out.append(line)
    return "\n".join(out).encode()


_Product = collections.namedtuple("_Product", "kind sum left right")


class _Function:
    """A function's body."""

    def __init__(self, body):
        self._body = body
        self._lines = []
        self._registers = _FIRST
        self._addresses = 0  # registers of addresses
        self._loop = None  # the loop whose first block this is: its line in the body, and its index in self._lines
        self._columns = {}  # (self._loop, a Place's base and distance) -> registers of addresses
        self._before = collections.defaultdict(list)  # index in self._lines -> what comes before it
        self._shared = SharedColumns()
        self._pending = []  # products that wait
        self._sums, self._inputs = set(), set()  # their registers
        self._begin_block()

    def _begin_block(self):
        self._values = {}  # register -> what it holds; the same for the same values
        self._halves = {}  # register of a float -> that of the half which it was converted from
        self._transposed = {}  # value of a right matrix -> register
        self._shared.forget()

    def lines(self):
        if not any(_MARK.match(line.strip()) for line in self._body):
            return self._body
        self._constants = self._find_constants()
        self._loops = Loops(self._body)
        lines = iter(enumerate(self._body))
        for number, line in lines:
            text = line.strip()
            if (mark := _MARK.match(text)) and (product := self._product(*mark.groups())):
                self._add(product)
                while next(lines)[1].strip() != _END:
                    pass
                self._lines.append(line.replace(text, _END))
            elif not text or text.startswith(("//", ".")):
                self._lines.append(line)
            else:
                self._pass(number, line, text)
        self._flush()
        return self._with_registers()

    def _find_constants(self):
        """Returns {register: the number that it always is}."""
        written = collections.defaultdict(list)
        for line in self._body:
            if instruction := _INSTRUCTION.match(line.strip()):
                for register in _REGISTER.findall(instruction[3]):
                    written[register].append(instruction[4] if instruction[2] == "mov.u32" else None)
        return {register: found[0] for register, found in written.items() if found in (["0"], ["1"])}

    def _with_registers(self):
        if self._registers == _FIRST:
            return self._lines
        # In front of the function's own registers.
        first = next(i for i, line in enumerate(self._lines) if line.startswith("\t.reg "))
        self._before[first].append(_LANES.format(count=self._registers, addresses=max(1, self._addresses)))
        return [part for i, line in enumerate(self._lines) for part in (*self._before.get(i, ()), line)]

    # Other instructions ---------------------------------------------------------------------------------------------

    def _pass(self, number, line, text):
        instruction = _INSTRUCTION.match(text)
        if instruction is None or instruction[2].split(".")[0] in _ENDS:
            self._flush()
            if not instruction or instruction[2].split(".")[0] not in ("bar", "barrier"):
                self._loop = (number, len(self._lines)) if self._loops.begins(number) else None
            self._lines.append(line)
            self._begin_block()
            return
        condition, opcode, target, operands = instruction.groups()
        written = _REGISTER.findall(target)
        if not self._sums.isdisjoint(_REGISTER.findall(text)) or not self._inputs.isdisjoint(written):
            self._flush()
        halves = [self._halves.get(name) for name in (operands or "").split(", ")]
        if opcode == "cvt.rn.f16x2.f32" and not condition and all(halves):
            opcode, operands = "mov.b32", f"{{{halves[1]}, {halves[0]}}}"
            line = f"\t{opcode} {target}, {operands};"
        self._lines.append(line)
        self._shared.note(condition, opcode, target, operands or "")
        self._note(written, None if condition else opcode, operands or "")

    def _note(self, written, opcode, operands):
        value = None
        if opcode and opcode.split(".")[0] in _PURE and len(written) == 1:
            value = opcode, _REGISTER.sub(lambda register: str(self._value(register[0])), operands)
        for register in written:
            self._values[register] = value or (len(self._lines), register)
            self._halves = {f: h for f, h in self._halves.items() if register not in (f, h)}
        if opcode == "cvt.f32.f16":
            self._halves[written[0]] = operands

    def _value(self, register):
        return self._values.setdefault(register, register)

    # Products -------------------------------------------------------------------------------------------------------

    def _product(self, first, second, left, right, left_half, right_half, not_bfloat):
        kinds = {"0": ("bf16", left, right), "1": ("f16", left_half, right_half)}
        constant = self._constants.get(not_bfloat)
        kind = kinds.get(constant) if constant is not None else None
        return kind and _Product(kind[0], (first, second), *kind[1:])

    def _add(self, product):
        """Adds a product. It may continue one of the sums, and must touch the waiting products in no other way."""
        used, sums = {product.left, product.right}, set(product.sum)
        if not any(other.sum == product.sum for other in self._pending):
            used |= sums
        if not self._sums.isdisjoint(used) or not self._inputs.isdisjoint(sums):
            self._flush()
        self._pending.append(product)
        self._sums |= sums
        self._inputs |= {product.left, product.right}
        self._note(product.sum, None, "")

    def _flush(self):
        chains = collections.defaultdict(list)
        for product in self._pending:
            chains[product.sum].append(product)
        alike = collections.defaultdict(list)  # types and right matrices -> the sums that have them
        for chain in chains.values():
            alike[tuple((product.kind, self._value(product.right)) for product in chain)].append(chain)
        self._transpose([product.right for group in alike.values() for product in group[0]])
        for group in alike.values():
            for i in range(0, len(group), 2):
                self._emit(*group[i : i + 2])
        self._pending.clear()
        self._sums.clear()
        self._inputs.clear()

    def _transpose(self, rights):
        rights = {self._value(right): right for right in rights}
        for value, right in rights.items():
            if value not in self._transposed and (place := self._place(right)):
                self._transposed[value] = self._read_column(place)
        missing = [value for value in rights if value not in self._transposed]
        for pair in (missing[i : i + 2] for i in range(0, len(missing), 2)):
            first, second = rights[pair[0]], rights[pair[-1]]
            given, other, got, row = (self._new() for _ in range(4))
            self._put(
                f"prmt.b32 {given}, {first}, {second}, %mx4;",
                f"prmt.b32 {other}, {first}, {second}, %mx5;",
                f"shfl.sync.idx.b32 {got}, {given}, %mx2, 31, -1;",
                f"shfl.sync.idx.b32 {row}, {other}, %mx3, 31, -1;",
            )
            for value, order in zip(pair, ("%mx6", "%mx7")):
                self._transposed[value] = self._new()
                self._put(f"prmt.b32 {self._transposed[value]}, {got}, {row}, {order};")

    def _place(self, right):
        """Returns where a right matrix lies, if all lanes can exchange its addresses before a loop."""
        place = self._shared.place(right)
        return place if place and self._loop and self._loops.is_set_before(place.base, self._loop[0]) else None

    def _read_column(self, place):
        assert self._loop is not None, place
        key = self._loop, place.base, place.distance
        if key not in self._columns:
            even, odd = (f"%my{self._addresses + i}" for i in range(2))
            self._addresses += 2
            self._columns[key] = even, odd
            self._before[self._loop[1]].append(
                _COLUMN.format(base=place.base, distance=place.distance, even=even, odd=odd)
            )
        even, odd = self._columns[key]
        column = self._new()
        self._put(
            "{ .reg .b16 %mh<2>;",
            f"ld.shared.b16 %mh0, [{even}+{place.offset}];",
            f"ld.shared.b16 %mh1, [{odd}+{place.offset}];",
            f"mov.b32 {column}, {{%mh0, %mh1}}; }}",
        )
        return column

    def _emit(self, upper, lower=None):
        """Writes the products of a sum, and those of the sum below it."""
        while upper:
            count = 2 if len(upper) > 1 and upper[0].kind == upper[1].kind else 1
            self._multiply(upper[:count], lower and lower[:count])
            upper, lower = upper[count:], lower and lower[count:]

    def _multiply(self, upper, lower):
        kind = upper[0].kind
        # Nobody reads the lower half of a single sum.
        below = lower[0].sum if lower else ("%mf0", "%mf1")
        sums = ", ".join([*upper[0].sum, *below])
        lefts = ", ".join(product.left for pair in zip(upper, lower or upper) for product in pair)
        rights = ", ".join(self._transposed[self._value(product.right)] for product in upper)
        product = (
            f"mma.sync.aligned.m16n8k{8 * len(upper)}.row.col.f32.{kind}.{kind}.f32 "
            f"{{{sums}}}, {{{lefts}}}, {{{rights}}}, {{{sums}}};"
        )
        if lower:
            self._put(product)
        else:
            self._put("{ .reg .f32 %mf<2>; mov.f32 %mf0, 0f00000000; mov.f32 %mf1, 0f00000000;", product, "}")

    def _new(self):
        self._registers += 1
        return f"%mx{self._registers - 1}"

    def _put(self, *lines):
        self._lines += [f"\t{line}" for line in lines]
