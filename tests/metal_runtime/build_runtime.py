"""Builds what the tests run: the extension, from metalcore's own objects, with csrc/backends/mps in front of the
simulator, and the library for C as it is on macOS, with csrc/c_api/metal.

    python tests/metal_runtime/build_runtime.py     # after `make build`; prints the paths of both

Needs clang 19 and GCC's Objective-C runtime (Debian: clang-19 libobjc-12-dev).
"""

import importlib.util
import re
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.append(str(ROOT))
import metalcore  # noqa: E402, F401 - before tools.build, which would do with less of it
from tools.build import c_library  # noqa: E402
from tools.build.metal_kernels import metal_kernels  # noqa: E402
from tools.build.objects import COMPILE_COMMANDS, read_compile_commands  # noqa: E402
from tools.build.places import C_LIBRARY as C_NAME  # noqa: E402
from tools.build.tasks import Tasks  # noqa: E402

WORK = ROOT / "build" / "metal_runtime"
_TASKS = Tasks(WORK)
EXTENSION = _TASKS.out / "_C.abi3.so"
_LIBRARY = _TASKS.out / "lib"
C_LIBRARY = _LIBRARY / C_NAME
COMPILER = "clang++-19"
_BUILT = ROOT / "build" / "metalcore"
_BACKEND = ROOT / "csrc" / "backends" / "mps"
_REPLACED = "backends/simulator/backend"  # what makes the simulator the backend of mps tensors
_ON_CPU = ("ops/quant/quantize",)  # operators that the simulator runs for CPU tensors, and Python on a Mac
# Sent to cost.mm, and of the extension to views.cpp, stream.mm and memory.mm too.
_WRAPPED_IN_BOTH = (
    "_ZN9metalcore3gpu7at_onceERKNS0_9RecordingElNS0_4WorkEl",
    "_ZN9metalcore3gpu7secondsERKNS0_9RecordingERKNS0_8DispatchE",
)
_WRAPPED = (
    *_WRAPPED_IN_BOTH,
    "_ZN9metalcore3gpu7view_ofERKN5torch6stable6TensorE",
    "_ZN9metalcore3gpu7view_ofEP16AtenTensorOpaquemm",
    "_ZN9metalcore9simulator7executeERKNS0_6LaunchE",
    "_ZN9metalcore3mps9pipelinesEPU19objcproto9MTLDevice11objc_objectRKSt6vectorISt17basic_string_viewIcSt11char_traitsIcEESaIS7_EE",
)
# Parts of the runtime that one of the two has.
_OF_EXTENSION, _OF_C = {"stream", "memory", "views", "faults"}, {"c_library"}
_OBJECTIVE_C = ["-fobjc-runtime=gcc", f"-I{HERE / 'include'}", "-Wno-objc-root-class"]
# Behind a precompiled header that has not declared it, GCC's Protocol would be another class than clang's.
_PRECOMPILED = ["-fpch-instantiate-templates", "-include", "objc/runtime.h", "-x", "objective-c++-header"]


def build():
    """The extension's path."""
    _kernels()
    _link(_objects(), EXTENSION)
    return EXTENSION


def build_for_c(fault=None):
    """The path of the library for C.

    Args:
        fault: (name, file, old, new), for a library in which a file of csrc/c_api/metal has `new` instead of `old`. Its
            kernels are those of build_for_c().
    """
    if fault is None:
        _kernels()
        _link_c(_objects_for_c(), C_LIBRARY)
        return C_LIBRARY
    name, file, old, new = fault
    work, source = _with_fault(name, "c_api/metal", file, old, new, ("backends/mps", "c_api", "gpu"))
    objects = _objects_for_c()
    objects[f"c_api/metal/{source.stem}"] = _compiled(source, work / f"{source.stem}.o", c_library.compile_flags())
    _link_c(objects, work / C_NAME)
    return work / C_NAME


def build_with_fault(name, file, old, new):
    """The path of an extension in which a file of csrc/backends/mps has `new` instead of `old`. Call build() before."""
    work, source = _with_fault(name, "backends/mps", file, old, new, ("backends/mps", "gpu", "python"))
    objects = _objects()
    objects[f"backends/mps/{source.stem}"] = _compiled(source, work / f"{source.stem}.o", _flags())
    _link(objects, work / "_C.abi3.so")
    (work / "lib").symlink_to(_LIBRARY)
    return work / "_C.abi3.so"


def _with_fault(name, changed, file, old, new, needed):
    """(a folder with copies of what `needed` names of csrc, the file there, which is changed)."""
    work = WORK / "faults" / name.replace(" ", "-")
    shutil.rmtree(work, ignore_errors=True)
    for folder in needed:
        shutil.copytree(ROOT / "csrc" / folder, work / "csrc" / folder)
    source = work / "csrc" / changed / file
    text = source.read_text()
    if text.count(old) != 1:
        raise RuntimeError(f"this fault cannot be seeded: {file} has {old!r} {text.count(old)} times")
    source.write_text(text.replace(old, new))
    return work, source


def _objects():
    """{name: object}: the backend and the runtime, and the rest as setup.py built it."""
    objects = _built("_C.abi3.so")
    del objects[_REPLACED]
    sources = {f"backends/mps/{path.stem}": path for path in _sources(_BACKEND)}
    sources |= {f"runtime/{path.stem}": path for path in _sources(HERE) if path.stem not in _OF_C}
    for name, source in sources.items():
        objects[name] = _compiled(source, WORK / "objects" / f"{name}.o", _flags())
    for name in _ON_CPU:
        source, target = ROOT / "csrc" / f"{name}.cpp", WORK / "objects" / f"{name}.o"
        objects[name] = _compiled(source, target, [*_flags(), "-DMETALCORE_WITHOUT_SIMULATOR"])
    return objects


