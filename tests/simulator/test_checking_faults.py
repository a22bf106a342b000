"""Checking mode finds seeded faults, names kernel, line and thread, and finds nothing in their clean twins."""

import pickle
import re

import pytest
from checked_kernels import COPY, HEADER, select
from processes import python
from seeded_accesses import ACCESSES
from seeded_lane_reads import LANE_READS
from seeded_races import RACES
from seeded_threadgroup_faults import THREADGROUP_FAULTS

import metalcore
from metalcore.simulator import KernelError

CASES = RACES + ACCESSES + LANE_READS + THREADGROUP_FAULTS


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_fault_is_found(case):
    """In three orders of threads, in each of which the clean twin passes."""
    lines = select(HEADER + case.source, True)[1]
    with pytest.raises(KernelError) as caught:
        case.run(faulty=True)
    error = caught.value
    assert error.kind in case.kind, error
    assert error.line in lines, error
    assert (error.kernel, error.file) == ("run", "program_source")
    assert case.message in str(error)
    assert f"kernel 'run', program_source:{error.line}: {error.kind}: thread" in str(error)
    local, group = error.thread.position_in_threadgroup, error.thread.threadgroup
    assert error.thread.position_in_grid[0] == local[0] + case.group[0] * group[0]
    if case.thread:
        assert case.thread(local), error
    # The process and the executor go on.
    case.run(faulty=False)
    for seed in (1, 2):  # other orders of threads
        with pytest.raises(KernelError) as caught:
            case.run(faulty=True, seed=seed)
        assert caught.value.kind in case.kind
        assert caught.value.line in lines
        case.run(faulty=False, seed=seed)


def test_without_checking_nothing_is_reported():
    case = next(case for case in CASES if case.name == "barrier with the wrong flags")
    source, _ = select(HEADER + case.source, True)
    metalcore.compile_shader(source).run(*case.tensors(), threads=64, group_size=64)


def test_errors_survive_pickling():
    with pytest.raises(KernelError) as caught:
        RACES[0].run(faulty=True)
    error = pickle.loads(pickle.dumps(caught.value))
    assert str(error) == str(caught.value)
    assert (error.kind, error.line, error.thread) == (caught.value.kind, caught.value.line, caught.value.thread)


def test_message_names_both_lines():
    with pytest.raises(KernelError) as caught:
        RACES[0].run(faulty=True)
    assert re.search(r"program_source:\d+: race: thread .* reads in line 11", str(caught.value)), caught.value


def test_without_addr2line_the_line_is_missing(tmp_path):
    """The fault is still found, although `PATH` leads only to the compiler."""
    code = f"""
import os, torch, metalcore, metalcore.simulator
library = metalcore.compile_shader('''{COPY}''')
x = torch.zeros(4, device="mps")
with metalcore.simulator.checking():
    library.copy(x, x, 0, threads=4, group_size=4)
    os.environ["PATH"] = {str(tmp_path)!r}
    try:
        library.copy(x, x, 1, threads=4, group_size=4)
    except metalcore.simulator.KernelError as error:
        print(error.line, error.kind, error.thread.position_in_grid)
"""
    result = python("-c", code)
    assert result.stdout == "None out-of-bounds read (3, 0, 0)\n", result.stderr
