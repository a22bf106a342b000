"""Checking mode is on in its blocks (nested, and of several threads), by the environment, and in forked children."""

import os
import threading

import pytest
import torch
from checked_kernels import COPY
from processes import python

import metalcore
from metalcore.simulator import KernelError, checking
from metalcore.simulator.checking_mode import enabled


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
    code = "from metalcore.simulator.checking_mode import enabled; print(enabled())"
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