def _objects_for_c():
    """The same for the library for C. Its contexts are those that it has on macOS."""
    objects = _built(f"lib/{C_NAME}")
    others = (_REPLACED, "c_api/cpu/context", "c_api/cuda/", "backends/cuda/")
    objects = {name: path for name, path in objects.items() if not name.startswith(others)}
    sources = {
        Path(path).relative_to("csrc").with_suffix("").as_posix(): ROOT / path
        for path in c_library.sources(["mps"])
        if path.startswith(("csrc/backends/mps", "csrc/c_api/metal"))
    }
    sources |= {f"runtime/{path.stem}": path for path in _sources(HERE) if path.stem not in _OF_EXTENSION}
    for name, source in sources.items():
        objects[name] = _compiled(source, WORK / "c_objects" / f"{name}.o", c_library.compile_flags())
    return objects


def _built(output):
    """{name: object} of an output of setup.py's. The extension has some of the objects of the library for C."""
    folders = f"{_BUILT / 'out'}/(?:c_)?objects/csrc"
    matches = [re.fullmatch(rf"{folders}/(.+)\.o", part) for part in Tasks(_BUILT).signature(output)]
    return {match[1]: Path(match[0]) for match in matches if match}


def _sources(folder):
    return [path for path in sorted(folder.iterdir()) if path.suffix in (".mm", ".cpp")]


def _link(objects, output):
    torch = Path(importlib.util.find_spec("torch").submodule_search_locations[0])
    _link_with(objects, output, _WRAPPED, [f"-L{torch / 'lib'}", "-ltorch_cpu", "-ltorch"])


def _link_c(objects, output):
    exports = WORK / "exports.map"
    exports.write_text("{ global: metalcore_*; allocations_so_far; local: *; };\n")
    flags = ["-Wl,--no-undefined", f"-Wl,-soname,{C_NAME}", f"-Wl,--version-script={exports}"]
    _link_with(objects, output, _WRAPPED_IN_BOTH, flags)


def _link_with(objects, output, wrapped, flags):
    linked = output.with_suffix(".linked")  # another process of the tests may be using the one that is there
    subprocess.run(
        [
            *(COMPILER, "-shared", *map(str, objects.values()), "-o", str(linked), *flags, "-ldl", "-pthread"),
            *(f"-Wl,--wrap={name}" for name in wrapped),
            _objc_library(),
        ],
        check=True,
    )
    linked.replace(output)


def _compiled(source, target, flags):
    if not _is_current(source, target):
        objective_c = source.suffix == ".mm"
        language = [*_language(), "-include-pch", str(_precompiled(flags))] if objective_c else []
        _compile([*flags, *language, "-c", str(source)], target)
        if objective_c:  # clang takes GCC's Objective-C personality, which knows no catch of C++
            subprocess.run(
                ["objcopy", "--redefine-sym", "__gnu_objc_personality_v0=__gxx_personality_v0", str(target)], check=True
            )
    return target


def _precompiled(flags):
    """csrc/precompiled.h as these flags have it, with which a source takes a third of the time."""
    source = ROOT / "csrc" / "precompiled.h"
    target = WORK / "precompiled" / f"{zlib.crc32(' '.join(flags).encode()):08x}.pch"
    if not _is_current(source, target):
        _compile([*flags, *_language(), *_PRECOMPILED, str(source)], target)
    return target


def _is_current(source, target):
    headers = [*HERE.rglob("*.h"), *(ROOT / "csrc").rglob("*.h"), *(ROOT / "tools/mac_check/sdk").iterdir()]
    newest = max(path.stat().st_mtime for path in [source, *headers, Path(__file__), _BUILT / COMPILE_COMMANDS])
    return target.exists() and target.stat().st_mtime >= newest


def _compile(arguments, target):
    target.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([COMPILER, *arguments, "-o", str(target)], check=True)


def _language():
    return [*_OBJECTIVE_C, "-idirafter", _objc_headers()]


def _flags():
    """The extension's, from the command that setup.py recorded."""
    _, command = read_compile_commands(_BUILT)["gpu/recorder"]
    return command[command.index("-std=c++20") :]


def _objc_headers():
    return str(_found("gcc/*/*/include/objc/objc.h").parents[1])


def _objc_library():
    return str(_found("*/libobjc.so.4"))


def _found(pattern):
    found = sorted(Path("/usr/lib").glob(pattern))
    if not found:
        raise RuntimeError("GCC's Objective-C runtime is missing, e.g.: sudo apt-get install libobjc-12-dev")
    return found[-1]


def _kernels():
    """lib beside the extension: the simulator's libraries, and lib/metal as setup.py writes it for a Mac."""
    metal_kernels(_TASKS)
    _TASKS.run()
    for path in (ROOT / "metalcore" / "lib").iterdir():
        link = _LIBRARY / path.name
        if path.name == C_NAME:
            continue
        if not link.is_symlink() or link.readlink() != path:  # a copy of a checkout has the other one's links
            link.unlink(missing_ok=True)
            link.symlink_to(path)


if __name__ == "__main__":
    print(build())
    print(build_for_c())
