"""Clang: finding it, running it in C++ for OpenCL, and its errors in MSL's words, as findings."""

import functools
import os
import re
import shlex
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import CompilerNotFoundError
from ..runtime.host import predefined_macros


@dataclass(frozen=True, order=True)
class Finding:
    """A fault that breaks a rule, at its place in a program.

    Example:
        >>> [finding] = metalcore.msl.check.check("kernel void one(device double* x) { x[0] = 1; }")
        >>> finding.line
        1
    """

    file: str
    line: int
    column: int
    rule: str
    message: str

    def __str__(self):
        place = f"{self.file}:{self.line}:{self.column}" if self.column else f"{self.file}:{self.line}"
        return f"{place}: error: {self.message} [{self.rule}]"


STANDARDS = {"metal3.1": 310, "metal3.2": 320, "metal4.0": 400, "metal4.1": 410}


def version(standard):
    """Returns __METAL_VERSION__ of a standard, such as 320 of "metal3.2"."""
    if standard not in STANDARDS:
        raise ValueError(f"the standard is {standard!r}, and must be one of {', '.join(STANDARDS)}")
    return STANDARDS[standard]


INCLUDE = Path(__file__).parent / "include"
_MINIMUM = 15
_NAMES = ("clang", *(f"clang-{version}" for version in range(22, _MINIMUM - 1, -1)))
_FLAGS = (
    "-x cl -cl-std=CLC++2021 --target=spir64 -cl-no-stdinc -nostdinc -cl-single-precision-constant -fdeclspec "
    "-Xclang -cl-ext=+cl_khr_fp16,-cl_khr_fp64,-__opencl_c_fp64,+__cl_clang_bitfields,+__cl_clang_function_pointers "
    "-fsyntax-only -fno-color-diagnostics -fno-caret-diagnostics -ferror-limit=0 "
    "-ftemplate-backtrace-limit=0"
).split()
_SECOND_FLAGS = (
    "-x c++ --target=x86_64-linux-gnu -nostdinc -fdeclspec -fsyntax-only -fno-color-diagnostics "
    "-fno-caret-diagnostics -ferror-limit=0 -ftemplate-backtrace-limit=0"
).split()
# What C++14 and Clang's vectors tell. Without address spaces overloads are declared twice, so that other errors of the
# second reading may be its own.
_SECOND = re.compile(
    r"vector element|contains duplicate components|subscript is not an integer|cannot be narrowed|missing 'typename'|"
    r"requires template arguments|'auto' not allowed|'decltype\(auto\)' not allowed|C\+\+(17|2)"
)
# Extensions that PyTorch's kernels, or ours, have.
_USUAL = re.compile(r"constexpr if|hexadecimal floating|fold|static_assert|nested namespace|inline variables")
# What Clang's parser tells of the program's own tokens, and what it tells of attributes. Types are not MSL's there.
_RAW_FLAGS = [*_FLAGS, "-fdiagnostics-show-category=name", "-Werror=ignored-attributes"]
_RAW = re.compile(r"\[Parse Issue\]$|\battributes?\b|requested alignment")
_CATEGORY = re.compile(r" \[[\w ]+ Issue\]$")
STRICT_SECOND = ["-Werror=c++17-extensions", "-Werror=c++20-extensions"]
STRICT = ["-Werror=implicit-float-conversion", "-Wno-implicit-int-float-conversion"]


def find_clang():
    """Returns the first usable of $CLANG, clang, and clang with a version in its name (clang-19 …).

    Raises:
        CompilerNotFoundError: none is there, or none is new enough (Clang 15).
    """
    return _find_clang(os.environ.get("CLANG", ""), os.environ.get("PATH", ""))


@functools.lru_cache(maxsize=8)
def _find_clang(named, path):
    tried = []
    for candidate in (named, *_NAMES):
        command = shlex.split(candidate)
        if not command or shutil.which(command[0], path=path) is None:
            if command and candidate == named:
                tried.append(f"{candidate}: not found")
            continue
        version = _version(command)
        if version >= _MINIMUM:
            return command
        tried.append(f"{candidate}: {f'Clang {version}' if version else 'not Clang'}")
    raise CompilerNotFoundError(
        f"checking MSL needs Clang {_MINIMUM} or newer, for example `apt install clang-19`; set CLANG to name one. "
        f"Tried {'; '.join(tried) or 'clang and clang-15 to clang-22: not found'}"
    )


def _version(command):
    macros = predefined_macros(command, "c")
    match = re.search(r"#define __clang_major__ (\d+)", macros)
    return int(match[1]) if match and "__apple_build_version__" not in macros else 0


def run_clang(text, raw, *, strict, std):
    """Returns (findings, lines of the syntax tree, findings of the other readings) of a text from clang_text().

    Clang reads it twice: as C++ for OpenCL, and as C++14, on which MSL up to 3.1 is based, with Clang's own vectors but
    without address spaces. Of the second reading's errors those count that the first one cannot find (_SECOND). The
    third reading is that of `raw`, from raw_text(), of which Clang's parser and what it says about attributes count.

    Up to Metal 3.1 the object of a method that names no address space is in `thread`, later in any space. A program
    that is right in either reading has no findings.
    """
    number = version(std)
    defined = f"-DMSL_VERSION={number}"
    first_flags = [*_FLAGS, defined, "-Xclang", "-ast-dump", "-Werror=global-constructors", *(STRICT if strict else ())]
    second_flags = [*_SECOND_FLAGS, defined, f"-std=c++{14 if number < 400 else 17}"]
    if strict:
        second_flags += STRICT_SECOND if number < 400 else STRICT_SECOND[1:]
    with ThreadPoolExecutor(2) as pool:  # they run at a time
        second = pool.submit(_run, text, second_flags)
        third = pool.submit(_run, raw, [*_RAW_FLAGS, defined])
        findings, tree = _run(text, first_flags)
        if findings:
            in_thread = _run(text, first_flags, "__private")
            if all(finding.rule == "constant-initializer" for finding in in_thread[0]):
                findings, tree = in_thread
        more = [finding for finding in second.result()[0] if _is_of_second(finding)]
        more += [_of_raw(finding) for finding in third.result()[0] if _RAW.search(finding.message)]
    return findings, tree, more


