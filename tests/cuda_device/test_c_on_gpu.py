"""The C functions on a GPU's memory, each with a stream of its own, against float64, and programs of files that
libmetalcore runs on a GPU: they have the bits of Python's replay there."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "c_api"))
from c_program import HERE, Calls
from c_program import compiled as linked
from saved_programs import PATTERNS, Block, Mlp, Pair, Pooled, Residual, Runs, compiled, read_like, replayed
from test_functions import add_all, check

from metalcore.msl.nvidia import nvrtc


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return linked(HERE / "calls.c", tmp_path_factory.mktemp("c_program") / "calls")


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_bits_of_pythons_replay(dtype, tmp_path):
    program = linked(HERE / "programs.c", tmp_path / "programs")
    runs, expected = Runs(tmp_path), []
    for kind in (Mlp, Residual, Block, Pair, Pooled):
        fusions = [*PATTERNS, "single"] if kind is Pooled else PATTERNS
        made, arguments = compiled(kind, "cuda", dtype, fusions)
        made.save(tmp_path / f"{kind.__name__}.mcore", recordings=True)
        results = replayed(made, arguments)
        expected.append((results, runs.add(tmp_path / f"{kind.__name__}.mcore", arguments, results)))
    environment = {"METALCORE_NVRTC": str(nvrtc.find().path)}
    reports = runs.run(program, "--device", "1", "--repeat", "3", environment=environment)
    for (results, paths), (status, _, error) in zip(expected, reports, strict=True):
        assert status == "METALCORE_OK", error
        for path, like in zip(paths, results, strict=True):
            assert torch.equal(read_like(path, like).view(torch.uint8), like.view(torch.uint8))
