"""libmetalcore, the library for C, and the files by which CMake and pkg-config find it.

It has the sources of csrc/gpu, csrc/ops and the backends that the ops' extension has, and csrc/c_api, which takes the
place of PyTorch's and Python's part. It links with neither.
"""

import re

from setuptools import Extension

from .ops_extension import link_flags, torch_package
from .places import CSRC, LINUX, PACKAGE, ROOT

_C_API = CSRC / "c_api"
# Families of ops that C functions call. The rest of csrc/ops would only make the library larger.
_OPS = (
    *(
        "add_cast",
        "common",
        "elementwise",
        "replacement",
        "rows",
        "softmax",
        "activation/gated",
        "norm/norm_rows",
        "norm/rms_norm",
    ),
    *("norm/column_sums", "rope/rope", "embedding/embedding", "attention/decode", "attention/paged"),
    *("sampling/sample", "sampling/top_k", "gemm/gemm", "gemm/plan"),
)
# What needs Python or PyTorch's functions, and is replaced by csrc/c_api or left out.
_REPLACED = (
    *("gpu/kept", "gpu/replay", "backends/simulator/python", "backends/simulator/python_signals"),
    "backends/simulator/compiler",
    *("backends/cuda/python", "backends/cuda/compiler", "backends/cuda/torch_stream"),
)


def c_library():
    """[a setuptools.Extension]; none where the platform has no backend for it."""
    if not LINUX:
        return []
    extension = Extension(
        "metalcore.libmetalcore",
        sources=sources(),
        extra_compile_args=compile_flags(),
        extra_link_args=[
            *(*link_flags(), "-Wl,--gc-sections", "-Wl,--no-undefined", "-Wl,-soname,libmetalcore.so"),
            f"-Wl,--version-script={_C_API / 'package' / 'exports.map'}",
        ],
        libraries=["dl", "pthread"],
    )
    extension.output, extension.objects = "lib/libmetalcore.so", "c_objects"
    return [extension]


def sources():
    """The paths of its sources, from the repository's root."""
    found = [CSRC / "ops" / f"{name}.cpp" for name in _OPS]
    for folder in ("gpu", "backends/simulator", "backends/cuda", "c_api"):
        found += (CSRC / folder).rglob("*.cpp")
    replaced = [CSRC / f"{name}.cpp" for name in _REPLACED]
    return sorted(path.relative_to(ROOT).as_posix() for path in found if path not in replaced)


def compile_flags():
    return [
        *("-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", "-ffunction-sections", "-fdata-sections"),
        *("-Wall", "-Wno-unknown-pragmas", f'-DMETALCORE_VERSION="{version()}"'),
        # In front of PyTorch's headers, of which those of scalar types are used: they need no library.
        *(f"-I{folder}" for folder in (_C_API / "without_torch", PACKAGE / "include", PACKAGE / "msl" / "include")),
        *("-isystem", str(torch_package() / "include")),
    ]


def version():
    (found,) = re.findall(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    return found


def c_files(tasks):
    """lib/pkgconfig/metalcore.pc and lib/cmake/metalcore/, which find library and header from where they lie."""
    if not LINUX:
        return []
    targets = {
        "metalcore.pc": "lib/pkgconfig/metalcore.pc",
        "metalcore-config.cmake": "lib/cmake/metalcore/metalcore-config.cmake",
        "metalcore-config-version.cmake": "lib/cmake/metalcore/metalcore-config-version.cmake",
    }
    outputs = []
    for name, target in targets.items():
        source = _C_API / "package" / f"{name}.in"
        outputs.append(
            tasks.add(
                target,
                [source],
                [version()],
                lambda output, source=source: output.write_text(source.read_text().replace("@VERSION@", version())),
            )
        )
    return outputs
