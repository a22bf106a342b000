"""Kernels that do not end: Ctrl-C and METALCORE_TIMEOUT give a dispatch up, and the process goes on."""

import os
import subprocess
import textwrap
from pathlib import Path

import pytest
import torch
from processes import python

import metalcore
from metalcore import _C
from metalcore.simulator import KernelError, checking

# Each kernel runs until x[0] is not 0; in "last" only one thread does.
SOURCE = """#include <metal_stdlib>
using namespace metal;
kernel void plain(volatile device int* x, uint i [[thread_position_in_grid]]) { while (!x[0]); if (i) x[i] = 2; }
kernel void last(volatile device int* x, uint i [[thread_position_in_grid]]) {
  if (i == 999) while (!x[0]);
  if (i) x[i] = 2;
}
kernel void quiet(volatile device int* x, uint i [[thread_position_in_grid]]) {
  volatile int n = x[0];
  while (!n);
  if (i) x[i] = 2;
}
kernel void fiber(volatile device int* x, uint i [[thread_position_in_grid]]) {
  threadgroup_barrier(mem_flags::mem_none);
  while (!x[0]);
  if (i) x[i] = 2;
}
kernel void barrier(volatile device int* x, uint i [[thread_position_in_grid]]) {
  while (!x[0]) threadgroup_barrier(mem_flags::mem_device);
  if (i) x[i] = 2;
}
kernel void lanes(volatile device int* x, uint i [[thread_position_in_grid]]) {
  for (int n = 0; simd_all(x[0] == 0) && n >= 0;) n = simd_max(n);
  if (i) x[i] = 2;
}
"""
KERNELS = ["plain", "last", "quiet", "fiber", "barrier", "lanes"]


@pytest.fixture(scope="module")
def library(compiled_at_once):
    return metalcore.compile_shader(SOURCE)


@pytest.fixture
def timeout():
    _C.simulator_set_timeout(0.2)
    yield
    _C.simulator_set_timeout(0)


@pytest.mark.parametrize("name", KERNELS)
def test_timeout(device, library, timeout, name, thread_count):
    kernel = getattr(library, name)
    with pytest.raises(KernelError, match=r"still running after 0.2 s \(METALCORE_TIMEOUT\)") as caught:
        kernel(torch.zeros(5000, dtype=torch.int32, device=device), group_size=64)
    assert (caught.value.kind, caught.value.kernel) == ("timeout", name)
    _C.simulator_set_timeout(0)
    x = torch.ones(5000, dtype=torch.int32, device=device)
    kernel(x, group_size=64)
    assert x.sum().item() == 2 * 5000 - 1


@pytest.mark.parametrize("name", ["plain", "quiet", "barrier"])
def test_timeout_in_checking_mode_knows_the_line(device, library, timeout, name):
    _C.simulator_set_timeout(2)  # on a busy machine too the kernel has come to its loop by then
    with checking(), pytest.raises(KernelError) as caught:
        getattr(library, name)(torch.zeros(64, dtype=torch.int32, device=device), group_size=32)
    assert (caught.value.kind, caught.value.kernel) == ("timeout", name)
    assert "while (!" in SOURCE.split("\n")[caught.value.line - 1]


def test_callbacks_are_no_place_for_a_pause():
    """The executor pauses no thread in that section, because the callbacks of checks have no line of a kernel."""
    library = Path(metalcore.__file__).parent / "lib/checking/activation/softmax.so"
    symbols = subprocess.run(["nm", "-f", "sysv", library], capture_output=True, text=True, check=True).stdout
    fields = [line.split("|") for line in symbols.splitlines() if line.startswith(("__tsan_", "__ubsan_"))]
    assert {"__tsan_read4", "__ubsan_handle_out_of_bounds"} <= {name.strip() for name, *_ in fields}
    assert {section.strip() for *_, section in fields} == {"msl_callbacks"}


