"""Kernels that are generated while a process runs. Recordings name them as they name the built-in ones.

A source has one kernel. Each backend asks for it when the kernel is first dispatched, and keeps on disk what was
compiled: the simulator's shared objects and CUDA's cubins lie in the cache of compile_shader's programs.
"""

from __future__ import annotations

import functools
import os
import threading
from typing import Any

from .. import _C

# Each operation of a generated kernel rounds as it is written: a product and a sum do not become one operation.
_CUDA_FLAGS = ("--fmad=false",)
_CONVERGENT = "-DMSL_CONVERGENT=1"  # see msl/include/cuda/target/lanes.h
MARK = "KERNEL_NAME"

_sources: dict[str, str] = {}  # by kernel
_convergent: set[str] = set()
_lock = threading.Lock()


def add(stem: str, source: str, convergent: bool = False) -> str:
    """Makes a kernel known to recordings.

    Args:
        stem: the beginning of its name.
        source: MSL whose one kernel is called KERNEL_NAME.
        convergent: whole simdgroups call its simd functions, so that these need not find the active lanes.

    Returns:
        The kernel's name, which ends in a digest of the source.
    """
    from ..msl import cache

    name = f"{stem}_{cache.digest(source)[:16]}"
    with _lock:
        if name not in _sources:
            _sources[name] = source.replace(MARK, name)
            if convergent:
                _convergent.add(name)
            _C.add_generated(name, _sources[name])
    return name


def source(kernel: str) -> str:
    """Returns the MSL of a generated kernel. Raises KeyError where there is none."""
    return _sources[kernel]


def is_known(kernel: str) -> bool:
    """Returns whether a kernel is a generated one."""
    return kernel in _sources


def translated(kernel: str) -> dict[str, Any]:
    """Returns what NVRTC compiles a generated kernel from: the text, and cuda_source's description of the kernel."""
    translation = program_of(kernel).translation
    return {"program": translation.program, "kernel": translation.cuda_kernels()[kernel]}


def cuda_number(kernel: str) -> int | None:
    """Returns the number of a generated kernel's program among those of msl/nvidia/cuda.py, or None for other
    kernels."""
    return _cuda_number(kernel) if kernel in _sources else None


@functools.cache
def _cuda_number(kernel):
    from ..msl.nvidia import cuda

    program = program_of(kernel)

    def load():
        return program.translation.program, program.translation.cuda_kernels()

    flags = (*_CUDA_FLAGS, _CONVERGENT) if kernel in _convergent else _CUDA_FLAGS
    return cuda.register(cuda.CudaProgram(program.digest, load, msl=program.source, flags=flags))


@functools.cache
def program_of(kernel):
    from ..msl.runtime.library import ShaderProgram

    return ShaderProgram(_sources[kernel], [], {})


def shared_object(kernel: str, family: str | None, checking: bool, flushing: bool) -> str:
    """Returns the path of the simulator's library with the kernel, which it compiles where it is not in the cache.

    Args:
        family: of a built-in kernel that the build has left out; None for a generated one.
    """
    if family is not None:
        from ..msl.runtime import host

        return os.fspath(host.shared_object(family, checking, flushing))
    from ..msl.runtime.targets import SimulatorTarget

    return os.fspath(SimulatorTarget(program_of(kernel))._shared_object(None, checking=checking))


if hasattr(_C, "simulator_set_compiler"):
    _C.simulator_set_compiler(shared_object)
