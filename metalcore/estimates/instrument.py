"""Programs that count: Clang optimizes a translated program as Apple's compiler would, and each basic block and each
access of the result calls the executor.

The optimizer's text says what a block does: instructions by kind, each with its line. So a count costs one call for a
block, however much the block computes. The headers in `include` keep what is one instruction of a GPU a call.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

from ..msl import cache
from ..msl.check.clang import find_clang
from ..msl.errors import MSLError
from ..msl.runtime import host

# ccache would give files other names, by which the headers here are told from a program's. metalcore keeps the result.
_ENVIRONMENT = {**os.environ, "LC_ALL": "C", "CCACHE_DISABLE": "1"}
INCLUDE = Path(os.path.abspath(__file__)).parent / "include"
_HEADERS = Path(os.path.abspath(host.INCLUDE))
_OURS = (os.fspath(INCLUDE), os.fspath(_HEADERS))
_NO = {"-fmax-errors=20", "-ffp-contract=off", "-Werror=vla", "-fstack-clash-protection"}
# The folder of debug information is none of the files', so that these keep the names which programs and -I give them.
_CODE = (
    # Compilers for GPUs inline every function, and unroll loops so that arrays become registers.
    "-fdebug-compilation-dir=/msl -O2 -mllvm -inline-threshold=100000 -mllvm -unroll-threshold=1000 "
    "-ffp-contract=fast -fno-vectorize -fno-slp-vectorize -ferror-limit=20"
).split()
# A pair of a barrier's place in msl_abi::Runtime and its name.
_SERVICES = {"16": "barrier", "24": "barrier.simdgroup"}

# Functions of msl::math by what they are on a GPU. Others are special functions of their own names.
_MATH = dict.fromkeys(("abs", "copysign"), None)
_MATH |= dict.fromkeys(("least", "greatest"), "float32.minmax")
_MATH |= dict.fromkeys(("fma", "multiply_add"), "float32.fma")
_MATH |= dict.fromkeys(("floor", "ceil", "trunc", "rint", "round"), "float32.round")
_MATH |= {"fract": "float32.round", "fdim": "float32.minmax"}

_FLOATS = {"half": "float16", "float": "float32", "double": "float64", "bfloat": "bfloat16"}
_PLAIN = {"fadd": "add", "fsub": "add", "fmul": "mul", "fdiv": "div", "frem": "rem", "fcmp": "compare"}
_WHOLE: dict[str, str] = dict.fromkeys(("add", "sub", "shl", "lshr", "ashr", "and", "or", "xor"), "add")
_WHOLE |= {"mul": "mul", "icmp": "compare"} | dict.fromkeys(("udiv", "sdiv", "urem", "srem"), "div")
_CONVERSIONS = {"fptosi", "fptoui", "sitofp", "uitofp", "fpext", "fptrunc"}
_INTRINSICS = {
    "fma": "fma", "fmuladd": "fma", "minnum": "minmax", "maxnum": "minmax", "floor": "round", "ceil": "round",
    "trunc": "round", "rint": "round", "round": "round", "nearbyint": "round", "sqrt": "sqrt",
    "smin": "minmax", "smax": "minmax", "umin": "minmax", "umax": "minmax", "ctpop": "add", "ctlz": "add",
    "cttz": "add", "abs": "add", "bswap": "add", "bitreverse": "add", "fshl": "add", "fshr": "add",
}  # fmt: skip

_NAME = r"(?:[\w.$\-]+|\"[^\"]+\")"
_DEFINE = re.compile(rf"define .*?@(?P<name>{_NAME})\(.*?(?:!dbg !(?P<debug>\d+))? ?\{{$")
_LABEL = re.compile(rf"({_NAME}):")
_DEBUG = re.compile(r",? !dbg !(\d+)")
_LOCAL = re.compile(r"%[\w.$\-]+")
_DEFINED = re.compile(r"\s+(%[\w.$\-]+) = (.*)$")
_NODE = re.compile(r"^!(\d+) = (?:distinct )?!DI\w+\((.*)\)$", re.M)
_FIELD = re.compile(r"(\w+): (?:\"((?:[^\"\\]|\\.)*)\"|!?(\w+))")
_TYPE = r"(?P<type><\d+ x \w+>|half|bfloat|float|double|ptr|i\d+)"
_ADDRESS = rf"ptr (?P<address>[%@]{_NAME})"
# An operation's flags, or a comparison's predicate.
_FLAGS = (
    r"(?:(?:nnan|ninf|nsz|arcp|contract|afn|reassoc|fast|nuw|nsw|exact|disjoint|samesign|[ou][a-z]{2}|[su][gl][te]|"
    r"eq|ne) )*"
)
_OPERATION = re.compile(rf"(?P<name>[a-z]+) {_FLAGS}{_TYPE}")
_CALL = re.compile(
    rf"call .*?(?P<type>half|bfloat|float|double|i\d+|void|ptr|<\d+ x \w+>) (?P<to>[@%]{_NAME})\((?P<given>.*)\)"
)
_ACCESSES = (  # the regular expression, and msl_abi::AccessKind
    (re.compile(rf"load atomic (?:volatile )?{_TYPE}, {_ADDRESS}"), 3),
    (re.compile(rf"store atomic (?:volatile )?{_TYPE} .*, {_ADDRESS}"), 4),
    (re.compile(rf"load (?:volatile )?{_TYPE}, {_ADDRESS}"), 0),
    (re.compile(rf"store (?:volatile )?{_TYPE} .*, {_ADDRESS}"), 1),
    (re.compile(rf"(?:atomicrmw|cmpxchg) .*?{_ADDRESS}, {_TYPE}"), 2),
)
_COPY = re.compile(r"call void @llvm\.mem(cpy|move|set)\.\S*?\((.*)\)")


def arguments():
    """Returns the arguments with which Clang makes the text of a program that counts."""
    flags = [flag for flag in host.FLAGS if flag not in _NO]
    includes = [f"-I{INCLUDE}", f"-I{_HEADERS}", f"-I{_HEADERS / 'host'}"]
    return [*flags, "-w", "-Wno-invalid-constexpr", *_CODE, "-march=native", *includes]


def compiled(text, *, msl="", filename="program_source"):
    """Returns the path of a library that counts, from the cache if it is there.

    Args:
        text: a translation's C++.
        msl: the program, quoted in errors.
        filename: its name in errors.

    Raises:
        CompilerNotFoundError: there is no Clang.
        MSLError: the program does not compile.
    """
    clang = [*find_clang(), "-x", "c++"]
    own = "".join(path.read_text() for path in sorted([*INCLUDE.rglob("*.h"), Path(__file__)]))
    key = cache.digest(text, own, cache.translator_digest(), " ".join([*clang, *arguments()]), host.cpu_identity())

    def make(path):
        with tempfile.TemporaryDirectory(prefix="metalcore-") as folder:
            source, code = os.path.join(folder, "program.cpp"), os.path.join(folder, "program.ll")
            Path(source).write_text(text, encoding="utf-8")
            _run([*clang, *arguments(), "-gline-tables-only", "-S", "-emit-llvm", source, "-o", code], msl, filename)
            Path(code).write_text(instrumented(Path(code).read_text(encoding="utf-8")), encoding="utf-8")
            _run([*clang[:-2], "-O1", "-w", "-fPIC", "-march=native", "-shared", code, "-o", os.fspath(path)], msl, "")

    return cache.entry(key + ".so", make)


def _run(command, msl, filename):
    result = subprocess.run(command, capture_output=True, text=True, env=_ENVIRONMENT)
    if result.returncode:
        raise MSLError(host.explain(result.stderr, msl, filename) or f"{command[0]} failed:\n{result.stderr}")


def instrumented(code):
    """Returns LLVM's text of a program with the calls, and with its table as the constant `msl_table` in JSON:
    blocks: [[successors, {place: {kind: count}}]] and sites: [[kind of access, place], …], where a place is [file,
    line] of the program."""
    program = _Program(code)
    out, end = [], 0
    for function in re.finditer(r"^define .*?^}$", code, re.M | re.S):
        out += [code[end : function.start()], program.function(function[0])]
        end = function.end()
    tail = re.sub(r"^!llvm\.dbg\.cu = .*$", "", code[end:], flags=re.M)
    text = json.dumps({"places": program.places, "blocks": program.blocks, "sites": program.sites})
    data = "".join(c if c.isalnum() or c in " .,:_-/{}[]" else f"\\{ord(c):02X}" for c in text)
    table = f'@msl_table = constant [{len(text) + 1} x i8] c"{data}\\00"\n'
    return "".join(out) + tail + table


class _Program:
    """What is known of a program while its functions are read."""

    def __init__(self, code):
        self.places, self.blocks, self.sites = [], [], []
        self._numbers = {}  # of places
        self._nodes = {
            number: {name: text or word for name, text, word in _FIELD.findall(fields)}
            for number, fields in _NODE.findall(code)
        }
        self.single = {}  # functions that are one instruction: its kind, or None where it is free
        for match in re.finditer(r"^define .*$", code, re.M):
            head = _DEFINE.match(match[0])
            if head and head["debug"]:
                kind = self._instruction(head["name"], head["debug"])
                if kind != "":
                    self.single["@" + head["name"]] = kind
        self._place = functools.cache(self._find_place)

    def _file(self, scope):
        while scope in self._nodes:
            values = self._nodes[scope]
            if "file" in values:
                return os.path.normpath(self._nodes[values["file"]]["filename"])
            scope = values.get("scope")
        return ""

    def _instruction(self, mangled, debug):
        """Returns the kind of instruction that a function is, or "" for other functions."""
        file, name = self._file(debug), self._nodes[debug]["name"].split("<")[0]
        folder, within = os.path.split(file)
        if within == "matrix_product.h" and name == "matrix_product_of":
            types = [kind for word, kind in _FLOATS.items() if f"{word}_format" in mangled] or ["float32"]
            return f"matrix.{types[0]}"
        if within == "lanes.h":
            quad = "quad" if "ILj4E" in mangled else "simd"
            return f"{quad}.{name}"
        if within == "math.h" and folder.endswith("host/target") or folder.endswith("host/target/math"):
            return _MATH.get(name, f"special.{name}")
        return ""

    def place(self, debug):
        """Returns the number of the program's line that an instruction belongs to, or None where it belongs to none,
        and whose it is: 2 for the executor's, 1 for arithmetic of addresses within a matrix, 0 for the program's."""
        return self._place(debug)

    def _find_place(self, debug):
        first, own = debug, 2
        while debug in self._nodes:
            values = self._nodes[debug]
            file = self._file(values["scope"])
            if debug == first:
                executor = file.endswith(("host/entry.h", "host/target/runtime.h", "msl_entries"))
                own = 2 if executor else int(file.endswith(("simdgroup_matrix.h", "matrix_place.h")))
            if file and not file.startswith(_OURS) and file != "msl_entries":
                at = file, int(values.get("line", 0))
                if at not in self._numbers:
                    self._numbers[at] = len(self.places)
                    self.places.append(at)
                return self._numbers[at], own
            debug = values.get("inlinedAt")
        return None, 2

    def function(self, text):
        """Returns the text of a function with the calls in it."""
        lines = [line for line in text.split("\n") if not line.lstrip().startswith("#dbg_")]
        head = _DEFINE.match(lines[0])
        if head is None or not head["debug"] or "@" + head["name"] in self.single or self._is_service(head):
            return "\n".join(_DEBUG.sub("", line) for line in lines)
        return "\n".join(_Function(self, lines).written())

    def _is_service(self, head):
        """Returns whether a function belongs to what instructions are made of, or to the executor."""
        file = self._file(head["debug"])
        return file.startswith(_OURS) and ("/target/" in file or file.endswith(("prelude.h", "stops.h")))


class _Function:
    """Reads the lines of a function, and writes them with the calls."""

    def __init__(self, program, lines):
        self.program, self.lines = program, lines
        self._uses = Counter(_LOCAL.findall("\n".join(lines)))
        self._defined = {match[1]: match[2] for line in lines if (match := _DEFINED.match(line))}
        self._fused = set()  # products that a sum takes in
        self._sums = {name for name, text in self._defined.items() if self._takes_product(text)}
        self._hidden = self._find_hidden()

    def _takes_product(self, text):
        if re.match(r"f(add|sub) .*?contract", text):
            for operand in _LOCAL.findall(_DEBUG.sub("", text)):
                product = self._defined.get(operand, "")
                if re.match(r"fmul .*?contract", product) and self._uses[operand] == 2:
                    self._fused.add(operand)
                    return True
        return False

    def _find_hidden(self):
        """Returns the variables through which functions that are one instruction take and give their values."""
        names = set()
        for line in self.lines:
            call = _CALL.search(line)
            if call and (call["to"][0] == "%" or call["to"] in self.program.single):
                names.update(map(self._variable, _LOCAL.findall(call["given"])))
        return names - {""}

    def _variable(self, pointer):
        """Returns the local variable that a pointer leads to, or "" where it leads elsewhere."""
        while (text := self._defined.get(pointer, "")).startswith("getelementptr"):
            base = re.search(r"ptr (%[\w.$\-]+)", text)
            if base is None:
                return ""
            pointer = base[1]
        return pointer if text.startswith("alloca") else ""

    def written(self):
        body = self.lines[1:-1]
        labels = [match[1].strip('"') for line in body if (match := _LABEL.match(line))]
        if not _LABEL.match(body[0]):
            labels.insert(0, None)
        self._first = len(self.program.blocks)
        self._numbers = {label: self._first + i for i, label in enumerate(labels)}
        self.program.blocks += [[[], {}] for _ in labels]
        number, entered, place, own = self._first, False, None, 2
        out = [_DEBUG.sub("", self.lines[0])]
        for line in body:
            if match := _LABEL.match(line):
                number, entered = self._numbers[match[1].strip('"')], False
            elif line.strip():
                if not entered and " = phi " not in line:
                    out.append(f"  call void @msl_count_block(i32 {number})")
                    entered = True
                debug = _DEBUG.search(line)
                if debug:
                    place, own = self.program.place(debug[1])
                self._read(_DEBUG.sub("", line), number, place, own, out)
            out.append(_DEBUG.sub("", line))
        return [*out, self.lines[-1]]

    def _read(self, line, number, place, own, out):
        """Adds what an instruction does to its block, and the call before an access to `out`."""
        block = self.program.blocks[number]
        name, text = match.groups() if (match := _DEFINED.match(line)) else ("", line.strip())
        text = re.sub(r"^(?:tail|musttail|notail) ", "", text)
        for label in re.findall(rf"label %({_NAME})", text):
            block[0].append(self._numbers[label.strip('"')])
        kind, times = self._kind(name, text)
        if place is None or own == 2 and kind not in _SERVICES.values():
            return
        if kind and (own != 1 or kind.startswith("matrix")):
            counts = block[1].setdefault(place, Counter())
            counts[kind] += times
        if text.startswith(("load", "store", "atomicrmw", "cmpxchg")):
            for pattern, access in _ACCESSES:
                if match := pattern.match(text):
                    self._access(match["address"], _size(match["type"]), access, place, out)
                    break
        elif match := _COPY.match(text):
            given = match[2].split(", ")
            size = given[-2].split(" ")[-1]
            for operand, access in ((given[0], 1), (given[1], 0))[: 1 if match[1] == "set" else 2]:
                self._access(operand.split(" ")[-1], size, access, place, out)

    def _access(self, address, size, access, place, out):
        if self._variable(address) in self._hidden or address[0] not in "%@":
            return
        if str(size).startswith("%"):
            out.append(f"  %msl_size{len(self.program.sites)} = trunc i64 {size} to i32")
            size = f"%msl_size{len(self.program.sites)}"
        out.append(
            f"  call void @msl_count_access(ptr {address}, i32 {size}, i32 {access}, i32 {len(self.program.sites)})"
        )
        self.program.sites.append((access, place))

    def _kind(self, name, text):
        """Returns the kind of an instruction, or None where a GPU needs none, and how often it is done."""
        if text.startswith(("br i1", "switch")):
            return "branch", 1
        if match := _CALL.match(text):
            return self._called(match)
        match = _OPERATION.match(text)
        if not match:
            return ("convert", 1) if text.split(" ", 1)[0] in _CONVERSIONS else (None, 0)
        operation: str = match["name"]
        times, type_name = _elements(match["type"])
        if operation in _CONVERSIONS:
            return "convert", times
        if operation == "select":  # its first operand is the condition
            return "select", 1
        if operation in _PLAIN:
            if name in self._fused:
                return None, 0
            what = "fma" if name in self._sums else _PLAIN[operation]
            return what if what == "compare" else f"{_FLOATS[type_name]}.{what}", times
        if operation in _WHOLE:
            what: str = _WHOLE[operation]
            if what == "div" and re.search(r", \d+$", text):
                what = "mul"  # by a constant: a product's upper half
            return what if what == "compare" else f"{_whole(type_name)}.{what}", times
        return None, 0

    def _called(self, call):
        to = call["to"]
        if to[0] == "%":
            loaded = self._defined.get(to, "")
            pointer = self._defined.get(next(iter(_LOCAL.findall(loaded)), ""), "")
            offset = re.search(r"i64 (\d+)$", _DEBUG.sub("", pointer))
            return _SERVICES.get(offset[1] if offset else ""), 1
        if to in self.program.single:
            return self.program.single[to], 1
        if match := re.match(r"@llvm\.(\w+)\.", to):
            what, (times, type_name) = _INTRINSICS.get(match[1]), _elements(call["type"])
            if what:
                return f"{_FLOATS.get(type_name) or _whole(type_name)}.{what}", times
        return None, 0


def _elements(type_name):
    """Returns how many elements a type has, and theirs."""
    match = re.match(r"<(\d+) x (\w+)>", type_name)
    return (int(match[1]), match[2]) if match else (1, type_name)


def _whole(type_name):
    bits = int(type_name[1:]) if type_name[1:].isdigit() else 32
    return "int64" if bits > 32 else "int32" if bits > 16 or bits == 1 else "int16"


def _size(type_name):
    times, element = _elements(type_name)
    known = {"half": 2, "bfloat": 2, "float": 4, "double": 8, "ptr": 8}
    return times * (known.get(element) or max(1, int(element[1:]) // 8))
