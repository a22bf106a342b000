"""Builds the extension that the tests run: metalcore's own objects, with csrc/backends/mps in front of the simulator.

    python tests/metal_runtime/build_runtime.py     # after `make build`; prints the extension's path

Needs clang 19 and GCC's Objective-C runtime (Debian: clang-19 libobjc-12-dev).
"""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.append(str(ROOT))
import metalcore  # noqa: E402, F401 - before tools.build, which would do with less of it
from tools.build import compile_commands  # noqa: E402
from tools.build.metal_kernels import metal_kernels  # noqa: E402
from tools.build.tasks import Tasks  # noqa: E402

WORK = ROOT / "build" / "metal_runtime"
_TASKS = Tasks(WORK)
EXTENSION = _TASKS.out / "_C.abi3.so"
_LIBRARY = _TASKS.out / "lib"
COMPILER = "clang++-19"
_BUILT = ROOT / "build" / "metalcore"
_BACKEND = ROOT / "csrc" / "backends" / "mps"
_REPLACED = "backends/simulator/backend"  # what makes the simulator the backend of mps tensors
# Sent to views.cpp, stream.mm and memory.mm.
_WRAPPED = (
    "_ZN9metalcore3gpu7view_ofERKN5torch6stable6TensorE",
    "_ZN9metalcore3gpu7view_ofEP16AtenTensorOpaquemm",
    "_ZN9metalcore9simulator7executeERKNS0_6LaunchE",
    "_ZN9metalcore3gpu7at_onceERKNS0_9RecordingElNS0_4WorkEl",
    "_ZN9metalcore3gpu7secondsERKNS0_9RecordingERKNS0_8DispatchE",
    "_ZN9metalcore3mps9pipelinesEPU19objcproto9MTLDevice11objc_objectRKSt6vectorISt17basic_string_viewIcSt11char_traitsIcEESaIS7_EE",
)
_OBJECTIVE_C = ["-fobjc-runtime=gcc", f"-I{HERE / 'include'}", "-Wno-objc-root-class"]


def build():
    """The extension's path."""
    _kernels()
    _link(_objects(), EXTENSION)
    return EXTENSION


def build_with_fault(name, file, old, new):
    """The path of an extension in which a file of csrc/backends/mps has `new` instead of `old`. Call build() before."""
    work = WORK / "faults" / name.replace(" ", "-")
    shutil.rmtree(work, ignore_errors=True)
    for folder in ("backends/mps", "gpu", "python"):
        shutil.copytree(ROOT / "csrc" / folder, work / "csrc" / folder)
    source = work / "csrc/backends/mps" / file
    text = source.read_text()
    if text.count(old) != 1:
        raise RuntimeError(f"this fault cannot be seeded: {file} has {old!r} {text.count(old)} times")
    source.write_text(text.replace(old, new))
    objects = _objects()
    objects[f"backends/mps/{source.stem}"] = _compiled(source, work / f"{source.stem}.o")
    _link(objects, work / "_C.abi3.so")
    (work / "lib").symlink_to(_LIBRARY)
    return work / "_C.abi3.so"


def _objects():
    """{name: object}: the backend and the runtime, and the rest as setup.py built it."""
    folder = _BUILT / "objects" / "csrc"
    objects = {
        Path(part).relative_to(folder).with_suffix("").as_posix(): Path(part)
        for part in Tasks(_BUILT).signature("_C.abi3.so")
        if part.startswith(f"{folder}/")
    }
    del objects[_REPLACED]
    sources = {}
    for folder, prefix in ((_BACKEND, "backends/mps"), (HERE, "runtime")):
        sources.update({f"{prefix}/{path.stem}": path for path in folder.iterdir() if path.suffix in (".mm", ".cpp")})
    for name, source in sources.items():
        objects[name] = _compiled(source, WORK / "objects" / f"{name}.o")
    return objects


def _link(objects, output):
    torch = Path(importlib.util.find_spec("torch").submodule_search_locations[0])
    subprocess.run(
        [
            COMPILER,
            "-shared",
            *map(str, objects.values()),
            "-o",
            str(output),
            f"-L{torch / 'lib'}",
            "-ltorch_cpu",
            "-ltorch",
            "-ldl",
            "-pthread",
            *(f"-Wl,--wrap={name}" for name in _WRAPPED),
            _objc_library(),
        ],
        check=True,
    )


def _compiled(source, target):
    headers = [*HERE.rglob("*.h"), *(ROOT / "csrc").rglob("*.h"), *(ROOT / "tools/mac_check/sdk").iterdir()]
    newest = max(path.stat().st_mtime for path in [source, *headers, Path(__file__), _BUILT / compile_commands.NAME])
    if target.exists() and target.stat().st_mtime >= newest:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    objective_c = source.suffix == ".mm"
    language = [*_OBJECTIVE_C, "-idirafter", _objc_headers()] if objective_c else []
    subprocess.run([COMPILER, *_flags(), *language, "-c", str(source), "-o", str(target)], check=True)
    if objective_c:  # clang takes GCC's Objective-C personality, which knows no catch of C++
        subprocess.run(
            ["objcopy", "--redefine-sym", "__gnu_objc_personality_v0=__gxx_personality_v0", str(target)], check=True
        )
    return target


def _flags():
    """Those of setup.py, from the command it recorded."""
    _, command = compile_commands.read(_BUILT)["gpu/record"]
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
        if not link.is_symlink() or link.readlink() != path:  # a copy of a checkout has the other one's links
            link.unlink(missing_ok=True)
            link.symlink_to(path)


if __name__ == "__main__":
    print(build())
