"""libmetalcore, the library for C, and the files by which CMake and pkg-config find it.

It has the sources of csrc/gpu, csrc/ops and the backends that the ops' extension has, and csrc/c_api, which takes the
place of PyTorch's and Python's part. It links with neither.
"""

import re

from setuptools import Extension

from .linux_kernels import on_first_use
from .ops_extension import BACKENDS, FRAMEWORKS, link_flags, mac_compile_flags, mac_flags, torch_package
from .places import C_LIBRARY, CSRC, LINUX, MACOS, PACKAGE, ROOT

_C_API = CSRC / "c_api"
# Families of ops that C functions call. The rest of csrc/ops would only make the library larger.
_OPS = (
    *("common/common", "common/elementwise", "common/replacement", "common/rows"),
    *("activation/gated", "activation/softmax", "attention/decode", "attention/decode_plan", "elementwise/add_cast"),
    "embeddings/embedding",
    *("gemm/gemm", "gemm/plan", "normalization/norm_rows", "normalization/rms_norm"),
    *("paged/paged", "rotary/rope", "sampling/sampling"),
)
# What needs Python or PyTorch's functions, and is replaced by csrc/c_api or left out.
_REPLACED = (
    *("gpu/replay", "backends/simulator/python", "backends/simulator/interpreter", "backends/cuda/python"),
    *("backends/mps/python", "backends/mps/backend"),
)
# The folder of csrc/c_api with the contexts of a backend.
_CONTEXTS = {"simulator": "cpu", "cuda": "cuda", "mps": "metal"}


def c_library():
    """Returns [a setuptools.Extension]; none where the platform has no backend for it, or the simulator's kernels are
    compiled on first use, which a C program cannot do."""
    if not BACKENDS or on_first_use():
        return []
    extension = Extension(
        "metalcore.libmetalcore",
        sources=sources(BACKENDS),
        extra_compile_args=compile_flags(),
        extra_link_args=_link_flags(),
        libraries=["dl", "pthread"] if LINUX else [],
    )
    extension.output, extension.objects = f"lib/{C_LIBRARY}", "c_objects"
    return [extension]


def sources(backends):
    """Returns the paths of its sources with some of csrc/backends, from the repository's root."""
    paths = {CSRC / "ops" / f"{name}.cpp" for name in _OPS}
    paths |= {*(CSRC / "gpu").glob("*.cpp"), *_C_API.glob("*.cpp"), *(_C_API / "program").glob("*.cpp")}
    for backend in backends:
        for folder in (CSRC / "backends" / backend, _C_API / _CONTEXTS[backend]):
            paths |= {path for path in folder.rglob("*") if path.suffix in (".cpp", ".mm")}
    replaced = {CSRC / name for name in _REPLACED}
    return sorted(path.relative_to(ROOT).as_posix() for path in paths if path.with_suffix("") not in replaced)


def _link_flags():
    if MACOS:
        exported = ["-Wl,-exported_symbol,_metalcore_*", "-Wl,-dead_strip"]
        return [*mac_flags(), "-dynamiclib", f"-Wl,-install_name,@rpath/{C_LIBRARY}", *exported, *FRAMEWORKS]
    exported = f"-Wl,--version-script={_C_API / 'package' / 'exports.map'}"
    return [*link_flags(), "-Wl,--gc-sections", "-Wl,--no-undefined", f"-Wl,-soname,{C_LIBRARY}", exported]


def compile_flags():
    return [
        *("-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", "-ffunction-sections", "-fdata-sections"),
        *("-Wall", "-Wno-unknown-pragmas", f'-DMETALCORE_VERSION="{version()}"'),
        *(mac_compile_flags() if MACOS else ()),
        # In front of PyTorch's headers, of which those of scalar types are used: they need no library.
        *(f"-I{folder}" for folder in (_C_API / "without_torch", PACKAGE / "include", PACKAGE / "msl" / "include")),
        *("-isystem", str(torch_package() / "include")),
    ]


def version():
    (found,) = re.findall(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    return found


def c_files(tasks):
    """Writes lib/pkgconfig/metalcore.pc and lib/cmake/metalcore/, which find library and header from their place."""
    if not BACKENDS or on_first_use():
        return []
    values = {"VERSION": version(), "LIBRARY": C_LIBRARY, "SONAME": f"@rpath/{C_LIBRARY}" if MACOS else C_LIBRARY}
    targets = {
        "metalcore.pc": "lib/pkgconfig/metalcore.pc",
        "metalcore-config.cmake": "lib/cmake/metalcore/metalcore-config.cmake",
        "metalcore-config-version.cmake": "lib/cmake/metalcore/metalcore-config-version.cmake",
    }
    return [
        tasks.add(
            target,
            [_C_API / "package" / f"{name}.in"],
            values,
            lambda output, name=name: output.write_text(_filled(_C_API / "package" / f"{name}.in", values)),
        )
        for name, target in targets.items()
    ]


def _filled(template, values):
    return re.sub(r"@(VERSION|LIBRARY|SONAME)@", lambda found: values[found[1]], template.read_text())
