"""Builds the extension that the tests run: metalcore's own objects, with csrc/backends/mps in front of the simulator.

    python tests/metal_runtime/build_runtime.py     # after `make build`; prints the extension's path

Needs clang 19 and GCC's Objective-C runtime (Debian: clang-19 libobjc-12-dev).
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
WORK = ROOT / "build" / "metal_runtime"
EXTENSION = WORK / "_C.abi3.so"
COMPILER = "clang++-19"
_BUILT = ROOT / "build" / "metalcore"
_SETUP_COMMAND = _BUILT / "stamps" / "gpu_encode.json"
# Compiled anew: these look at METALCORE_MPS.
_WITH_BACKEND = ("gpu/encode", "gpu/tuning", "python/module")
# Sent to views.cpp and stream.mm.
_WRAPPED = ("_ZN9metalcore3gpu7view_ofERKN5torch6stable6TensorE", "_ZN9metalcore3gpu7view_ofEP16AtenTensorOpaquemm",
            "_ZN9metalcore9simulator7executeERKNS0_6LaunchE")
_OBJECTIVE_C = ["-fobjc-runtime=gcc", f"-I{HERE / 'include'}", "-Wno-objc-root-class"]


def build():
    """The extension's path."""
    flags = _flags()
    sources = {name: ROOT / "csrc" / f"{name}.cpp" for name in _WITH_BACKEND}
    for folder, prefix in ((ROOT / "csrc/backends/mps", "backends/mps"), (HERE, "runtime")):
        sources.update({f"{prefix}/{path.stem}": path for path in folder.iterdir() if path.suffix in (".mm", ".cpp")})
    objects = []
    for name, source in sorted(sources.items()):
        target = WORK / "objects" / f"{name}.o"
        target.parent.mkdir(parents=True, exist_ok=True)
        language = [*_OBJECTIVE_C, "-idirafter", _objc_headers()] if source.suffix == ".mm" else []
        _compile([COMPILER, *flags, "-DMETALCORE_MPS=1", *language], source, target)
        objects.append(target)
    others = [path for path in sorted((_BUILT / "objects").rglob("*.o"))
              if path.relative_to(_BUILT / "objects").with_suffix("").as_posix() not in _WITH_BACKEND]
    torch = Path(importlib.util.find_spec("torch").submodule_search_locations[0])
    subprocess.run([COMPILER, "-shared", *map(str, objects), *map(str, others), "-o", str(EXTENSION), f"-L{torch / 'lib'}",
                    "-ltorch_cpu", "-ltorch", "-ldl", "-pthread", *(f"-Wl,--wrap={name}" for name in _WRAPPED), _objc_library()],
                   check=True)
    _kernels()
    return EXTENSION


def _flags():
    """Those of setup.py, from the command it recorded."""
    command, _ = json.loads(_SETUP_COMMAND.read_text())
    return command[command.index("-std=c++20") : command.index("-MMD")]


def _compile(command, source, target):
    headers = [*HERE.rglob("*.h"), *(ROOT / "csrc").rglob("*.h"), *(ROOT / "tools/mac_check/sdk").iterdir()]
    flags = [Path(__file__), _SETUP_COMMAND]
    newest = max(path.stat().st_mtime for path in [source, *headers, *flags])
    if not target.exists() or target.stat().st_mtime < newest:
        subprocess.run([*command, "-c", str(source), "-o", str(target)], check=True)
        if source.suffix == ".mm":  # clang takes GCC's Objective-C personality, which knows no catch of C++
            subprocess.run(["objcopy", "--redefine-sym", "__gnu_objc_personality_v0=__gxx_personality_v0", str(target)],
                           check=True)


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
    from metalcore.msl.inline_headers import inline_headers
    from metalcore.msl.translate import translate

    library = WORK / "lib"
    library.mkdir(parents=True, exist_ok=True)
    for folder in (ROOT / "metalcore" / "lib").iterdir():
        link = library / folder.name
        if not link.is_symlink():
            link.symlink_to(folder)
    metal, index = library / "metal", []
    metal.mkdir(exist_ok=True)
    for source in sorted((ROOT / "kernels").rglob("*.metal")):
        text = inline_headers(source.read_text(), source.name, [source.parent, ROOT / "kernels"])
        (metal / source.name).write_text(text)
        names = [kernel.name for kernel in translate(text, filename=source.name).kernels]
        index.append(" ".join([source.stem, *names]))
    (metal / "index").write_text("\n".join(index) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, os.fspath(ROOT))
    print(build())
