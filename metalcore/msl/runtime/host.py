"""The host's C++ compiler: finding it, running it, and showing its errors in terms of the user's MSL.

It also compiles the built-in kernels that the build has left out (METALCORE_ISA=first-use), when they are needed.
"""

import atexit
import collections
import functools
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from .. import cache
from ..errors import CompilerNotFoundError, MSLError, quote_error
from ..language.inline_headers import inline_headers

INCLUDE = Path(__file__).parents[1] / "include"
FLAGS = (
    "-std=gnu++17 -fPIC -fno-math-errno -fno-trapping-math -fno-strict-aliasing -fwrapv -fsigned-char "
    "-ffp-contract=off -fvisibility=hidden -Ulinux -Uunix -fdiagnostics-color=never -fmax-errors=20 "
    # Metal has no arrays of variable length, which are an extension of C++ here. -w would suppress this error, too.
    "-Wno-narrowing -Werror=vla "
    # Kernels do not throw. The compiler must keep an access by a null pointer, which checking reports.
    "-fno-exceptions -fno-delete-null-pointer-checks "
    # Large local arrays must touch the guard page below a fiber's stack, not skip it.
    "-fstack-clash-protection"
).split()
# MSL's constexpr functions may call functions that are not constexpr, as long as no constant needs the call.
_CONSTEXPR = {"gcc": ["-fimplicit-constexpr"], "clang": ["-Wno-invalid-constexpr"]}
NORMAL = "-O3"
# Of debug information, a finding needs lines and inlined functions: the rest takes a third of the time.
CHECKING = ["-O1", "-g1", "-fsanitize=thread", "-DMSL_CHECKING=1"]
# Faults of a kernel that no access shows. include/host/checking.h defines what these checks call.
_UNDEFINED = "object-size,integer-divide-by-zero,unreachable,return"
_FINDINGS = {
    "gcc": [f"-fsanitize=bounds,{_UNDEFINED}", "-gstatement-frontiers"],  # which -g1 alone leaves out
    "clang": [f"-fsanitize=array-bounds,{_UNDEFINED}"],
}
_MARCH = {"aarch64": "armv8-a", "arm64": "armv8-a"}  # machine names that -march does not know
# The first versions that have _Float16 in C++.
_MINIMUM = {"gcc": 12, "clang": 15}
# Some distributions (Ubuntu 22.04) have an older compiler under the plain name and newer ones under versioned names.
_NAMES = ("c++", "g++", "clang++")
_VERSIONED = (
    *(f"g++-{version}" for version in range(15, 11, -1)),
    *(f"clang++-{version}" for version in range(21, 14, -1)),
)


class Compiler:
    """A C++ compiler: its command, its family ("gcc" or "clang") and its version."""

    def __init__(self, command, family, version):
        self.command = command
        self.family = family
        self.version = version

    def __repr__(self):
        return f"{' '.join(self.command)} ({self.family} {self.version})"


def find_compiler():
    """Returns the first usable one of $CXX, c++, g++, clang++, and these with a version in their names (g++-12,
    clang++-15 …).

    Raises:
        CompilerNotFoundError: there is none, or none is new enough (GCC 12 or Clang 15).
    """
    return _find_compiler(os.environ.get("CXX", ""), os.environ.get("PATH", ""))


@functools.lru_cache(maxsize=8)
def _find_compiler(cxx, path):
    tried = []
    for candidate in (cxx, *_NAMES, *_VERSIONED):
        try:
            command = shlex.split(candidate)
        except ValueError as error:  # a quotation that does not end
            tried.append(f"{candidate}: {error}")
            continue
        if not command or shutil.which(command[0], path=path) is None:
            if command and candidate not in _VERSIONED:
                tried.append(f"{candidate}: not found")
            continue
        family, version = _identify(command)
        if family and int(version.split(".")[0]) >= _MINIMUM[family]:
            return Compiler(command, family, version)
        tried.append(f"{candidate}: {family or 'not GCC or Clang'} {version}".strip())
    needed, how = "compiling for the simulator", "for example `apt install g++`"
    if sys.platform == "darwin":
        needed, how = "building metalcore", "which `xcode-select --install` installs with Apple's Command Line Tools"
    raise CompilerNotFoundError(
        f"{needed} needs a C++ compiler (GCC 12 or Clang 15, or newer), {how}; set CXX to name one. "
        f"Tried {'; '.join(tried)}"
    )


def predefined_macros(command, language):
    """Returns the definitions of the macros that a compiler predefines for a language ("c", "c++"), as text. It is
    empty where the command does not run."""
    arguments = ["-dM", "-E", "-x", language, os.devnull]
    try:
        return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _identify(command):
    """Returns a compiler's family and version; two empty texts for a command that is no known compiler."""
    macros = predefined_macros(command, "c++")
    for family, prefix, parts in (
        ("clang", "__clang_", ("major__", "minor__", "patchlevel__")),
        ("gcc", "__GNUC_", ("_", "MINOR__", "PATCHLEVEL__")),
    ):
        numbers = [match[1] for part in parts if (match := re.search(rf"#define {prefix}{part} (\d+)", macros))]
        if len(numbers) == len(parts):
            return family, ".".join(numbers)
    return "", ""


