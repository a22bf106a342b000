"""compile_shader: MSL from Python, with the interface of torch.mps.compile_shader."""

import json
import os
from pathlib import Path

import torch

from .. import _C
from . import cache, host
from .inline_headers import inline_headers
from .kernel import Kernel
from .translate import translate

# A program with more kernels than the first number is compiled kernel by kernel, each when it is first used; up to the
# second, all of them are looked through for errors before.
_COMPILED_AT_ONCE = 4
_CHECKED_AT_ONCE = 64


class KernelNotFoundError(RuntimeError, AttributeError):
    """The program has no kernel of that name. PyTorch raises a RuntimeError here; `hasattr` needs an AttributeError."""


def compile_shader(source, *, include_dirs=(), constants=None):
    """Compiles MSL and gives access to its kernels, as `torch.mps.compile_shader` does.

        lib = metalcore.compile_shader('''
            kernel void fill(device float* out, constant float& value, uint i [[thread_position_in_grid]]) {
              out[i] = value;
            }''')
        x = torch.empty(16, device="mps")
        lib.fill(x, 3.14)

    The program is compiled once per machine and kept on disk ($METALCORE_CACHE_DIR, by default ~/.cache/metalcore).

    Args:
        source: MSL text.
        include_dirs: directories in which `#include` looks, in order; PyTorch's own (`c10/metal/…`) come last.
        constants: values of function constants: {index or name: bool, int, float or a tuple of them}. Not on a Mac.

    Returns:
        A ShaderLibrary: its attributes are the program's kernels, and `dir()` lists them. On a Mac, PyTorch's.

    Raises:
        MSLError: the source does not compile; the message shows its lines (a SyntaxError and a RuntimeError).
        CompilerNotFoundError: this machine has no C++ compiler.
    """
    if not isinstance(source, str):
        raise TypeError(f"compile_shader(): source must be a str, not {type(source).__name__}")
    if isinstance(include_dirs, (str, os.PathLike)):
        raise TypeError("compile_shader(): include_dirs must be a sequence of directories, not one path")
    directories = [*map(os.fspath, include_dirs), str(Path(torch.__file__).parent / "include")]
    if hasattr(_C, "simulator_load"):
        return ShaderLibrary(source, directories, dict(constants or {}))
    if constants:
        raise RuntimeError("compile_shader(): torch.mps.compile_shader, which does this on a Mac, takes no constants")
    return torch.mps.compile_shader(inline_headers(source, "program_source", directories))


class ShaderLibrary:
    """The kernels of a compiled program, as attributes."""

    def __init__(self, source, include_dirs, constants):
        self._source = source
        self._include_dirs = include_dirs
        self._constants = constants
        self._kernels = {}
        self._loaded = {}
        self._translation = None
        manifest = self._manifest()
        self._names = manifest["kernels"]
        self._with_threadgroup_memory = manifest["threadgroup_memory"]
        self._program = cache.digest(self._request(), json.dumps(manifest["included"]))
        if len(self._names) <= _COMPILED_AT_ONCE:
            self._shared_object(None, checking=False)

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

    def _request(self):
        """A name for the translation's input, apart from the content of the files it includes."""
        constants = repr(sorted(self._constants.items(), key=repr))
        return cache.digest(self._source, json.dumps(self._include_dirs), constants, host.translator_digest())

    def _manifest(self):
        """The names of the program's kernels and the digests of its included files, from the cache where possible."""

        def make(path):
            translation = self._translated()
            names = [kernel.name for kernel in translation.kernels]
            if len(names) > _COMPILED_AT_ONCE:
                host.check_source(translation.source(names[:_CHECKED_AT_ONCE]), msl=self._source)
            included = {name: cache.digest(text) for name, text in translation.included.items()}
            memory = [kernel.name for kernel in translation.kernels if kernel.has_threadgroup_variables]
            path.write_text(json.dumps({"kernels": names, "included": included, "threadgroup_memory": memory}))

        def up_to_date(content):
            return all(_file_digest(path) == known for path, known in json.loads(content)["included"].items())

        return json.loads(cache.content(cache.entry(self._request() + ".json", make, accept=up_to_date)))

    def _translated(self):
        if self._translation is None:
            self._translation = translate(self._source, include_dirs=self._include_dirs, constants=self._constants)
        return self._translation

    def _shared_object(self, names, *, checking):
        """The path of the shared object with these kernels; all of them for None."""
        compiler = " ".join([repr(host.find_compiler()), *host.arguments(checking=checking), host.cpu_identity()])
        key = cache.digest(self._program, json.dumps(names), compiler)

        def make(path):
            host.compile_source(self._translated().source(names), path, checking=checking, msl=self._source)

        return cache.entry(key + ".so", make)

    def _load(self, name, *, checking):
        """The executor's number of a library that has the kernel."""
        names = [name] if len(self._names) > _COMPILED_AT_ONCE else None
        key = (names and name, checking)
        if key not in self._loaded:
            self._loaded[key] = _C.simulator_load(os.fspath(self._shared_object(names, checking=checking)))
        return self._loaded[key]


def _file_digest(path):
    try:
        return cache.digest(Path(path).read_text(encoding="utf-8-sig", errors="replace"))
    except OSError:
        return None