def test_timeouts_are_seconds():
    for wrong in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="a timeout is a number of seconds"):
            _C.simulator_set_timeout(wrong)


PROGRAM = f'''
import metalcore, metalcore.simulator, os, signal, threading, time, torch
from metalcore import _C
from metalcore.simulator import KernelError, checking
# Processes that a shell starts in the background ignore SIGINT, and so do their children.
signal.signal(signal.SIGINT, signal.default_int_handler)
library = metalcore.compile_shader("""{SOURCE}""")
x = torch.zeros(5000, dtype=torch.int32, device="mps")
library.plain(x + 1), library.fiber(x + 1, group_size=32)
pressed = 0
def press(signal=signal.SIGINT):
    def wait():
        global pressed
        time.sleep(0.3)
        pressed = time.monotonic()
        os.kill(os.getpid(), signal)
    threading.Thread(target=wait, daemon=True).start()
def check(what):
    # Within a second, on a machine that has nothing else to do.
    assert time.monotonic() - pressed < 5, time.monotonic() - pressed
    y = x + 1
    library.fiber(y, group_size=32)
    assert y.sum().item() == 9999 and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    print(what, flush=True)
'''


def run(body, **environment):
    done = python("-c", PROGRAM + textwrap.dedent(body), timeout=120, env={**os.environ, **environment})
    return done.stdout.split(), done.stderr


def test_ctrl_c():
    assert run("""
        for threads in (1, 2):
            _C.simulator_set_num_threads(threads)
            for name in ("plain", "fiber", "last"):
                press()
                try:
                    getattr(library, name)(x, group_size=32)
                except KeyboardInterrupt:
                    check(name)
        with checking():
            library.plain(x[:64] + 1)
            press()
            try:
                library.plain(x)
            except KeyboardInterrupt:
                check("checked")
    """) == (["plain", "fiber", "last"] * 2 + ["checked"], "")


def test_handlers_that_do_not_raise_let_the_kernel_go_on():
    """A handler runs a kernel itself, and then sets the value that the interrupted kernel waits for."""
    assert run("""
        def handler(number, frame):
            y = torch.ones(5000, dtype=torch.int32, device="mps")
            library.fiber(y, group_size=32)
            assert y.sum().item() == 9999
            x[0] = 1
        signal.signal(signal.SIGALRM, handler)
        for name in ("plain", "fiber"):
            press(signal=signal.SIGALRM)
            getattr(library, name)(x, group_size=32)
            assert x.sum().item() == 9999
            x.zero_()
            check(name)
    """) == (["plain", "fiber"], "")


def test_ctrl_c_ends_kernels_of_other_threads():
    """Python interrupts only its main thread, which may wait in C++: a backward pass runs on PyTorch's threads."""
    assert run("""
        ended = threading.Event()
        def body():
            try:
                library.plain(x)
            except KernelError as error:
                print(error.kind, flush=True)
                ended.set()
        threading.Thread(target=body).start()
        try:
            press()
            ended.wait()
        except KeyboardInterrupt:
            assert ended.wait(20)
            check("main")
        class Function(torch.autograd.Function):
            @staticmethod
            def forward(context, x):
                return x * 2
            @staticmethod
            def backward(context, gradient):
                library.plain(x)
        w = torch.ones(1, device="mps", requires_grad=True)
        try:
            try:
                press()
                Function.apply(w).sum().backward()
            except KernelError as error:
                assert error.kind == "interrupted"
                time.sleep(1)
        except KeyboardInterrupt:
            check("backward")
    """) == (["interrupted", "main", "backward"], "")


def test_environment():
    found, _ = run(
        """
        try:
            library.plain(x)
        except KernelError as error:
            print(error.kind)
    """,
        METALCORE_TIMEOUT="0.5",
    )
    assert found == ["timeout"]
    assert "METALCORE_TIMEOUT must be a number of seconds, got 'soon'" in run("", METALCORE_TIMEOUT="soon")[1]