def _is_of_second(finding):
    is_told = _SECOND.search(finding.message) and not _USUAL.search(finding.message)
    return bool(is_told) and not finding.file.startswith(os.fspath(INCLUDE))


def _of_raw(finding):
    return replace(finding, message=_CATEGORY.sub("", finding.message))


def _run(text, flags, this=""):
    command = [*find_clang(), *flags, f"-DMSL_THIS={this}", f"-I{INCLUDE}", "-"]
    environment = {**os.environ, "LC_ALL": "C"}
    result = subprocess.run(command, input=text, capture_output=True, text=True, errors="replace", env=environment)
    findings = read_errors(result.stderr)
    if result.returncode and not findings:
        raise RuntimeError(f"{command[0]} failed:\n{result.stderr}")
    return findings, result.stdout.splitlines()


_DIAGNOSTIC = re.compile(
    r"(?P<file>[^:\s][^:]*):(?P<line>\d+):(?P<column>\d+): (?P<kind>error|fatal error|warning|note): (?P<text>.*)"
)
# (rule, pattern of Clang's message); the first that matches holds.
_RULES = (
    ("attribute-place", r"attributes?\b.*\b(appear|appl|ignored)|requested alignment|misplaced attributes"),
    ("version", r"unavailable.*new in MSL"),
    ("constant-initializer", r"requires a global (constructor|destructor)"),
    ("barrier-flags", r"flags of a barrier must be a constant"),
    ("double", r"'double'|cl_khr_fp64"),
    ("function-pointer", r"pointers to (member )?functions"),
    ("memory-order", r"must be memory_order_relaxed"),
    ("threadgroup-constructor", r"type of a threadgroup variable must have"),
    ("vector-component", r"vector element|contains duplicate components"),
    ("c++17", r"requires template arguments|'(decltype\(auto\)|auto)' not allowed|C\+\+(17|2)|missing 'typename'"),
    ("narrowing", r"implicit conversion loses|from .*\b(float|half)' to .*'[^']*bfloat'|cannot be narrowed"),
    ("constant-space", r"read-only variable|const-qualified|program scope"),
    ("address-space", r"address space"),
    ("exceptions", r"exceptions disabled|'throw'|'try'"),
    ("allocation", r"'(default )?(new|delete)'"),
)
_WORDS = (
    (r"static assertion failed due to requirement '[^']*__[^']*': ", ""),
    (r"\bconst __global\b(?!_)", "constant"),
    (r"__global_device\b", "device"),
    (r"\b__attribute__\(\(opencl_global_device\)\)", "device"),
    (r"\b__global\b", "constant"),
    (r"\b__local\b", "threadgroup"),
    (r"\s*\b__private\b(?=')", ""),
    (r"\b__private\b", "thread"),
    (r"\b__generic ", ""),
    (r"_of_msl\b", ""),
    (r"declaration requires a global constructor", "the initializer of a variable in constant must be a constant"),
    (r"'use_handle' attribute", "an attribute of an argument"),
    (r"'annotate' attribute", "an attribute of a constant"),
    (r"(attribute )?'cold'( attribute)?", "an attribute of a kernel"),
    (r" \[-W[^]]*\]$", ""),
    (r"requires cl_khr_fp64( and __opencl_c_fp64)? support", "is not supported in Metal"),
    (r" (are|is) not supported in (C\+\+ for )?OpenCL( C)?.*", r" \1 not supported in Metal"),
)


def in_msl(text):
    """Clang's words for types in MSL's."""
    for pattern, replacement in _WORDS:
        text = re.sub(pattern, replacement, text)
    return text


def read_errors(stderr):
    """Returns findings for the errors in Clang's output. An error in the headers is reported where the program caused
    it."""
    findings, error = [], None
    for raw in stderr.splitlines():
        match = _DIAGNOSTIC.match(raw)
        if match is None:
            continue
        place = (match["file"], int(match["line"]), int(match["column"]))
        ours = match["file"].startswith(os.fspath(INCLUDE))
        if match["kind"] == "note":
            if error is not None:
                error["notes"].append(match["text"])
                if error["ours"] and not ours:
                    error["place"], error["ours"] = place, False
            continue
        if match["kind"] == "warning":
            error = None
            continue
        error = {"place": place, "ours": ours, "text": match["text"], "notes": []}
        findings.append(error)
    return [_finding(error) for error in findings]


def _spaces(text):
    """Returns the address spaces that the pointers and references in a message of Clang's point to."""
    types = [type_ for type_ in re.findall(r"'([^']*)'", text) if "*" in type_ or "&" in type_]
    return {space for type_ in types for space in re.findall(r"__\w+(?=[^*&]*[*&])", type_)}


def _finding(error: dict[str, Any]):
    # The notes say why no overload fits.
    reasons = [note for note in error["notes"] if "candidate" in note] if "no matching" in error["text"] else []
    told = " ".join([error["text"], *reasons])
    rule = next((rule for rule, pattern in _RULES if re.search(pattern, told)), None)
    if rule is None:
        rule = "address-space" if len(_spaces(told)) > 1 else "language"
    text = error["text"]
    if reasons:
        text += "; " + reasons[0]
    file, line, column = error["place"]
    return Finding(file, line, column, rule, in_msl(text))
