"""NVRTC, NVIDIA's compiler for CUDA C++ at run time: finding it, running it, and showing its errors in terms of MSL."""

import ctypes
import functools
import importlib.util
import os
import re
import sys
import threading
from pathlib import Path
from typing import Any

from ..errors import CompilerNotFoundError, MSLError, quote_error
from ..language.cuda_source import NAMESPACE

INCLUDE = Path(__file__).parents[1] / "include"
# No fast math: functions whose accuracy MSL leaves to the GPU are as accurate as CUDA's own.
FLAGS = (
    "-std=c++20",  # designated initializers
    "--device-as-default-execution-space",  # MSL's functions have no annotation
    "--device-int128",
    "--fmad=true",
    "--ftz=false",
    "--prec-div=true",
    "--prec-sqrt=true",
    "--disable-warnings",
)
_INCLUDE = (f"--include-path={INCLUDE}", f"--include-path={INCLUDE / 'cuda'}")
# The first version that has C++20's built-ins and does not set the process's locale to "C". PyTorch 2.10 comes with it.
_OLDEST = (12, 6)
_TENSORS = '#include "metal/tensor_ops.h"'
_MAJORS = (13, 12)  # major versions, whose libraries are looked for by name


class NVRTC:
    """An NVRTC library. It is opened when it first compiles; its version is known before."""

    def __init__(self, path):
        self.path = Path(os.path.realpath(path))  # the real file's name has the version
        self._lock = threading.Lock()
        self._library: Any = None

    def __repr__(self):
        return f"NVRTC {'.'.join(map(str, self.version))} ({self.path})"

    @functools.cached_property
    def version(self):
        """(major, minor). The name of the library of builtins tells it, so a cubin is found without opening 100 MB."""
        for path in self._builtins():
            release = re.search(r"\.so\.(\d+)\.(\d+)", path)
            assert release is not None, path
            return tuple(map(int, release.groups()))
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._open().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    def architectures(self):
        """Returns the compute capabilities that it compiles for, ascending: 75, 80 …."""
        library, count = self._open(), ctypes.c_int()
        self._check(library.nvrtcGetNumSupportedArchs(ctypes.byref(count)))
        found = (ctypes.c_int * count.value)()
        self._check(library.nvrtcGetSupportedArchs(found))
        return sorted(found)

    def target(self, capability):
        """Returns the value of --gpu-architecture for a GPU of this compute capability (90 for 9.0): its own
        architecture. For a GPU that is newer than this NVRTC it is the newest virtual one, whose PTX the driver
        compiles.

        Raises:
            CompilerNotFoundError: this NVRTC no longer compiles for such an old GPU.
        """
        known = self.architectures()
        if capability in known:
            return f"sm_{capability}"
        older = [architecture for architecture in known if architecture < capability]
        if not older:
            raise CompilerNotFoundError(
                f"{self} compiles for compute capability {_dotted(known[0])} and newer; this GPU has "
                f"{_dotted(capability)}. An older NVRTC does: pip install nvidia-cuda-nvrtc-cu12"
            )
        return f"compute_{older[-1]}"

    def compile(self, text, capability, *, flags=FLAGS, msl="", filename="program_source"):
        """Compiles CUDA C++. Several threads may compile at once.

        Args:
            text: the program, whose kernels are `extern "C"`.
            capability: the GPU's compute capability, as 90 for 9.0.
            msl: the user's source, quoted in errors.
            filename: how errors call it.

        Returns:
            bytes: a cubin, or PTX where the GPU is newer than this NVRTC.

        Raises:
            MSLError: the program does not compile; the message shows the user's lines.
            CompilerNotFoundError: this NVRTC knows no such GPU.
        """
        return self.compile_with_ptx(text, capability, flags=flags, msl=msl, filename=filename)[0]

    def compile_with_ptx(self, text, capability, *, flags=FLAGS, msl="", filename="program_source"):
        """Compiles as `compile` does. Returns its result and the PTX (bytes)."""
        target = self.target(capability)
        if target == "sm_90" and _TENSORS in text:
            target = "sm_90a"  # with wgmma, which only these programs have use for
        library, program = self._open(), ctypes.c_void_p()
        self._check(library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"msl_program", 0, None, None))
        try:
            options = [option.encode() for option in (f"--gpu-architecture={target}", *_INCLUDE, *flags)]
            failed = library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
            if failed:
                log = self._read(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
                raise MSLError(explain(log, msl, filename) or f"{self} failed:\n{log or self._name(failed)}")
            ptx = self._read(program, "PTX")
            return self._read(program, "CUBIN") if target.startswith("sm_") else ptx, ptx
        finally:
            library.nvrtcDestroyProgram(ctypes.byref(program))

    def _read(self, program, what):
        size = ctypes.c_size_t()
        self._check(getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        content = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, f"nvrtcGet{what}")(program, content))
        return content.raw

    def _check(self, result):
        if result:
            raise RuntimeError(f"{self}: {self._name(result)}")

    def _name(self, result):
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        return self._library.nvrtcGetErrorString(result).decode()

    def _builtins(self):
        """Returns the paths of the libraries of builtins beside it, the newest first, of its version as far as its name
        tells that."""
        release = re.search(r"\.so\.(\d+)(\.\d+)?", self.path.name)
        if not release:
            return []
        found = map(str, self.path.parent.glob(f"libnvrtc-builtins.so.{release[1]}{release[2] or ''}*"))
        versions = {path: tuple(map(int, re.findall(r"\d+", path.rsplit(".so.", 1)[1])))[:2] for path in found}
        return sorted(
            (path for path in versions if len(versions[path]) == 2), key=lambda path: versions[path], reverse=True
        )

    def _open(self):
        with self._lock:
            if self._library is None:
                try:
                    # NVRTC opens its builtins by name, and may not find them in a Python package by itself.
                    for path in self._builtins()[:1]:
                        ctypes.CDLL(path)
                    self._library = ctypes.CDLL(os.fspath(self.path))
                except OSError as error:
                    raise CompilerNotFoundError(f"NVRTC cannot be opened: {error}") from None
            return self._library


