"""metalcore._C, the extension with the ops and the backends: what it is made from, and with which flags.

Only PyTorch's stable ABI and Python's limited API are used, so the one binary serves every torch >= 2.10 and every
Python >= 3.10.
"""

import os
import re
import sysconfig
from pathlib import Path

import torch
from setuptools import Extension

from .places import CSRC, LINUX, MACOS, MACOS_VERSION, PACKAGE, ROOT

TORCH_2_10 = "0x020a000000000000"
PYTHON_3_10 = "0x030a0000"
# Folders of csrc/backends.
BACKENDS = {"mps"} if MACOS else {"simulator", "cuda"} if LINUX else set()
FRAMEWORKS = ("-framework", "Metal", "-framework", "Foundation", "-framework", "IOKit")


def ops_extension():
    """Returns a setuptools.Extension."""
    package = torch_package()
    extension = Extension(
        "metalcore._C",
        sources(),
        py_limited_api=True,
        extra_compile_args=_compile_flags(package),
        extra_link_args=link_flags(),
        library_dirs=[str(package / "lib")],
        # Not libc10, which has nothing of the stable ABI.
        libraries=["torch_cpu", "torch", *(["dl", "pthread"] if LINUX else [])],
    )
    extension.output, extension.objects = "_C.abi3.so", "objects"
    return extension


def sources():
    """Returns csrc's files, except the backends of other platforms and what becomes another library."""
    others = [folder for folder in (CSRC / "backends").iterdir() if folder.name not in BACKENDS]
    others += [CSRC / "simulated_device", CSRC / "c_api"]
    return sorted(
        path.relative_to(ROOT).as_posix()
        for path in CSRC.rglob("*")
        if path.suffix in (".cpp", ".mm") and not any(folder in path.parents for folder in others)
    )


def torch_package():
    """Returns PyTorch's package: this Python's, or METALCORE_TORCH for another platform's headers and libraries."""
    return Path(os.environ.get("METALCORE_TORCH") or Path(torch.__file__).parent)


def _compile_flags(package):
    (version,) = re.findall(r"^__version__ = '(.*)'", (package / "version.py").read_text(), re.MULTILINE)
    flags = [
        "-std=c++20",
        "-O2",
        "-fPIC",
        "-fvisibility=hidden",
        "-Wall",
        "-Wno-unknown-pragmas",
        f"-DTORCH_TARGET_VERSION={TORCH_2_10}",
        f"-DPy_LIMITED_API={PYTHON_3_10}",
        # For the build alone, which compares commands and not the system's headers.
        f"-DMETALCORE_BUILT_WITH_TORCH={version}",
        f"-I{PACKAGE / 'msl' / 'include'}",
    ]
    if MACOS:
        flags += mac_compile_flags()
    for path in (package / "include", package / "include/torch/csrc/api/include", sysconfig.get_path("include")):
        flags += ["-isystem", str(path)]
    return flags


def link_flags():
    if MACOS:
        # Python's functions are in the process that loads the extension.
        return [*mac_flags(), "-bundle", "-Wl,-undefined,dynamic_lookup", *FRAMEWORKS]
    return ["-shared"]


def mac_compile_flags():
    # Clang turned sized deallocation on in version 19, Apple's at another time: one binary whichever builds it.
    return [*mac_flags(), "-fno-sized-deallocation"]


def mac_flags():
    return ["-arch", "arm64", f"-mmacosx-version-min={MACOS_VERSION}"]
