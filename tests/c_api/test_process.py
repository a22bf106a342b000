"""Calls in the life of a process: the C functions allocate nothing after the first one, a thread that comes late into a
dispatch of the simulator finds the memory that it needs, and destructors that run after the end of a thread and of
main() may call."""

import subprocess

import pytest
import torch
from c_cases import every_case
from c_program import HERE, LIBRARY, OBJECTS, PACKAGE, ROOT, built_objects, compiled
from test_functions import add_all

from metalcore.msl.runtime.host import find_compiler

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
