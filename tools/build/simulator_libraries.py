"""The built-in kernels for the simulator: translated, and compiled for each instruction set."""

import os

from .families import families, with_includes
from .front_end import compiler, host, translator
from .places import KERNELS, PLATFORM


def simulator_libraries(tasks, folder=KERNELS):
    """lib/<instruction set>/<family>.so, and lib/checking/<family>.so for checking mode."""
    return [
        tasks.add(
            f"lib/{place}/{family}.so",
            [*with_includes(source, folder), *translator()],
            [isa, checking, compiler()],
            lambda output, source=source, isa=isa, checking=checking: host.build(
                source, output, isa=isa, checking=checking, include_dirs=[folder]
            ),
        )
        for family, source in families(folder).items()
        for place, isa, checking in _wanted()
    ]


def _wanted():
    """[(folder, instruction set, whether the kernels check themselves)]. Raises SystemExit for unknown sets."""
    machine = PLATFORM.split("-")[-1]
    known = ["x86-64", "x86-64-v3", "x86-64-v4"] if machine == "x86_64" else [machine]
    wanted = [isa for isa in os.environ.get("METALCORE_ISA", ",".join(known)).split(",") if isa]
    if unknown := sorted(set(wanted) - set(known)):
        raise SystemExit(
            f"METALCORE_ISA: the simulator has no kernels for {', '.join(unknown)}; it has them for {', '.join(known)}"
        )
    return [*((isa, isa, False) for isa in wanted), ("checking", known[0], True)] if wanted else []
