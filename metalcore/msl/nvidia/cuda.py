"""The programs on CUDA devices, and their kernels' cubins, which are compiled when first used and kept on disk."""

import functools
import itertools
import json
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .. import cache
from ..errors import MSLError
from ..language.cuda_source import HAS_MATRICES, HOLDS_FRAGMENTS
from . import nvjitlink, nvrtc
from .joined_products import join_products
from .wide_loads import widen_loads

BUILTIN = 0  # the number of the program that has the built-in kernels
_LIBRARY = Path(__file__).resolve().parents[2] / "lib" / "cuda"
# Whole simdgroups of the built-in kernels call the simd functions, so these need not find the active lanes.
_BUILTIN_FLAGS = ("-DMSL_CONVERGENT=1",)
_ENTRY = "metalcore_0"  # cuda_source()'s name for the first entry; a cubin has one entry

_MATRIX_MARK = b"// msl.matrix"  # cuda/target/matrix_product.h marks where lanes have elements of matrices


class CudaProgram:
    """The source that kernels for CUDA devices are compiled from.

    Args:
        digest: a digest of all that the translated text depends on.
        load: () -> (Translation.guarded, Translation.cuda_kernels()); called when a kernel has to be compiled.
        msl: the source, quoted in errors.
        flags: options for NVRTC besides the usual ones.
        source: the file of built-in kernels, which errors name; "" for others.
    """

    def __init__(self, digest, load, *, msl="", flags=(), source=""):
        self.digest = digest
        self.source = source
        self._load = load
        self._lock = threading.Lock()
        self._loaded = None
        self._msl = msl
        self._flags = flags

    def cubin(self, capability, kernel, signature):
        """Returns the code of one kernel for GPUs of this compute capability, from the cache if it is there."""

        def make(path):
            path.write_bytes(self._compile(capability, [(kernel, signature)]))

        return cache.content(self._key(capability, kernel, signature) + ".cubin", make)

    def check(self, capability):
        """Raises an MSLError where the program has an error outside of templates: compiles it without its kernels."""

        def make(path):
            self._compile(capability, [])
            path.touch()

        cache.entry(self._key(capability) + ".checked", make)

    def _key(self, capability, *what):
        tools = str(nvrtc.find().version), str(bool(nvjitlink.find()))
        return cache.digest(self.digest, *what, str(capability), *tools, *self._all_flags())

    def _all_flags(self):
        # For example -lineinfo, with which profilers and sanitizers show the kernels' lines.
        return (*nvrtc.FLAGS, *self._flags, *os.environ.get("METALCORE_NVRTC_FLAGS", "").split())

    def _compile(self, capability, requests):
        from ..language.cuda_source import cuda_source

        with self._lock:
            if self._loaded is None:
                self._loaded = self._load()
            program, kernels = self._loaded
        text, _ = cuda_source(program, kernels, requests)
        try:
            return self._code(text, capability)
        except MSLError as error:
            if not str(error).startswith(str(nvrtc.INCLUDE)):
                raise
            # The error is in the entry, which binds the kernel's arguments: for example, a binding is too small.
            place = f" of {self.source}" if self.source else ""
            bound = ", ".join(f"kernel '{kernel}'{place}, bound as {signature}" for kernel, signature in requests)
            raise MSLError(f"{bound}: {error}") from None

    def _code(self, text, capability):
        """Returns the cubin, with joined products where the program has products of matrices, and with joined loads
        where its lanes hold fragments."""
        flags = self._all_flags()
        code, ptx = nvrtc.find().compile_with_ptx(text, capability, flags=flags, msl=self._msl)
        if HOLDS_FRAGMENTS in text and _MATRIX_MARK in ptx:
            return self._code(text.replace(HOLDS_FRAGMENTS, HAS_MATRICES), capability)
        joined = join_products(ptx)
        if HOLDS_FRAGMENTS in text:
            joined = widen_loads(joined)
        if joined == ptx:
            return code
        if code == ptx:
            return joined
        linker = nvjitlink.find()
        return (linker and linker.assemble(joined, capability, flags)) or code


# The programs of compile_shader ------------------------------------------------------------------------------------

_programs = {}  # number -> CudaProgram
_numbers = {}  # CudaProgram.digest -> number
_count = itertools.count(BUILTIN + 1)
_lock = threading.Lock()


def register(program):
    """Returns the program's number, by which its kernels are dispatched. Programs of the same content have the same
    number."""
    with _lock:
        number = _numbers.get(program.digest)
        if number is None:
            number = _numbers[program.digest] = next(_count)
            _programs[number] = program
        return number


def compile_kernels(capability, requests):
    """Compiles kernels that the CUDA backend has not loaded; the backend calls it.

    Args:
        capability: the GPU's compute capability, as 90 for 9.0.
        requests: [(program's number, kernel, signature)]; compiled in parallel.

    Returns:
        [(cubin, or PTX; the kernel's name in it; the file of a built-in kernel or "")].
    """

    def compiled(request):
        number, kernel, signature = request
        program = _builtin_program(kernel) if number == BUILTIN else _programs[number]
        return program.cubin(capability, kernel, signature), _ENTRY, program.source

    if len(requests) == 1:
        return [compiled(requests[0])]
    with ThreadPoolExecutor(min(len(requests), len(os.sched_getaffinity(0)))) as pool:
        return list(pool.map(compiled, requests))


# The built-in kernels ----------------------------------------------------------------------------------------------


def build(translation, output, *, root):
    """Writes a translated file of built-in kernels to `output`, and describe()'s data beside it (.json). The pointers
    that they cast are aligned, so their accesses need no guards.

    Args:
        root: the directory that paths in compilers' messages are relative to.
    """
    program = re.sub(rf'^(#line \d+ "){re.escape(str(root))}/', r"\1", translation.program, flags=re.MULTILINE)
    kernels = translation.cuda_kernels()
    digest = cache.digest(cache.translator_digest(), program, json.dumps(kernels))
    output.write_text(program, encoding="utf-8")
    output.with_suffix(".json").write_text(json.dumps({"digest": digest, "kernels": kernels}))


@functools.lru_cache(maxsize=1)
def builtin_programs():
    """Returns {family: (digest, {kernel: describe()'s data})} of the built-in kernels. A family is the path of its
    source below kernels/, without the suffix."""
    programs = {}
    for path in sorted(_LIBRARY.rglob("*.json")):
        described = json.loads(path.read_text())
        family = path.relative_to(_LIBRARY).with_suffix("").as_posix()
        programs[family] = described["digest"], described["kernels"]
    return programs


@functools.lru_cache(maxsize=1)
def _families():
    """Returns {kernel: its family's CudaProgram}."""
    found = {}
    for family, (digest, kernels) in builtin_programs().items():
        load = functools.partial(_read_family, family)
        program = CudaProgram(digest, load, flags=_BUILTIN_FLAGS, source=f"{family}.metal")
        found |= dict.fromkeys(kernels, program)
    return found


def _read_family(family):
    return (_LIBRARY / f"{family}.cu").read_text(encoding="utf-8"), builtin_programs()[family][1]


def _builtin_program(kernel):
    try:
        return _families()[kernel]
    except KeyError:
        raise RuntimeError(f"metalcore: there is no built-in kernel '{kernel}' in {_LIBRARY}") from None
