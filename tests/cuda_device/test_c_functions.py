"""The C functions on a GPU's memory, each with a stream of its own, against float64."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "c_api"))
from c_program import HERE, Calls, compiled
from test_functions import add_all, check

from metalcore.msl.nvidia import nvrtc


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return compiled(HERE / "calls.c", tmp_path_factory.mktemp("c_program") / "calls")


def on_gpu(calls, program, *options):
    return calls.run(program, "--device", "1", *options, METALCORE_NVRTC=str(nvrtc.find().path))


def is_drawn(function):
    """Which number is drawn depends on the device."""
    return function.startswith("sample_")


def test_results(program, tmp_path):
    calls = Calls(tmp_path)
    cases = add_all(calls)
    reports = on_gpu(calls, program)
    pairs = [(case, report) for case, report in zip(cases, reports, strict=True) if not is_drawn(case[0])]
    check(*zip(*pairs))
    for (function, arguments, _), (status, _, error, results) in zip(cases, reports):
        if is_drawn(function):
            assert status == "METALCORE_OK", error
            assert ((results[0] >= 0) & (results[0] < arguments[4])).all()


def test_threads(program, tmp_path):
    """Threads with streams of their own get the same bits."""
    calls = Calls(tmp_path)
    cases = add_all(calls)
    alone = on_gpu(calls, program)
    on_gpu(calls, program, "--threads", "4", "--repeat", "2")
    for index, (function, arguments, _) in enumerate(cases):
        if any(getattr(argument, "initial", None) is not None for argument in arguments):
            continue  # done twice in its place, it has other results
        for thread in range(4):
            for one, other in zip(alone[index][3], calls.results(index, f".{thread}")):
                assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), (function, thread)
