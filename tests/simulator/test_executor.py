"""The executor by itself: a library written by hand, run on NumPy arrays, and the switch between fibers."""

import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest
from processes import python

from metalcore import _C
from metalcore.msl.runtime import host

SOURCE = Path(__file__).with_name("handwritten_library.cpp")


def compile_library(output, *flags):
    compiler = host.find_compiler().command
    command = [*compiler, "-std=gnu++17", "-O2", "-fPIC", "-shared", "-w", f"-I{host.INCLUDE}", *flags]
    subprocess.run([*command, str(SOURCE), "-o", str(output)], check=True)
    return str(output)


@pytest.fixture(scope="session")
def library_file(tmp_path_factory):
    return compile_library(tmp_path_factory.mktemp("executor") / "handwritten.so")


@pytest.fixture(scope="session")
def library(library_file):
    return _C.simulator_load(library_file)


@pytest.fixture(params=[1, 2, 5])
def thread_count(request):
    before = _C.simulator_info()["threads"]
    _C.simulator_set_num_threads(request.param)
    yield request.param
    _C.simulator_set_num_threads(before)


def dispatch(library, kernel, arguments, threads, group, lengths=()):
    """An argument is an array, which is written in place, or an int, which is passed as the bytes of a uint."""

    def binding(argument):
        if isinstance(argument, int):
            return np.uint32(argument).tobytes()
        return argument if argument is None or isinstance(argument, bytes) else (argument.ctypes.data, argument.nbytes)

    def three(size):
        return (*size, *(1,) * (3 - len(size)))

    _C.simulator_dispatch(library, kernel, [binding(a) for a in arguments], lengths, three(threads), three(group))


def test_loading_twice_gives_the_same_library(library, library_file):
    assert _C.simulator_load(library_file) == library


def test_kernels_are_described(library):
    kernels = {kernel["name"]: kernel for kernel in _C.simulator_kernels(library)}
    assert not kernels["scale"]["synchronizes"]
    assert kernels["softmax"]["synchronizes"]
    assert kernels["throwing"]["max_total_threads_per_threadgroup"] == 64
    assert kernels["scale"]["max_total_threads_per_threadgroup"] == 1024
    assert kernels["argument_memory"]["arguments"] == [
        {"name": "out", "kind": "buffer", "index": 0, "element_size": 4, "writable": True, "by_reference": False},
        {
            "name": "scratch",
            "kind": "threadgroup",
            "index": 0,
            "element_size": 4,
            "writable": True,
            "by_reference": False,
        },
    ]


@pytest.mark.parametrize("count", [1, 31, 256, 257, 100_003])
@pytest.mark.parametrize("group", [1, 32, 100, 1024])
def test_plain_loop(library, thread_count, count, group):
    x = np.arange(count, dtype=np.float32)
    y = np.zeros(count + 1, np.float32)
    dispatch(library, "scale", [x, y], (count,), (group,))
    np.testing.assert_array_equal(y[:-1], x * 2 + 1)
    assert y[-1] == 0