@functools.lru_cache(maxsize=1)
def cpu_identity():
    """Returns what `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = [line for line in lines if line.startswith(("flags", "Features", "model name"))][:2]
    return platform.machine() + "".join(features)


def level(family):
    """Returns how much the compiler optimizes the built-in kernels of a family, such as "linalg/qr_simd". Those of
    attention are as fast with much less, and those of linear algebra and sequences with less, than with NORMAL. Each
    step takes two thirds of the time or less. Kernels that pack numbers are up to 1.8 times as fast with less: GCC then
    vectorizes the loops over a thread's numbers before it unrolls them."""
    if family.startswith("attention/"):
        return "-O1"
    return "-O2" if family.startswith(("linalg/", "sequence/", "quant/quantize_")) else NORMAL


def arguments(*, isa="native", checking=False, level=NORMAL):
    """Returns the compiler's arguments without the files."""
    family = find_compiler().family
    mode = [*CHECKING, *_FINDINGS[family]] if checking else [level]
    march = f"-march={_MARCH.get(isa, isa)}"
    return [*FLAGS, *_CONSTEXPR[family], *mode, march, f"-I{INCLUDE}", f"-I{INCLUDE / 'host'}"]


_TENSORS = '#include "metal/tensor_ops.h"'


def _standard(translated):
    """Returns the argument for a newer C++ where a program has tensors: descriptors are arguments of templates."""
    return ["-std=gnu++20"] if _TENSORS in translated else []


def check_source(translated, *, msl="", filename="program_source"):
    """Raises an MSLError where translated C++ has an error outside of templates."""
    compiler = find_compiler()
    with tempfile.TemporaryDirectory(prefix="metalcore-") as directory:
        path = os.path.join(directory, "program.cpp")
        Path(path).write_text(translated, encoding="utf-8")
        options = [*arguments(), *_standard(translated)]
        command = [*compiler.command, *options, *_prelude(compiler, options)]
        _run([*command, "-fsyntax-only", path], compiler, msl, filename)


def compile_source(
    translated, output, *, isa="native", checking=False, level=NORMAL, msl="", filename="program_source"
):
    """Compiles translated C++ to a shared object.

    Args:
        translated: the text from translate().
        output: the path of the shared object.
        isa: the value of `-march`.
        checking: instrument every load and store.
        level: of optimization, where nothing is instrumented.
        msl: the user's source, quoted in errors.
        filename: its name in errors.

    Raises:
        MSLError: the program does not compile; the message shows the user's lines.
        CompilerNotFoundError: there is no compiler.
    """
    compiler = find_compiler()
    with tempfile.TemporaryDirectory(prefix="metalcore-") as directory:
        path = os.path.join(directory, "program.cpp")
        Path(path).write_text(translated, encoding="utf-8")
        moves = _unaligned_moves(compiler, directory)
        options = [*arguments(isa=isa, checking=checking, level=level), *_standard(translated)]
        command = [*compiler.command, *options, *_prelude(compiler, options), *moves]
        if checking:
            # The headers define the functions that the instrumentation calls, so its own library is not linked.
            object_path = os.path.join(directory, "program.o")
            _run([*command, "-c", path, "-o", object_path], compiler, msl, filename)
            command, path = compiler.command, object_path
        _run([*command, "-shared", path, "-o", os.fspath(output)], compiler, msl, filename)


_PROGRAMS_BEFORE = 2  # compiled with the same arguments, before the process precompiles the prelude for the next ones
_programs = collections.Counter()  # the compiler's arguments -> how many programs the process has compiled with them
_preludes = {}  # the same -> the header that stands for include/host/prelude.h; "" where it cannot be compiled


def _prelude(compiler, options):
    """Returns the arguments with which a program finds its prelude precompiled: to parse it takes half of the time of a
    small program. A process that compiles a few programs precompiles nothing, which takes as long as two of them."""
    key = (*compiler.command, *options)
    _programs[key] += 1
    if compiler.family != "gcc" or _programs[key] <= _PROGRAMS_BEFORE:
        return []
    header = _preludes.get(key)
    if header is None or header and not os.path.exists(header):  # the process that this one was forked from removed it
        header = _preludes[key] = _precompiled(key)
    return ["-include", header] if header else []


def _precompiled(command):
    """Returns the path of a precompiled prelude, or "" where the command cannot compile it."""
    folder = tempfile.mkdtemp(prefix="metalcore-")
    atexit.register(_remove, folder, os.getpid())
    header = Path(folder, "prelude.h")
    header.write_text('#include "host/prelude.h"\n')
    done = subprocess.run([*command, "-x", "c++-header", "-w", str(header), "-o", f"{header}.gch"], capture_output=True)
    return "" if done.returncode else str(header)


def _remove(folder, owner):
    if os.getpid() == owner:  # and no process that was forked from it
        shutil.rmtree(folder, ignore_errors=True)


