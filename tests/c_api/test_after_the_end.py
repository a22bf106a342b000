"""Functions are called after the end of a thread and of main(), by the destructors that run then."""

import subprocess

import pytest
from c_program import LIBRARY, compiled

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
