"""Each C function against float64; in checking mode; in the life of a process, from several threads."""

import re
import subprocess

import pytest
import torch
from c_cases import every_case
from c_program import HERE, LIBRARY, OBJECTS, PACKAGE, ROOT, built_objects, compiled
from references import assert_near

from metalcore.msl.runtime.host import find_compiler

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


def test_no_allocations_by_late_threads(tmp_path):
    if not OBJECTS.exists():
        pytest.skip("the library's objects are not here: setup.py has not built it")
    counter, program = tmp_path / "counter.o", tmp_path / "late_threads"
    subprocess.run(["cc", "-O1", "-c", str(HERE / "count_allocations.c"), "-o", str(counter)], check=True)
    folders = (f"-I{ROOT / 'csrc' / 'backends' / 'simulator'}", f"-I{PACKAGE / 'msl' / 'include'}")
    parts = (HERE / "late_threads.cpp", counter, *built_objects())
    command = [*find_compiler().command, "-std=c++20", "-O1", "-Wall", "-Werror", *folders, *map(str, parts)]
    subprocess.run([*command, "-o", str(program), "-ldl", "-pthread"], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=120)
    assert done.stdout == "workers: 0\nthreads: 0\nbusy workers: 0\n", done.stderr


PROGRAM = r"""
#include <metalcore.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

static void call(const char* when) {
  float x[64], y[64];
  for (float& value : x) value = 1;
  void* memory = nullptr;
  const int wrong = metalcore_softmax_float(x, x, 1, 64, 1.0f);
  const bool told = strstr(metalcore_last_error(), "overlaps") != nullptr;
  const bool done = metalcore_memory_allocate(64, &memory) == METALCORE_OK && memory &&
                    metalcore_softmax_float(x, y, 1, 64, 1.0f) == METALCORE_OK &&
                    metalcore_memory_free(memory) == METALCORE_OK && y[63] == 1.0f / 64;
  printf("%s: %d\n", when, wrong == METALCORE_INVALID_ARGUMENT && told && done);
}

// Made before the first call of its thread, it ends after all that the library keeps for the thread.
struct Last {
  const char* when;
  ~Last() {
    printf("error of the end: '%s'\n", metalcore_last_error());
    call(when);
  }
};

static Last last = {"destructor of a static object"};

int main() {
  atexit([] { call("atexit"); });
  std::thread([] {
    static thread_local Last last = {"destructor of a thread"};
    (void)&last;
    call("thread");
  }).join();
  call("main");
  return 0;
}
"""

EXPECTED = """thread: 1
error of the end: ''
destructor of a thread: 1
main: 1
atexit: 1
error of the end: 'metalcore_softmax_float: out overlaps in'
destructor of a static object: 1
"""


def test_destructors_call_functions(tmp_path):
    if not (LIBRARY / "libmetalcore.so").exists():
        pytest.skip("libmetalcore is built for Linux")
    source = tmp_path / "program.cpp"
    source.write_text(PROGRAM)
    program = compiled(source, tmp_path / "program", compiler=("c++", "-std=c++17"))
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == (EXPECTED, 0), done.stderr
