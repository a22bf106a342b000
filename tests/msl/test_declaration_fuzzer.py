"""Random declarations: each program gives the right result or is refused with its line.

METALCORE_FUZZ_SEED sets the first seed, METALCORE_FUZZ_CASES the number of programs.
"""

import os
import re

import pytest
import torch
from declaration_fuzzer import PRELUDE, THREADS, case, program

import metalcore
from metalcore.msl.errors import MSLError
from metalcore.msl.language.translate import translate

SEED = int(os.environ.get("METALCORE_FUZZ_SEED", "0"))
CASES = int(os.environ.get("METALCORE_FUZZ_CASES", "384"))
PER_KERNEL, KERNELS = 12, 4  # cases and kernels that are compiled together
PER_PROGRAM = PER_KERNEL * KERNELS
pytestmark = pytest.mark.usefixtures("compiles_for_cuda")


def accepted(seeds):
    """{seed: case} of the cases that are not refused. The refusal of another case must name one of its lines."""
    cases = {seed: case(seed) for seed in seeds}
    return {seed: one for seed, one in cases.items() if not is_refused(seed, one)}


def is_refused(seed, one):
    source, line = program([[one]])
    refusal = None
    try:
        translate(source)
    except MSLError as error:
        refusal = str(error)
    if refusal:
        named = int(re.match(r"program_source:(\d+): error: \S", refusal)[1])
        assert PRELUDE.count("\n") < named <= line, f"seed {seed}: {refusal}\n{source}"
    return refusal is not None


@pytest.mark.parametrize("first", range(SEED, SEED + CASES, PER_PROGRAM))
def test_random_declarations(device, first):
    cases = accepted(range(first, first + PER_PROGRAM))
    assert len(cases) > PER_PROGRAM * 0.9  # refusals are the exception
    seeds = list(cases)
    kernels = [seeds[i : i + PER_KERNEL] for i in range(0, len(seeds), PER_KERNEL)]
    library = metalcore.compile_shader(program([[cases[seed] for seed in part] for part in kernels])[0])
    for n, part in enumerate(kernels):
        out = torch.zeros(len(part), THREADS, device=device)
        getattr(library, f"k{n}")(out, threads=THREADS, group_size=THREADS)
        for seed, row in zip(part, out.tolist()):
            # The last thread writes 5. The others see it if the variable is shared, and else their own -1.
            expected = [5 if cases[seed].shared else -1] * (THREADS - 1) + [5]
            assert row == expected, f"seed {seed}\n{program([[cases[seed]]])[0]}"
