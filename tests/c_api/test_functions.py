"""Each C function against float64, from C and from C++; in checking mode; from several threads."""

import re
import subprocess

import pytest
import torch
from c_cases import every_case
from c_program import HERE, LIBRARY, compiled
from references import assert_near

pytestmark = pytest.mark.only_on("simulator")  # they need the kernels for CPUs

DTYPES = (torch.float32, torch.bfloat16)


def add_all(calls):
    cases = [case for dtype in DTYPES for case in every_case(dtype)]
    for function, arguments, _ in cases:
        calls.add(function, *arguments)
    return cases


def check(cases, reports):
    for (function, _, expected), (status, _, error, results) in zip(cases, reports, strict=True):
        assert status == "METALCORE_OK", f"{function}: {error}"
        for found, reference in zip(results, expected, strict=True):
            if found.dtype == torch.int64:
                assert torch.equal(found, reference), function
            else:
                assert_near(found, reference, terms=64)


def test_results(c_program, calls):
    cases = add_all(calls)
    check(cases, calls.run(c_program))


def test_results_in_memory_of_the_library(c_program, calls):
    cases = add_all(calls)
    check(cases, calls.run(c_program, "--allocate", "1"))


def test_results_from_cpp(calls, tmp_path_factory):
    program = compiled(
        HERE / "calls.c",
        tmp_path_factory.mktemp("cpp") / "calls",
        compiler=("c++", "-x", "c++", "-std=c++17"),
    )
    cases = add_all(calls)
    check(cases, calls.run(program))


def test_checking_mode(c_program, calls):
    cases = add_all(calls)
    check(cases, calls.run(c_program, METALCORE_CHECK="1"))


def test_threads(c_program, calls):
    """Threads with contexts of their own get the same bits."""
    cases = add_all(calls)
    reports = calls.run(c_program)
    calls.run(c_program, "--threads", "8", "--repeat", "2", OMP_NUM_THREADS="2")
    for index, (function, arguments, _) in enumerate(cases):
        if any(getattr(argument, "initial", None) is not None for argument in arguments):
            continue  # done twice in its place, it has other results
        for thread in range(8):
            for alone, together in zip(reports[index][3], calls.results(index, f".{thread}")):
                assert torch.equal(alone.view(torch.uint8), together.view(torch.uint8)), (function, thread)


def test_needs_neither_python_nor_torch():
    library = str(LIBRARY / "libmetalcore.so")
    for command in (["ldd", library], ["nm", "-D", "--undefined-only", library]):
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout.lower()
        said = re.sub(r"\b(0x)?[0-9a-f]{16}\b", "", said)  # addresses
        assert not [word for word in ("torch", "c10", "python", "_py", "aoti") if word in said]
    said = subprocess.run(["nm", "-D", "--defined-only", library], check=True, capture_output=True, text=True).stdout
    names = [line.split()[-1] for line in said.splitlines()]
    assert names and all(name.startswith("metalcore_") for name in names)
