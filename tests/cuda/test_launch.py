"""Grids, threadgroup memory, streams, contexts and errors of launches, plans for the GPU that holds a tensor, and
attributes by the signature that a dispatch compiles."""

from ctypes.util import find_library
from pathlib import Path

import pytest
import torch

import metalcore
from metalcore import _C
from metalcore._core.registry import OPS
from metalcore.recording import on_meta


def test_a_dispatch_of_no_threads_is_skipped(run):
    run("""
compiler = Compiler()
for threads in [(0, 1, 1), (1, 0, 1), (1, 1, 0)]:
    assert dispatch(threads=threads) == []
assert compiler.calls == []
""")


def test_grids_beyond_cudas_limits_are_cut_into_slabs(run):
    """Each threadgroup is launched once, with its own position."""
    run("""
Compiler()
def check(threads, group, expected_launches):
    found = dispatch(threads=threads, group=group)
    groups = tuple(-(-t // g) for t, g in zip(threads, group))
    edges = [sorted({launch.first_threadgroup[d] for launch in found}) for d in range(3)]
    for launch in found:
        assert launch.threads_per_grid == threads and launch.threadgroups_per_grid == groups and launch.block == group
        for d in range(3):  # to the next slab's edge, or the grid's
            ends = [edge for edge in edges[d] if edge > launch.first_threadgroup[d]]
            assert launch.first_threadgroup[d] + launch.grid[d] == (ends[0] if ends else groups[d])
    corners = {launch.first_threadgroup for launch in found}
    assert len(corners) == len(found) == len(edges[0]) * len(edges[1]) * len(edges[2]) == expected_launches
check((2**31 - 1, 65535, 65535), (1, 1, 1), 1)
check((2**31, 1, 1), (1, 1, 1), 2)
check((2**32 - 1, 1, 1), (1, 1, 1), 3)
check((2**32 - 1, 1, 1), (64, 1, 1), 1)
check((3, 65536, 1), (2, 1, 1), 2)
check((3, 2 * 65536, 65535 * 2 + 1), (1, 2, 1), 6)
check((5, 4 * 65535 + 1, 1), (1, 4, 64), 2)
""")


def test_threadgroups_deeper_than_cudas_blocks_lie_in_a_row(run):
    run("""
Compiler()
for group in [(1, 1, 512), (2, 4, 128), (3, 1, 65)]:
    launch, = dispatch(threads=(7, 9, 1000), group=group)
    assert launch.block == (group[0] * group[1] * group[2], 1, 1) and launch.threads_per_threadgroup == group
    assert launch.grid == launch.threadgroups_per_grid == tuple(-(-t // g) for t, g in zip((7, 9, 1000), group))
launch, = dispatch(threads=(7, 9, 1000), group=(4, 4, 64))
assert launch.block == (4, 4, 64)
assert "(1, 1, 1025) threads; on this GPU it may have up to 1024" in refusal(ValueError, group=(1, 1, 1025))
assert "(65536, 65536, 65)" in refusal(ValueError, group=(65536, 65536, 65))
""")


def test_threadgroup_memory_beyond_48_kib(run):
    run("""
Compiler(shared=1024)
most = 227 * 1024 - 1024
launch, = dispatch("large", lengths=[most - 32, 17])
assert launch.values == {"t0": 0, "t1": most - 32} and launch.shared == most
assert refusal(ValueError, "large", lengths=[most, 1]) == (
    f"metalcore: kernel 'large': {most + 16} bytes of threadgroup memory for its arguments; "
    f"this GPU has {most} for them")
assert str(2**32 - 1) in refusal(ValueError, "large", lengths=[2**32 - 1] * 2)
""")


