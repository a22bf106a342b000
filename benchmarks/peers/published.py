"""Kernels of a checkout that the user names, and launches of them."""

from __future__ import annotations

import functools
import os
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

import metalcore
from metalcore.msl.runtime import signatures
from metalcore.msl.runtime.arguments import Arguments, common_device, threadgroup_lengths
from metalcore.msl.runtime.library import KernelNotFoundError
from metalcore.msl.runtime.targets import CudaTarget


@dataclass(frozen=True)
class Published:
    """A file of kernels in a checkout.

    Attributes:
        include_dirs: where its `#include` looks.
        macros: names that the project's build defines.
        text: the program, in place of the file's text. It can include the file and instantiate few of its templates.
        aligned: whether its kernels read tensors only where these are aligned. metalcore's tests of addresses, which
            such kernels do not need, would cost them time.
    """

    file: Path
    include_dirs: tuple[Path, ...] = ()
    macros: tuple[str, ...] = ()
    aligned: bool = True
    text: str = ""

    def library(self, constants, make=metalcore.compile_shader):
        """Returns the compiled program with these values of its function constants. `make` compiles it."""
        return _library(self, tuple(sorted(constants.items())), make)


@functools.cache
def _library(published, constants, make):
    macros = "".join(f"#define {name} 1\n" for name in published.macros)
    source = f'{macros}#line 1 "{published.file.name}"\n{published.text or published.file.read_text(encoding="utf-8")}'
    directories, aligned = published.include_dirs, published.aligned
    return make(source, include_dirs=directories, constants=dict(constants), aligned=aligned)


def checkout(option, folder, *files):
    """Returns the first of these files that a checkout has.

    Raises:
        ValueError: it has none of them.
    """
    for file in files:
        if (Path(folder) / file).is_file():
            return (Path(folder) / file).resolve()
    raise ValueError(f"{option} {folder}: there is no {' or '.join(files)} in this folder")


def struct_argument(layout, *values):
    """Returns a struct that is passed by value, as the 64-bit integers that a call binds. `layout` is that of Python's
    struct with the alignment of C."""
    content = struct.pack("@" + layout, *values)
    content += bytes(-len(content) % 8)
    return list(struct.unpack(f"<{len(content) // 8}q", content))


@dataclass(frozen=True)
class Launch:
    """One kernel with its arguments. `groups` counts threadgroups, `group` the threads of one."""

    published: Published
    constants: dict
    kernel: str
    arguments: tuple
    groups: tuple[int, int, int]
    group: tuple[int, int, int]
    threadgroup_memory: int = 0

    @functools.cached_property
    def call(self):
        return self.by(metalcore.compile_shader)

    def by(self, make):
        """Returns the call of the kernel that `make` compiles."""
        library = self.published.library(self.constants, make)
        return functools.partial(
            getattr(library, self.kernel),
            *self.arguments,
            threads=tuple(groups * threads for groups, threads in zip(self.groups, self.group)),
            group_size=self.group,
            **({"threadgroup_memory": self.threadgroup_memory} if self.threadgroup_memory else {}),
        )

    def code(self):
        """Returns what NVRTC compiles for this launch: the program, the kernel, and the signature of the call."""
        library = self.published.library(self.constants)
        getattr(library, self.kernel)  # it raises an error that names the kernels that there are
        program = library._program
        declared = program.arguments(self.kernel)
        bound = Arguments(self.kernel, self.arguments, None, declared, common_device(self.arguments)).buffers
        memory = self.threadgroup_memory
        lengths = threadgroup_lengths(memory, self.kernel, declared) if memory else []
        return Code(program, self.kernel, signatures.of_call(bound, lengths))


class Launches:
    """Launches in a row, which write to `out`; calling it returns `out`."""

    def __init__(self, out, *launches):
        self.out, self.launches = out, launches

    def __call__(self):
        for launch in self.launches:
            launch.call()
        return self.out


@dataclass(frozen=True)
class Code:
    program: object
    kernel: str
    signature: str

    def compile(self, capability):
        """Compiles into the cache of programs; returns what is wrong, or ""."""
        try:
            # A target for CUDA devices translates and compiles without a GPU, too.
            CudaTarget(self.program, torch.device("cuda", 0))._compiled.cubin(capability, self.kernel, self.signature)
        except RuntimeError as error:
            return f"{self.kernel} does not compile: {error}"
        return ""


def compile_all(launches, capability, say):
    """Compiles what launches need, in parallel.

    Returns:
        What is wrong, a text for each kernel that is missing or does not compile.
    """
    start = time.perf_counter()
    codes, missing = {}, {}
    for launch in launches:
        try:
            code = launch.code()
            codes[id(code.program), code.kernel, code.signature] = code
        except KernelNotFoundError as error:
            missing[launch.kernel] = str(error)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        problems = list(filter(None, pool.map(lambda code: code.compile(capability), codes.values())))
    seconds = time.perf_counter() - start
    say(f"{len(codes) - len(problems)} of {len(codes)} peers' kernels compiled for sm_{capability} in {seconds:.0f} s")
    return [*missing.values(), *problems]
