"""What the package has on Linux: the built-in kernels for the simulator, compiled for each instruction set or on first
use, and for NVIDIA GPUs, where NVRTC compiles them; in place the simulated device too."""

import functools
import os
import re
from pathlib import Path

import torch

from .families import HALF_SUBNORMALS, families, has_flushing_variant, translation, with_includes
from .front_end import compiler, cuda, device_library, host, translator_files
from .places import KERNELS, LINUX, PLATFORM, ROOT


def on_first_use():
    """Returns whether the simulator compiles each family of kernels on first use (metalcore/msl/runtime/host.py). Who
    builds for this machine has the compiler that this takes; wheels for others have the kernels."""
    return LINUX and _asked() == "first-use"


def _asked():
    return os.environ.get("METALCORE_ISA", "first-use")


def simulator_libraries(tasks, folder=KERNELS):
    """Returns lib/<instruction set>/<family>.so, and lib/checking/<family>.so for checking mode; or lib/on-first-use.
    What a family has for the mode without subnormal numbers lies in a folder of that name with -flushing behind it."""
    if on_first_use():
        return [tasks.add("lib/on-first-use", [], [], lambda output: output.touch())]
    outputs = []
    for family, source in families(folder).items():
        variants: dict[str, tuple[str, ...]] = {"": ()}
        if has_flushing_variant(source, folder):
            variants["-flushing"] = (f"{HALF_SUBNORMALS} 0",)
        for place, isa, checking in _wanted():
            for suffix, defines in variants.items():
                outputs.append(
                    tasks.add(
                        f"lib/{place}{suffix}/{family}.so",
                        [*with_includes(source, folder), *translator_files()],
                        [isa, checking, compiler()],
                        functools.partial(_compile, source, folder, defines, isa, checking, host.level(family)),
                    )
                )
    return outputs


def _compile(source, folder, defines, isa, checking, level, output):
    text, how = source.read_text(encoding="utf-8"), {"isa": isa, "checking": checking, "level": level}
    host.compile_source(translation(source, folder, defines).source(), output, **how, msl=text, filename=str(source))


# What a CPU must have for each set, the newest set first, in Linux's words: what the simulator asks for itself.
_FLAGS = {
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx2", "fma", "bmi1", "bmi2"},
    "x86-64-v3": {"avx2", "fma", "bmi1", "bmi2"},
    "x86-64": set(),
}


def native(cpuinfo="/proc/cpuinfo"):
    """Returns the instruction set whose kernels this CPU runs, of those that the simulator has kernels for."""
    machine = PLATFORM.split("-")[-1]
    if machine != "x86_64":
        return machine
    match = re.search(r"^flags\s*:(.*)$", Path(cpuinfo).read_text(), re.MULTILINE)
    flags = set(match[1].split()) if match else set()
    return next(isa for isa, needed in _FLAGS.items() if needed <= flags)


def _wanted():
    """Returns [(folder, instruction set, whether the kernels check themselves)]. Raises SystemExit for unknown sets."""
    machine = PLATFORM.split("-")[-1]
    known = [*reversed(_FLAGS)] if machine == "x86_64" else [machine]
    several = {"all": known, "native": [native()]}
    wanted = several.get(_asked()) or [isa for isa in _asked().split(",") if isa]
    if unknown := sorted(set(wanted) - set(known)):
        raise SystemExit(
            f"METALCORE_ISA: the simulator has no kernels for {', '.join(unknown)}; it has them for "
            f"{', '.join(known)}; all means these, native this CPU's, first-use none before they run"
        )
    return [*((isa, isa, False) for isa in wanted), ("checking", known[0], True)] if wanted else []


def cuda_programs(tasks, folder=KERNELS):
    """Returns lib/cuda/<family>.cu, and what has to be known of the kernels beside it (.json)."""
    outputs = []
    for family, source in families(folder).items():
        program = tasks.add(
            f"lib/cuda/{family}.cu",
            [*with_includes(source, folder), *translator_files()],
            [],
            lambda output, source=source: cuda.build(translation(source, folder), output, root=ROOT),
        )
        outputs += [program, program.with_suffix(".json")]
    return outputs


def simulated_device(tasks):
    """Returns simulator/_device-….so, where the package is used in place. Wheels have its sources: an isolated build's
    PyTorch is not the one that runs."""
    return [
        tasks.add(
            f"simulator/{device_library.library_name()}",
            [*device_library.sources(), Path(device_library.__file__), device_library.SETUP],
            [torch.__version__, compiler()],
            device_library.build,
        )
    ]