def test_pipelines_have_memory_behind_that_of_arguments(run):
    """Code has the names of variables that say how many KiB a kernel's pipelines want."""
    run("""
Compiler(shared=1024, more="_ZN3msl22metalcore_pipeline_kibILi33EEE _ZN3msl22metalcore_pipeline_kibILi97EEE")
launch, = dispatch("plain")
assert launch.shared == 97 * 1024
most = (227 - 1 - 97) * 1024
launch, = dispatch("large", lengths=[most])
assert launch.values == {"t0": 0} and launch.shared == most + 97 * 1024
assert f"this GPU has {most} for them" in refusal(ValueError, "large", lengths=[most + 1])
""")


def test_the_kernel_says_how_many_threads(run):
    run("""
Compiler(threads=256)
assert len(dispatch(group=(256, 1, 1))) == 1
assert "(257, 1, 1) threads; on this GPU it may have up to 256" in refusal(ValueError, group=(257, 1, 1))
""")


def test_streams_and_devices(run):
    run(
        """
import threading
Compiler()
seen = {}
def work(device, stream):
    torch_cuda.fake_set_stream(device, ctypes.c_void_p(stream))
    for _ in range(50):
        C.cuda_dispatch(0, "k", device, [(stream, 8)], [], (1, 1, 1), (1, 1, 1))
    seen[device, stream] = driver.fake_depth()
threads = [threading.Thread(target=work, args=(i % 2, 0x100 + i)) for i in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert set(seen.values()) == {0} and len(seen) == 8
found = launches()
assert len(found) == 400
for launch in found:
    assert launch.stream == launch.values["b0"] and launch.device == launch.stream % 2
    assert launch.arch == {0: 90, 1: 80}[launch.device]
assert driver.fake_functions() == 2
""",
        streams=True,
    )


def test_another_current_context_is_put_back(run):
    run("""
Compiler()
other, own = ctypes.c_void_p(0x1001), ctypes.c_void_p(0x1000)
current = ctypes.c_void_p()
for context in (other, own):
    driver.cuCtxPushCurrent_v2(context)
    launch, = dispatch(device=0)
    refusal(ValueError, group=(2048, 1, 1))
    driver.cuCtxGetCurrent(ctypes.byref(current))
    assert launch.device == 0 and current.value == context.value
assert driver.fake_depth() == 2
""")


def test_kernels_may_begin_before_those_ahead_have_ended(run):
    """From compute capability 9.0 on: the second device has 8.0."""
    both = """
Compiler()
print([dispatch(device=device)[0].overlaps for device in (0, 1)])
"""
    assert run(both) == "[True, False]\n"
    assert run(both, driver_flags=["-DVERSION=12040"]) == "[True, False]\n"
    assert run(both, driver_flags=["-DVERSION=12030"]) == "[False, False]\n"


def test_errors_of_a_launch_name_the_kernel(run):
    assert run("""
Compiler()
dispatch()
driver.fake_fail_launches(700)
print(refusal(RuntimeError, threads=(10, 1, 1), group=(4, 1, 1)))
driver.fake_fail_launches(999)
print(refusal(RuntimeError, "other"))
""").splitlines() == [
        (
            "metalcore: launching kernel 'k' on (3, 1, 1) threadgroups of (4, 1, 1) threads failed: "
            "CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered; unless CUDA_LAUNCH_BLOCKING=1 was "
            "set, a kernel before it may be the one at fault"
        ),
        "metalcore: launching kernel 'other' on (1, 1, 1) threadgroups of (1, 1, 1) threads failed: CUDA error 999",
    ]


def test_a_device_that_is_not_there(run):
    run("""
Compiler()
assert "finding the GPU failed: CUDA error 101" in refusal(RuntimeError, device=2)
assert "there is no GPU with the number -1" in refusal(RuntimeError, device=-1)
assert "there is no GPU with the number 64" in refusal(RuntimeError, device=64)
""")


