"""compile_shader: MSL from Python, with the interface of torch.mps.compile_shader."""

import functools
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from .. import cache
from ..errors import MSLError
from ..language.inline_headers import inline_headers
from .arguments import checked_constants
from .kernel import Kernel
from .targets import TARGETS, default_device, target


class ShaderProgram:
    """A program and the options of its translation.

    Attributes:
        source: the MSL.
        names: the names of its kernels.
        aligned: whether pointers that the program casts keep the alignment of what they read.
        digest: a digest of all this, of the files it includes and of the translator.
    """

    def __init__(self, source, include_dirs, constants, aligned=False):
        self.source = source
        self.aligned = aligned
        self._include_dirs = include_dirs
        self._constants = constants
        self._summary = self._summarize()
        self.names = list(self._summary["kernels"])

    def __repr__(self):
        return f"<program of {len(self.names)} kernels>"

    def arguments(self, kernel):
        """Returns a kernel's buffers and threadgroup arguments, as dicts of kernels.Argument."""
        return self._summary["kernels"][kernel]["arguments"]

    def has_threadgroup_variables(self, kernel):
        return self._summary["kernels"][kernel]["threadgroup_variables"]

    @functools.cached_property
    def translation(self):
        from ..language.translate import translate  # a program that is in the cache does not need it

        return translate(self.source, include_dirs=self._include_dirs, constants=self._constants)

    @functools.cached_property
    def digest(self):
        return cache.digest(self._request(), json.dumps(self._summary["included"]), json.dumps(self.aligned))

    def _request(self):
        """Returns a name for the translation's input, without the content of the files that it includes."""
        constants = repr(sorted(self._constants.items(), key=repr))
        return cache.digest(self.source, json.dumps(self._include_dirs), constants, cache.translator_digest())

    def _summarize(self):
        """Returns the part of the translation that calls need, from the cache if it is there."""

        def make(path):
            kernels = {
                kernel.name: {
                    "arguments": [vars(a) for a in kernel.arguments if a.kind in ("buffer", "threadgroup")],
                    "threadgroup_variables": kernel.has_threadgroup_variables,
                }
                for kernel in self.translation.kernels
            }
            included = {name: cache.digest(text) for name, text in self.translation.included.items()}
            path.write_text(json.dumps({"kernels": kernels, "included": included}))

        def up_to_date(content):
            return all(_file_digest(path) == known for path, known in json.loads(content)["included"].items())

        return json.loads(cache.content(self._request() + ".json", make, accept=up_to_date))


def _file_digest(path):
    try:
        return cache.digest(Path(path).read_text(encoding="utf-8-sig", errors="replace"))
    except OSError:
        return None


class KernelNotFoundError(RuntimeError, AttributeError):
    """The program has no kernel of that name. PyTorch raises a RuntimeError here; `hasattr` needs an AttributeError."""


def compile_shader(
    source: str,
    *,
    include_dirs: Iterable[str | os.PathLike] = (),
    constants: Mapping[int | str, Any] | None = None,
    aligned: bool = False,
) -> Any:
    """Compiles MSL and gives access to its kernels, as `torch.mps.compile_shader` does, and also on `cuda` tensors.

        lib = metalcore.compile_shader('''
            kernel void fill(device float* out, constant float& value, uint i [[thread_position_in_grid]]) {
              out[i] = value;
            }''')
        x = torch.empty(16, device="mps")
        lib.fill(x, 3.14)

    The program is compiled once per machine and kept on disk ($METALCORE_CACHE_DIR, by default ~/.cache/metalcore): for
    the simulator by the C++ compiler, for CUDA devices by NVRTC.

    Args:
        source: MSL text.
        include_dirs: directories in which `#include` looks, in order; PyTorch's own (`c10/metal/…`) come last.
        constants: values of function constants: {index or name: bool, int, float or a tuple of them}, which fit the
            constants' types. Not supported on a Mac.
        aligned: promises that pointers which the program casts are aligned to what they read, as 16 bytes for a
            `float4` or for a struct of 16 bytes that is copied. On CUDA devices no access tests its address then, and
            one that breaks the promise is an error of the GPU, which ends the process's use of CUDA. Other devices need
            no promise.

    Returns:
        A ShaderLibrary: its attributes are the program's kernels, and `dir()` lists them. On a Mac it is PyTorch's.

    Raises:
        TypeError: an argument has another type.
        MSLError: the source does not compile, or a value does not fit its constant; the message shows the source's
            lines. An MSLError is a SyntaxError and a RuntimeError.
        CompilerNotFoundError: this machine has no C++ compiler or, on a CUDA device, no NVRTC.

    Example:
        >>> source = "kernel void twice(device float* x, uint i [[thread_position_in_grid]]) { x[i] *= 2; }"
        >>> x = torch.ones(4, device="mps")
        >>> metalcore.compile_shader(source).twice(x)
        >>> x.tolist()
        [2.0, 2.0, 2.0, 2.0]
    """
    if not isinstance(source, str):
        raise TypeError(f"compile_shader(): source must be a str, not {type(source).__name__}")
    try:
        source.encode()
    except UnicodeEncodeError as error:
        line = source.count("\n", 0, error.start) + 1
        raise MSLError(f"program_source:{line}: error: a character is no Unicode: {error.reason}") from None
    if isinstance(include_dirs, (str, os.PathLike)):
        raise TypeError("compile_shader(): include_dirs must be a sequence of directories, not one path")
    if type(aligned) is not bool:
        raise TypeError(f"compile_shader(): aligned must be a bool, not {type(aligned).__name__}")
    directories = [*(os.fspath(path) for path in include_dirs), str(Path(torch.__file__).parent / "include")]
    if not TARGETS:
        if constants:
            raise RuntimeError(
                "compile_shader(): torch.mps.compile_shader, which does this on a Mac, takes no constants"
            )
        return torch.mps.compile_shader(inline_headers(source, "program_source", directories))
    constants = checked_constants({} if constants is None else constants)
    return ShaderLibrary(ShaderProgram(source, directories, constants, aligned))


class ShaderLibrary:
    """The kernels of a compiled program, as attributes."""

    def __init__(self, program):
        self._program = program
        self._names = program.names
        self._kernels = {}
        self._targets = {}
        self._target().prepare()

    def _target(self, device=None):
        """Returns the target that runs the kernels on a device; None means the default device."""
        device = device or default_device()
        if device not in self._targets:
            self._targets[device] = target(self._program, device)
        return self._targets[device]

    def __getattr__(self, name):
        if name.startswith("_"):
            names = self.__dict__.get("_names", ())
            if name not in names:
                raise AttributeError(name)
        if name not in self._names:
            known = ", ".join(self._names[:8]) + (", …" if len(self._names) > 8 else "")
            raise KernelNotFoundError(
                f"Failed to create function state object for: {name} (the program's kernels: {known or 'none'})"
            )
        if name not in self._kernels:
            self._kernels[name] = Kernel(self, name)
        return self._kernels[name]

    def __dir__(self):
        return list(self._names)

    def __iter__(self):
        return iter(self._names)

    def __repr__(self):
        return f"<metalcore ShaderLibrary of {len(self._names)} kernels>"