_assemblers = {}  # compiler -> whether its assembler has the option


def _unaligned_moves(compiler, directory):
    """Returns the arguments with which a float4 may lie at any multiple of a float's size.

    Programs rely on GPUs, which load and store vectors at such addresses. A CPU traps there where the compiler has used
    instructions for aligned vectors.
    """
    option = "-Wa,-muse-unaligned-vector-move"
    if compiler.family != "gcc" or platform.machine() not in ("x86_64", "AMD64"):
        return []
    key = tuple(compiler.command)
    if key not in _assemblers:
        probe = [*key, option, "-x", "c", "-c", os.devnull, "-o", os.path.join(directory, "probe.o")]
        _assemblers[key] = subprocess.run(probe, capture_output=True).returncode == 0
    return [option] if _assemblers[key] else []


def _run(command, compiler, msl, filename):
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, errors="replace", env={**os.environ, "LC_ALL": "C"}
        )
    except OSError as error:
        raise CompilerNotFoundError(f"cannot run {compiler}: {error}") from None
    if result.returncode:
        raise MSLError(
            explain(result.stderr, msl, filename) or f"{compiler} failed:\n{result.stderr or result.returncode}"
        )


_DIAGNOSTIC = re.compile(r"(?P<file>[^:\s][^:]*):(?P<line>\d+):(?:(?P<column>\d+):)?\s+(?P<text>.*)")


def explain(stderr, msl="", filename="program_source"):
    """Returns the errors in a compiler's output, each at the user's line, with that line below it."""
    messages, instantiated_at = [], None
    for raw in stderr.splitlines():
        match = _DIAGNOSTIC.match(raw)
        if match is None:
            if "In instantiation of" in raw or "In substitution of" in raw:
                instantiated_at = None
            continue
        text = match["text"]
        in_program = not match["file"].startswith(os.fspath(INCLUDE)) and match["file"] != "msl_entries"
        if (
            in_program
            and ("required from" in text or "required by" in text or "inlined from" in text)
            and instantiated_at is None
        ):
            instantiated_at = (match["file"], match["line"], match["column"])
        if not text.startswith(("error:", "fatal error:")):
            instantiated_at = None if text.startswith("warning:") else instantiated_at
            continue
        place = (match["file"], match["line"], match["column"]) if in_program else instantiated_at
        instantiated_at = None
        if place is None:
            place = (match["file"], match["line"], match["column"])
        message = quote_error(*place, text, msl, filename)
        if message not in messages:
            messages.append(message)
    return "\n".join(messages)


def build(source_path, output_path, *, isa="native", checking=False, level=NORMAL, include_dirs=(), defines=()):
    """Translates and compiles one MSL file to a shared object, for kernels that are built ahead of time.

    Args:
        source_path: the `.metal` file; its directory is searched for its `#include "…"`.
        output_path: the path of the shared object, which is written only when it is complete.
        isa: the value of `-march`, for example ``x86-64-v3``.
        checking: build the variant that reports every access.
        level: of optimization, for the other variant.
        include_dirs: more directories for `#include`.
        defines: macros as ``NAME value`` strings.

    Returns:
        The files it depends on: the source and everything it includes, as paths.
    """
    from ..language.translate import translate  # programs from the cache do not need it

    source_path, output_path = Path(source_path), Path(output_path)
    msl = source_path.read_text(encoding="utf-8")
    translation = translate(msl, include_dirs=include_dirs, filename=str(source_path), defines=defines)
    output_path.parent.mkdir(parents=True, exist_ok=True)
    partial = output_path.with_name(f".{output_path.name}.{os.getpid()}")
    try:
        how = {"isa": isa, "checking": checking, "level": level}
        compile_source(translation.source(), partial, **how, msl=msl, filename=str(source_path))
        os.replace(partial, output_path)
    finally:
        partial.unlink(missing_ok=True)
    return [str(source_path), *translation.included]


_PACKAGE = Path(__file__).parents[2]
_INSTALLED = _PACKAGE / "kernels"  # of a wheel
_KERNELS = _INSTALLED if _INSTALLED.exists() else _PACKAGE.parent / "kernels"


def shared_object(family, checking, flushing):
    """Returns the path of the simulator's library of a family, such as "linalg/qr_simd". It is compiled where the cache
    has none of this source, translator and compiler.

    Args:
        family: of kernels, the path of its source below kernels/ without the suffix.
        checking: compile the variant that reports every access.
        flushing: compile what does not count on float16's subnormal numbers.
    """
    defines = ("METALCORE_HALF_SUBNORMALS 0",) if flushing else ()
    source = _KERNELS / f"{family}.metal"
    text = inline_headers(source.read_text(encoding="utf-8"), source.name, [source.parent, _KERNELS])
    compiler = " ".join([repr(find_compiler()), *arguments(checking=checking, level=level(family)), cpu_identity()])

    def make(path):
        build(source, path, checking=checking, level=level(family), include_dirs=[_KERNELS], defines=defines)

    return cache.entry(cache.digest(text, *defines, cache.translator_digest(), compiler) + ".so", make)