@pytest.mark.parametrize("kernel", ["describe", "describe_fibers"])
@pytest.mark.parametrize(
    ("grid", "group"),
    [((70, 1, 1), (32, 1, 1)), ((7, 5, 3), (4, 2, 2)), ((33, 9, 2), (32, 4, 1)), ((5, 5, 5), (5, 5, 5))],
)
def test_every_thread_knows_its_place(library, thread_count, kernel, grid, group):
    seen = np.full((grid[2], grid[1], grid[0], 18), -1, np.int32)
    dispatch(library, kernel, [seen], grid, group)
    groups = [-(-n // g) for n, g in zip(grid, group)]
    for z, y, x in np.ndindex(grid[2], grid[1], grid[0]):
        position = (x, y, z)
        where = [p // g for p, g in zip(position, group)]
        local = [p % g for p, g in zip(position, group)]
        size = [min(g, n - w * g) for g, n, w in zip(group, grid, where)]
        index = local[0] + size[0] * (local[1] + size[1] * local[2])
        simdgroups = -(-size[0] * size[1] * size[2] // 32)
        expected = [*position, *local, *where, *size, *groups, 100 * index + index % 32, index // 32, simdgroups]
        assert seen[z, y, x].tolist() == expected


@pytest.mark.parametrize("group", [32, 64, 96, 256, 1024])
def test_softmax(library, thread_count, group):
    x = np.random.default_rng(0).standard_normal((37, 512)).astype(np.float32)
    y = np.empty_like(x)
    dispatch(library, "softmax", [x, y, 512], (37 * group,), (group,))
    exact = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
    exact /= exact.sum(1, keepdims=True)
    np.testing.assert_allclose(y, exact, rtol=32 * np.finfo(np.float32).eps)


def test_divergent_lanes_meet_those_at_the_same_line(library, thread_count):
    out = np.full((3 * 32, 5), -1, np.int32)
    dispatch(library, "divergence", [out], (96,), (96,))
    for simdgroup in out.reshape(3, 32, 5):
        for lane, (branch, everyone, loop, after_exit, last) in enumerate(simdgroup.tolist()):
            assert branch == (16 if lane % 2 else 80 if lane % 4 else 0)
            assert everyone == 32
            # The lanes above i are in the loop's i-th turn.
            assert loop == sum(31 - i for i in range(lane))
            assert after_exit == (20 if lane < 20 else -1)
            quad = lane - lane % 4
            expected = sum(range(8)) if lane < 8 else sum(range(quad, quad + 4))
            assert last == (expected if lane < 20 else -1)


def test_threads_that_left_do_not_hold_up_a_barrier(library):
    out = np.zeros(100, np.int32)
    dispatch(library, "early_exit", [out], (200,), (200,))
    np.testing.assert_array_equal(out, np.arange(100)[::-1])


@pytest.mark.parametrize("group", [2, 32, 33, 1024])
def test_a_thread_may_wait_for_another_by_spinning(library, group):
    out = np.zeros(2, np.uint32)
    dispatch(library, "spin", [out], (group,), (group,))
    assert out.tolist() == [7, 8]


def test_threadgroup_argument(library):
    out = np.zeros(64, np.int32)
    dispatch(library, "argument_memory", [out], (64,), (64,), lengths=[256])
    np.testing.assert_array_equal(out, np.arange(64)[::-1])


def test_large_local_arrays_fit_the_stack(library):
    out = np.zeros(64, np.int32)
    dispatch(library, "deep_stack", [out], (64,), (64,))
    np.testing.assert_array_equal(out, np.arange(64) % 32)


def test_empty_grid_is_skipped(library):
    dispatch(library, "scale", [None, None], (0,), (32,))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (("nothing", [], (1,), (1,)), "no kernel 'nothing'"),
        (("scale", [None, bytes(4)], (1,), (1,)), "buffer 'in' at index 0 is not bound"),
        (("scale", [bytes(4), bytes(4)], (1,), (1,)), "buffer 'out' at index 1 is written, but bound to bytes"),
        (("scale", [bytes(4097), None], (1,), (1,)), "4097 bytes as an argument; Metal allows 4096"),
        (
            ("softmax", [bytes(4), np.zeros(1), bytes(2)], (1,), (1,)),
            "buffer 'n' at index 2 holds 2 bytes; the kernel reads 4",
        ),
        (
            ("scale", [bytes(4), np.zeros(1)], (2048,), (1025,)),
            "a threadgroup of (1025, 1, 1) threads; it must have from 1 to 1024",
        ),
        (("describe", [bytes(4)], (64, 64), (64, 32)), "(64, 32, 1) threads"),
        (("throwing", [np.zeros(1)], (65,), (65,)), "from 1 to 64"),
        (("scale", [bytes(4), np.zeros(1)], (1,), (0,)), "from 1 to 1024"),
        (("argument_memory", [np.zeros(1)], (1,), (1,)), "threadgroup argument 'scratch' at index 0 has no length set"),
        (
            ("argument_memory", [np.zeros(1)], (1,), (1,), [32784]),
            "32784 bytes of threadgroup memory; Metal allows 32768",
        ),
        (("large_memory", [np.zeros(1)], (8,), (8,)), "uses 34000 bytes of threadgroup memory; Metal allows 32768"),
    ],
)
def test_what_metal_refuses_is_refused(library, call, message):
    with pytest.raises((ValueError, RuntimeError)) as caught:
        dispatch(library, *call)
    assert message in str(caught.value)


def test_an_error_in_the_middle_of_a_threadgroup_leaves_the_executor_usable(library, thread_count):
    out = np.zeros(2, np.float32)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="threadgroup variable number 1000"):
            dispatch(library, "throwing", [out], (6400,), (64,))
        test_softmax(library, thread_count, 64)


def test_libraries_that_cannot_be_used(tmp_path):
    with pytest.raises(RuntimeError, match="cannot open the kernel library"):
        _C.simulator_load(str(tmp_path / "missing.so"))
    other = tmp_path / "other.so"
    command = [*host.find_compiler().command, "-shared", "-fPIC", "-x", "c++", "-", "-o", other]
    subprocess.run(command, input=b"int x;", check=True)
    with pytest.raises(RuntimeError, match="is not a translated kernel library"):
        _C.simulator_load(str(other))
    old = compile_library(tmp_path / "old.so", "-DLIBRARY_VERSION=1")
    with pytest.raises(RuntimeError, match="has version 1 of the kernel interface"):
        _C.simulator_load(old)


def test_dispatches_of_several_threads(library):
    """Python threads dispatch at the same time: one has the workers, and each other one does its job alone."""
    x = np.random.default_rng(1).standard_normal((64, 256)).astype(np.float32)
    expected = np.empty_like(x)
    dispatch(library, "softmax", [x, expected, 256], (64 * 64,), (64,))
    wrong = []

    def work():
        for _ in range(10):
            y = np.zeros_like(x)
            dispatch(library, "softmax", [x, y, 256], (64 * 64,), (64,))
            if not np.array_equal(y, expected):
                wrong.append(y)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


PRELUDE = """
    import os, sys, threading
    import numpy as np
    from metalcore import _C
    library = _C.simulator_load(sys.argv[1])
    _C.simulator_set_num_threads(4)
    x = np.ones(1 << 16, np.float32)
    y = np.zeros_like(x)
    n = np.uint32(200).tobytes()
    def scale():
        y[:] = 0
        buffers = [(x.ctypes.data, x.nbytes), (y.ctypes.data, y.nbytes)]
        _C.simulator_dispatch(library, "scale", buffers, (), (x.size, 1, 1), (64, 1, 1))
        assert (y == 3).all()
    def long_job():
        _C.simulator_dispatch(library, "barrier_loop", [(y.ctypes.data, y.nbytes), n], (), (x.size, 1, 1), (64, 1, 1))
"""


def run_script(library_file, script):
    code = textwrap.dedent(PRELUDE) + textwrap.dedent(script)
    return python("-c", code, library_file, timeout=120)


def test_a_forked_child_can_dispatch(library_file):
    result = run_script(
        library_file,
        """
        scale()
        busy = threading.Thread(target=lambda: [long_job() for _ in range(5)])
        busy.start()
        for _ in range(10):
            child = os.fork()
            if not child:
                scale()
                scale()
                os._exit(7)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        busy.join()
        print("done")
    """,
    )
    assert (result.returncode, result.stdout) == (0, "done\n"), result.stderr


def test_the_interpreter_may_end_during_work(library_file):
    result = run_script(
        library_file,
        """
        def forever():
            out = np.zeros_like(y)  # held by this thread: the module's arrays go away with the interpreter
            buffers = [(out.ctypes.data, out.nbytes), n]
            while True:
                _C.simulator_dispatch(library, "barrier_loop", buffers, (), (x.size, 1, 1), (64, 1, 1))
        for _ in range(3):
            threading.Thread(target=forever, daemon=True).start()
        scale()
        print("done")
    """,
    )
    assert (result.returncode, result.stdout) == (0, "done\n"), result.stderr


@pytest.mark.parametrize(("setting", "expected"), [("3", 3), ("", len(os.sched_getaffinity(0)))])
def test_thread_count_comes_from_the_environment(library_file, setting, expected):
    code = "from metalcore import _C; print(_C.simulator_info()['threads'])"
    environment = {**os.environ, "OMP_NUM_THREADS": setting}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert result.stdout == f"{expected}\n", result.stderr


ROOT = Path(__file__).parents[2]
SIMULATOR = ROOT / "csrc" / "backends" / "simulator"


@pytest.mark.parametrize("flags", [[], ["-DMETALCORE_UCONTEXT"]], ids=["own", "ucontext"])
def test_fibers_keep_their_registers(tmp_path, flags):
    program = tmp_path / "driver"
    sources = [Path(__file__).with_name("context_driver.cpp"), SIMULATOR / "context.cpp"]
    command = [*host.find_compiler().command, "-std=c++20", "-O2", f"-I{SIMULATOR}", *flags, *sources, "-o", program]
    subprocess.run(command, check=True)
    assert subprocess.run([program], capture_output=True, text=True, timeout=60).stdout == "done\n"