def find():
    """Returns the NVRTC to use: $METALCORE_NVRTC, or else the first one that is new enough among the one that this
    process has open, those of NVIDIA's Python packages (PyTorch's is there), and the system's. Those of PyTorch's CUDA
    release come first.

    Raises:
        CompilerNotFoundError: there is none, or none is new enough.
    """
    return _find(os.environ.get("METALCORE_NVRTC"), os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"))


@functools.lru_cache(maxsize=8)
def _find(explicit, *homes):
    found = [NVRTC(explicit)] if explicit else [NVRTC(path) for path in _candidates(homes)]
    unusable = []
    for nvrtc in sorted(found, key=lambda nvrtc: _is_pytorchs(nvrtc.path), reverse=True):
        try:
            if nvrtc.version >= _OLDEST:
                return nvrtc
            unusable.append(repr(nvrtc))
        except (CompilerNotFoundError, AttributeError) as error:  # the file is missing, no library, or another library
            unusable.append(f"{nvrtc.path}: {error}")
    looked = [f"METALCORE_NVRTC={explicit}"] if explicit else [*map(str, folders(homes)), "the system's libraries"]
    raise CompilerNotFoundError(
        f"running kernels on a CUDA device needs NVRTC {'.'.join(map(str, _OLDEST))} or newer: pip install "
        f"nvidia-cuda-nvrtc, or set METALCORE_NVRTC to the path of libnvrtc.so. "
        + (f"Found {'; '.join(unusable)}" if unusable else f"Looked in {', '.join(looked)}")
    )


def _candidates(homes):
    """Returns the paths of libraries, in the order of preference."""
    paths: list = [_loaded()]
    for folder in folders(homes):
        for name in (*(f"libnvrtc.so.{major}" for major in _MAJORS), "libnvrtc.so"):
            path = folder / name
            if path.exists():
                paths.append(path)
                break
    return list(filter(None, paths)) or _of_the_loader()


def _loaded():
    """Returns the path of the NVRTC that this process has open."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    lines = [line for line in maps.splitlines() if "/libnvrtc.so" in line]
    return lines[0][lines[0].index("/") :] if lines else None


def folders(homes):
    """Returns the folders in which libraries may lie: NVIDIA's packages, Conda's, CUDA's home, its usual place."""
    spec = importlib.util.find_spec("nvidia")
    packages = [Path(path) for path in (spec.submodule_search_locations or ())] if spec else []
    folders = [folder for package in packages for folder in sorted(package.glob("*/lib"), reverse=True)]
    folders.append(Path(sys.prefix) / "lib")
    for home in (*filter(None, homes), "/usr/local/cuda"):
        folders += [Path(home) / "lib64", Path(home) / "lib"]
    return folders


def _of_the_loader():
    """Returns the path of the library that the dynamic loader finds by name."""
    for name in (*(f"libnvrtc.so.{major}" for major in _MAJORS), "libnvrtc.so"):
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return [path] if (path := _loaded()) else []
    return []


def _is_pytorchs(path):
    import torch

    return bool(torch.version.cuda) and f".so.{torch.version.cuda.split('.')[0]}" in path.name


def _dotted(capability):
    return f"{capability // 10}.{capability % 10}"


_DIAGNOSTIC = re.compile(r"(?P<file>[^\s(][^(]*)\((?P<line>\d+)\): (?:catastrophic )?(?P<text>error.*)")
_INSTANTIATED = re.compile(r"at line (?P<line>\d+)(?: of \"?(?P<file>[^\s\"]+))?")


def explain(log, msl="", filename="program_source"):
    """Returns the errors in NVRTC's log, each at the user's line, with that line below it."""
    messages = []
    for part in log.split("\n\n"):
        first, *rest = part.strip("\n").split("\n")
        match = _DIAGNOSTIC.match(first)
        if match is None:
            continue
        file, line = match["file"], match["line"]
        column = next((len(text) - 2 for text in rest if text.strip() == "^"), None)  # NVRTC indents by two
        if not _in_program(file):
            for found in map(_INSTANTIATED.search, rest):
                if found and _in_program(found["file"] or file):
                    file, line, column = found["file"], found["line"], None
                    break
        text = match["text"].replace(f"{NAMESPACE}::", "")
        message = quote_error(file, line, column, text, msl, filename)
        if message not in messages:
            messages.append(message)
    return "\n".join(messages)


def _in_program(file):
    return not file.startswith(os.fspath(INCLUDE)) and file != "msl_entries"
