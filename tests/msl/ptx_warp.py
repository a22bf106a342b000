"""Runs the lines of PTX functions one after the other, as a warp of 32 lanes. Branches are not taken. What an
instruction gives that is not known here, such as a load from global memory, depends on its register's name alone. What
threadgroup memory holds depends on the address."""

import random
import re
import struct

LANES = range(32)
_LINE = re.compile(r"(?:@(!?)(%?\w+)\s+)?([\w.]+)\s+(.*);$", re.DOTALL)


def half(bits):
    return struct.unpack("<e", struct.pack("<H", bits & 0xFFFF))[0]


def bfloat(bits):
    return struct.unpack("<f", struct.pack("<I", (bits & 0xFFFF) << 16))[0]


def single(bits):
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def bits_of(number):
    return struct.unpack("<I", struct.pack("<f", number))[0]


_ELEMENT = {"f16": half, "bf16": bfloat}


class Warp:
    def __init__(self):
        self.registers = {}  # name -> the values of the lanes

    def run(self, ptx):
        """Returns the instructions that ran, by opcode."""
        ran = []
        for text in re.split(r"(?<=;)|\n|(?<=[{}])\s(?=\s*\.reg)", re.sub(r"//.*", "", ptx)):
            text = text.strip().lstrip("{} \t") if not text.strip().startswith("{%") else text.strip()
            match = _LINE.match(text)
            if match and not text.startswith("."):
                self._step(*match.groups())
                ran.append(match[3])
        return ran

    def floats(self, name):
        return [single(bits) for bits in self._read(name)]

    def _read(self, name):
        if re.fullmatch(r"-?\d+|0x[0-9a-fA-F]+", name):
            return [int(name, 0)] * 32
        if name.startswith("0f"):
            return [int(name[2:], 16)] * 32
        if name == "%laneid":
            return list(LANES)
        if name not in self.registers:
            random_ = random.Random(name)
            if re.match(r"%f|lower|%mf", name):
                values = [bits_of(random_.uniform(-1, 1)) for _ in LANES]
            else:  # two numbers that are neither large nor small, as halves and as bfloats
                values = [
                    random_.choice((0x3C003E00, 0xBC003D80, 0x38003A00, 0xB8403C80))
                    + 0x10 * random_.randrange(8)
                    + (random_.randrange(8) << 20)
                    for _ in LANES
                ]
            self.registers[name] = values
        return self.registers[name]

    def _step(self, negated, predicate, opcode, text):
        operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,{}\[\]\s]+", text)
        active = [True] * 32
        if predicate:
            active = [bool(value) != bool(negated) for value in self._read(predicate)]
        target, sources = operands[0], operands[1:]
        short = opcode.split(".")[0]
        if opcode.startswith("ld.shared."):
            self._load(opcode, re.findall(r"%\w+", target), sources[0], active)
            return
        if short == "mma":
            self._multiply(opcode, [re.findall(r"[%\w]+", part) for part in operands], active)
            return
        if short == "shfl":
            value, lane = self._read(sources[0]), self._read(sources[1])
            is_flip = ".bfly." in opcode
            found = [value[(i ^ lane[i] if is_flip else lane[i]) & 31] for i in LANES]
            self._write(target.split("|")[0], found, active)
            return
        if short == "movmatrix":
            words = self._read(sources[0])
            matrix = [words[lane // 2] >> 16 * (lane % 2) & 0xFFFF for lane in range(64)]
            columns = [[matrix[8 * (2 * (i % 4) + j) + i // 4] for j in range(2)] for i in LANES]
            self._write(target, [low | high << 16 for low, high in columns], active)
            return
        compute = _COMPUTE.get(opcode) or _COMPUTE.get(short)
        if compute is None or any(source[0] in "{[" for source in sources) or target[0] in "{[":
            if opcode == "mov.b32" and sources and sources[0].startswith("{"):
                low, high = (self._read(name) for name in re.findall(r"%\w+", sources[0]))
                self._write(target, [a & 0xFFFF | (b & 0xFFFF) << 16 for a, b in zip(low, high)], active)
            elif opcode == "mov.b64" and sources and sources[0].startswith("{"):
                low, high = (self._read(name) for name in re.findall(r"%\w+", sources[0]))
                self._write(target, [a & 0xFFFFFFFF | b << 32 for a, b in zip(low, high)], active)
            elif opcode == "mov.b64" and target.startswith("{"):
                for shift, name in zip((0, 32), re.findall(r"%\w+", target)):
                    self._write(name, [value >> shift & 0xFFFFFFFF for value in self._read(sources[0])], active)
            elif short not in ("st", "bra", "bar", "ret"):
                for name in re.findall(r"%\w+", target):
                    self.registers.pop(name, None)
            return
        values = list(zip(*(self._read(source) for source in sources)))
        self._write(target, [compute(*value) for value in values], active)

    def _write(self, name, values, active):
        if not all(active):
            values = [new if here else old for new, old, here in zip(values, self._read(name), active)]
        self.registers[name] = list(values)

    def _load(self, opcode, targets, address, active):
        base, offset = re.fullmatch(r"\[(%\w+)(?:\+(-?\d+))?\]", address).groups()
        width = 4 if opcode.endswith("32") else 2
        for i, name in enumerate(targets):
            places = [value + int(offset or 0) + width * i for value in self._read(base)]
            values = [_element_at(place) | (_element_at(place + 2) << 16 if width == 4 else 0) for place in places]
            self._write(name, values, active)

    def _multiply(self, opcode, operands, active):
        """D = A B + C as the ISA describes the fragments of m16n8k8 and m16n8k16."""
        d, a, b, c = operands
        element, depth = _ELEMENT[opcode.split(".")[-2]], int(re.search(r"k(\d+)", opcode)[1])
        left = [[0.0] * depth for _ in range(16)]
        right = [[0.0] * 8 for _ in range(depth)]
        for lane in LANES:
            group, place = lane // 4, lane % 4
            for i, name in enumerate(a):
                word = self._read(name)[lane]
                for j in range(2):
                    left[group + i % 2 * 8][place * 2 + j + i // 2 * 8] = element(word >> 16 * j)
            for i, name in enumerate(b):
                word = self._read(name)[lane]
                for j in range(2):
                    right[place * 2 + j + i * 8][group] = element(word >> 16 * j)
        sums = [[single(bits) for bits in self._read(name)] for name in c]
        for lane in LANES:
            for i in range(4):
                row, column = lane // 4 + i // 2 * 8, lane % 4 * 2 + i % 2
                sums[i][lane] += sum(left[row][k] * right[k][column] for k in range(depth))
        for name, values in zip(d, sums):
            self._write(name, [bits_of(value) for value in values], active)


def _element_at(address):
    return 0x3C00 + random.Random(address).randrange(1 << 9)


def _permute(a, b, selector):
    digits = a.to_bytes(4, "little") + b.to_bytes(4, "little")
    return int.from_bytes(bytes(digits[selector >> 4 * i & 7] for i in range(4)), "little")


def _halves(high, low):
    return int.from_bytes(struct.pack("<ee", single(low), single(high)), "little")


_COMPUTE = {
    "mov.u32": lambda a: a,
    "mov.b32": lambda a: a,
    "mov.f32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "shl.b32": lambda a, b: a << b & 0xFFFFFFFF,
    "shr.u32": lambda a, b: a >> b,
    "add.s32": lambda a, b: a + b & 0xFFFFFFFF,
    "setp.eq.u32": lambda a, b: a == b,
    "setp.eq.b32": lambda a, b: a == b,
    "setp.eq.s32": lambda a, b: a == b,
    "setp.ne.b32": lambda a, b: a != b,
    "setp.ne.s32": lambda a, b: a != b,
    "add.s64": lambda a, b: a + b & 0xFFFFFFFFFFFFFFFF,
    "selp.b32": lambda a, b, p: a if p else b,
    "selp.b64": lambda a, b, p: a if p else b,
    "prmt.b32": _permute,
    "cvt.f32.f16": lambda a: bits_of(half(a)),
    "cvt.rn.f16x2.f32": _halves,
}