def test_fork(run):
    """CUDA works after a fork only where the process had not used it before."""
    assert run("""
import os, warnings
warnings.simplefilter("ignore", DeprecationWarning)
def in_child(work):
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            sys.stdout.flush()
            os._exit(0)
    os.waitpid(child, 0)
Compiler()
in_child(lambda: print(len(dispatch()), flush=True))
dispatch()
in_child(lambda: print(refusal(RuntimeError)[:81], flush=True))
in_child(lambda: print("reason" in C.cuda_info(), flush=True))
""").splitlines() == [
        "1",
        "metalcore: CUDA cannot be used in a process that was forked from one which had used it"[:81],
        "True",
    ]


def test_information(run):
    run("""
assert C.cuda_info() == {"driver": "13.0", "devices": [
    {"name": "Fake GPU 0", "arch": 90, "memory": 1 << 33, "multiprocessors": 100},
    {"name": "Fake GPU 1", "arch": 80, "memory": 1 << 34, "multiprocessors": 101}]}
assert driver.fake_depth() == 0
""")


def test_plans_know_the_multiprocessors(run):
    """Once the driver is in use: a process that only asks for plans does not initialize it."""
    run("""
def fill():
    return [t["value"] for t in C.tunables("cuda") if (t["table"], t["field"]) == ("parallelism", "fill_threadgroups")]
assert fill() == [[2 * 132]]
Compiler()
dispatch()
assert fill() == [[2 * 100]]
""")


@pytest.mark.skipif(find_library("cuda") is not None, reason="there is a driver")
def test_without_a_driver(run):
    assert "there is no NVIDIA driver: libcuda.so.1: cannot open" in run(
        """
Compiler()
print(C.cuda_info()["reason"])
try:
    C.cuda_dispatch(0, "k", 0, [], [], (1, 1, 1), (1, 1, 1))
except RuntimeError as error:
    assert str(error) == C.cuda_info()["reason"]
""",
        driver=False,
    )


def test_a_driver_that_is_too_old(run):
    assert "has no cuLibraryLoadData; CUDA 12.1 and so driver 530 or newer is needed" in run(
        "print(C.cuda_info()['reason'])", driver_flags=["-DWITHOUT_LIBRARIES"]
    )
    assert "is one for CUDA 12.0; CUDA 12.1 and so driver 530 or newer is needed" in run(
        "print(C.cuda_info()['reason'])", driver_flags=["-DVERSION=12000"]
    )


def variant(device_type):
    with on_meta(device_type) as recorder:
        metalcore.softmax(torch.empty(8, 4096, device="meta"), -1)
    return recorder.recording.plans[0].variant


def test_cuda_and_the_simulator_plan_by_their_own_numbers():
    assert "hopper" in _C.tuning_families()
    assert (variant("cuda"), variant("mps")) == ("block8", "thread")
    try:
        _C.use_tuning("simulator")
        assert variant("cuda") == "thread"
    finally:
        _C.use_tuning("")


def test_explain_takes_the_device_of_the_tensor():
    with torch._subclasses.FakeTensorMode():
        x = torch.empty(8, 4096, device="cuda")
    assert metalcore.explain("softmax", x).variant == "block8"


def test_operators_have_kernels_for_every_backend():
    for name in (name for op in OPS.values() for name in op.operators):
        for key in ("CUDA", "MPS"):
            assert torch._C._dispatch_has_computed_kernel_for_dispatch_key(f"metalcore::{name}", key), (name, key)


PROGRAM = f"""
sys.path.insert(0, {str(Path(metalcore.__file__).parent)!r})
from msl.runtime import signatures

compiler = Compiler()
for size in (1, 4, 16, 17, 255, 256, 257, 512, 513, 1024, 2049, 4096):
    buffers = [(4096, 8), bytes(size), None, [(8192, 8)] * ((size + 7) // 8)]
    expected = signatures.of_call(buffers, [16, 32])
    C.cuda_attributes(7, f"kernel{{size}}", expected, 0)
    C.cuda_dispatch(7, f"kernel{{size}}", 0, buffers, [16, 32], (1, 1, 1), (1, 1, 1))
print(len(compiler.calls))
"""


def test_one_compilation_serves_both(run):
    assert run(PROGRAM).split() == ["12"]
