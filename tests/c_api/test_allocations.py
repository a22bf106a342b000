"""The C functions allocate nothing after a process's first call."""

import pytest
import torch
from c_cases import every_case
from test_functions import add_all

ON_CPUS = pytest.mark.only_on("simulator")  # a test that needs the kernels for CPUs


@ON_CPUS
def test_no_allocations(c_program, calls, counter):
    cases = add_all(calls)
    reports = calls.run(c_program, "--repeat", "4", LD_PRELOAD=str(counter))
    allocated = {function: count for (function, *_), (_, count, *_) in zip(cases, reports) if count}
    assert not allocated


def test_cuda_allocates_nothing(c_program, calls, counter, fakes):
    """Nor on a GPU, whose memory is the host's here: with a driver that runs no kernels every function succeeds."""
    cases = add_all(calls)
    reports = calls.run(c_program, "--device", "1", "--repeat", "4", LD_PRELOAD=str(counter), **fakes)
    assert [(error, count) for _, count, error, _ in reports] == [("", 0)] * len(cases)


@ON_CPUS
def test_counter_counts(c_program, calls, counter):
    """The first call of a process allocates."""
    function, arguments, _ = every_case(torch.float32)[0]
    calls.add(function, *arguments)
    ((_, count, *_),) = calls.run(c_program, LD_PRELOAD=str(counter))
    assert count > 0
