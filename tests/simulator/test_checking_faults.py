"""Checking mode is on in its blocks (nested, and of several threads), by the environment, and in forked children. It
finds seeded faults, names kernel, line and thread, and finds nothing in their clean twins."""

import os
import pickle
import re
import threading

import pytest
import torch
from checked_kernels import COPY, HEADER, select
from processes import python
from seeded_accesses import ACCESSES
from seeded_races import LANE_READS, RACES
from seeded_threadgroup_faults import THREADGROUP_FAULTS

import metalcore
from metalcore.simulator import KernelError, checking
from metalcore.simulator.errors import enabled

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


def test_checking_nests_and_is_left_by_exceptions():
    def within():
        with checking():
            with checking(seed=3):
                assert enabled()
            assert enabled()
            raise ZeroDivisionError

    before = enabled()
    with pytest.raises(ZeroDivisionError):
        within()
    assert enabled() == before


def test_blocks_of_several_threads_may_overlap():
    before = enabled()
    entered, leave = threading.Event(), threading.Event()

    def other():
        with checking(seed=1):
            entered.set()
            leave.wait()

    thread = threading.Thread(target=other)
    with checking(seed=2):
        thread.start()
        entered.wait()
    assert enabled()
    leave.set()
    thread.join()
    assert enabled() == before


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_seed_must_fit(seed):
    with pytest.raises(ValueError, match="32 bits"):
        checking(seed=seed)


@pytest.mark.parametrize(
    ("setting", "expected"), [("1", True), ("On", True), ("0", False), ("OFF", False), ("", False)]
)
def test_the_environment_switches_checking_on(setting, expected):
    code = "from metalcore.simulator.errors import enabled; print(enabled())"
    environment = {**os.environ, "METALCORE_CHECK": setting}
    result = python("-c", code, env=environment)
    assert result.stdout == f"{expected}\n", result.stderr


@pytest.mark.parametrize("variable", ["METALCORE_CHECK", "METALCORE_FTZ"])
def test_a_setting_that_is_none_is_refused(variable):
    environment = {**os.environ, variable: "2"}
    result = python("-c", "import metalcore", env=environment)
    assert (
        f"ValueError: metalcore: {variable} must be 1, on, yes or true, or 0, off, no or false, got '2'"
        in result.stderr
    )


def test_a_forked_child_checks_too():
    library = metalcore.compile_shader(COPY)
    x, y = torch.rand(16, device="mps"), torch.zeros(16, device="mps")
    with checking():
        library.copy(x, y, 0, threads=16, group_size=16)
        child = os.fork()
        if not child:
            try:
                library.copy(x, y, 1, threads=16, group_size=16)
            except KernelError as error:
                os._exit(error.line)
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
