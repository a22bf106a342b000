"""CUDA contexts of libmetalcore: what it compiles and launches, with a driver and an NVRTC that only take notes."""

import json
import os
import struct
import subprocess
from pathlib import Path

import pytest
import torch

import metalcore
from metalcore.msl.language.cuda_source import cuda_source
from metalcore.msl.nvidia import cuda, nvrtc
from metalcore.recording import on_meta

LIBRARY = Path(metalcore.__file__).parent / "lib"
A, B, C = (number << 32 for number in range(1, 4))  # addresses of a GPU's memory, which nobody reads

PRINT = """
import json
for launch in found:
    values = {name: value.hex() if isinstance(value, bytes) else value for name, value in launch.values.items()}
    program = nvrtc.fake_program(int(launch.kernel)).decode()
    print(json.dumps({**vars(launch), "values": values, "source": program}))
"""


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, device="meta", dtype=dtype)


def bfloat16(*shape):
    return meta(*shape, dtype=torch.bfloat16)


# The C function's arguments; the same op of the Python package; kernels' arguments that get the addresses.
CASES = {
    "softmax_float": ((A, B, 8, 4096, 1.0), lambda: metalcore.softmax(meta(8, 4096), -1), {"x": A, "y": B}),
    "silu_and_mul_bfloat16": ((A, B, 64, 512), lambda: metalcore.silu_and_mul(bfloat16(64, 1024)), {"gate": A, "y": B}),
    "rms_norm_float": (
        (A, B, C, 8, 4096, 0.5),
        lambda: metalcore.rms_norm(meta(8, 4096), (4096,), meta(4096), 0.5),
        {"x": A, "weight": B, "y": C},
    ),
    "gemm_bfloat16": (
        (A, B, None, C, 256, 512, 128, 0, 0, 128, 512),
        lambda: metalcore.matmul(bfloat16(256, 128), bfloat16(128, 512)),
        {"a": A, "b": B, "result": C},
    ),
    "topk_float": (
        (A, B, C, 4, 32000, 50),
        lambda: metalcore.topk(meta(4, 32000), 50),
        {"x": A, "values": B, "indices": C},
    ),
}


def of_program(kernel):
    """(the translated program of the kernel's family, what is known of its kernels)."""
    for family, (_, kernels) in cuda.builtin_programs().items():
        if kernel in kernels:
            return (LIBRARY / "cuda" / f"{family}.cu").read_text(), kernels
    raise KeyError(kernel)


def assert_same(found, expected):
    """Parameters are equal, except for the four bytes in front of eight, which a struct may have as padding."""
    count = (len(expected) + 3) // 4
    words = [struct.unpack(f"<{count}I", data[: 4 * count].ljust(4 * count, b"\0")) for data in (found, expected)]
    differ = [number for number, (a, b) in enumerate(zip(*words)) if a != b]
    assert all(number % 2 for number in differ) and len(differ) <= 2
    assert not any(found[4 * count :])


@pytest.mark.parametrize("function", CASES)
def test_launches_are_those_of_the_python_package(run_c, function):
    """The program, the bindings and the grid of each launch, its stream and its GPU."""
    arguments, python, addresses = CASES[function]
    said = run_c(f"context(stream=0x77)\nfound = call({function!r}, *{arguments})" + PRINT)
    launches = [json.loads(line) for line in said.splitlines()]
    with on_meta("cuda") as recorder:
        python()
    dispatches, places, seen = recorder.recording.dispatches, {}, set()
    for launch, dispatch in zip(launches, dispatches, strict=True):
        assert (launch["stream"], launch["device"], launch["arch"]) == (0x77, 0, 90)
        group = dispatch.threadgroup
        threads = dispatch.grid if dispatch.threads else tuple(a * b for a, b in zip(dispatch.grid, group))
        assert (tuple(launch["threads_per_grid"]), tuple(launch["threads_per_threadgroup"])) == (threads, group)
        program, kernels = of_program(dispatch.kernel)
        assert launch["source"] == cuda_source(program, kernels, [(dispatch.kernel, launch["signature"])])[0]
        values = launch["values"]
        assert len(values) == len(dispatch.arguments)
        for index, kind, value in dispatch.arguments:
            if kind == "bytes":
                assert_same(bytes.fromhex(values[f"i{index}"]), value)
            elif kind == "threadgroup":
                assert f"t{index}" in values
            elif value is None:
                assert values[f"b{index}"] == 0
            else:
                number, first, _ = value
                assert places.setdefault(number, values[f"b{index}"] - first) == values[f"b{index}"] - first
        for name, kind, index, _ in kernels[dispatch.kernel]["arguments"]:
            if kind == "buffer" and name in addresses:
                seen.add(name)
                assert values[f"b{index}"] == addresses[name]
    assert seen == addresses.keys()
    assert len(set(places.values())) == len(places)


@pytest.mark.parametrize("index, target", [(0, "sm_90"), (1, "compute_70")])
def test_options_are_those_of_the_python_package(run_c, index, target):
    said = run_c(
        f"""
context({index})
call("add_float", 1 << 32, 2 << 32, 3 << 32, 100)
print(nvrtc.fake_options(0).decode())
""",
        METALCORE_NVRTC_FLAGS=" -lineinfo  -G",
        METALCORE_LIBRARY_DIR=f"{LIBRARY}/",
    )
    include = LIBRARY.parent / "msl" / "include"
    paths = [f"--include-path={path}" for path in (include, include / "cuda")]
    flags = [*nvrtc.FLAGS, *cuda._BUILTIN_FLAGS, "-lineinfo", "-G"]
    assert said.split() == [f"--gpu-architecture={target}", *paths, *flags]


def test_threadgroups_that_merge_their_results_are_a_cluster(run_c):
    """From compute capability 9.0 on. On the other GPU a second kernel merges them."""
    said = run_c("""
class Pages(ctypes.Structure):
    _fields_ = [(f"number{i}", ctypes.c_int) for i in range(7)] + [(f"indices{i}", ctypes.c_void_p) for i in range(3)]
pages = Pages(32, 16, 1, 64, 0, 1, 32, 1 << 32, 2 << 32, 3 << 32)
for index in (0, 1):
    context(index)
    arguments = 4 << 32, 5 << 32, 6 << 32, ctypes.byref(pages), 7 << 32, 8 << 32, 16, -1, 1.0, 0.0
    print([(launch.together, launch.grid) for launch in call("batch_decode_bfloat16", *arguments)])
""")
    assert said.splitlines() == ["[(8, (1, 8, 1))]", "[(1, (1, 8, 1)), (1, (16, 1, 1))]"]


def test_a_kernel_is_compiled_once(run_c):
    run_c("""
for index in (0, 0):
    context(index)
    for n in (100, 200):
        call("add_float", 1 << 32, 2 << 32, 3 << 32, n)
assert nvrtc.fake_program_count() == 1
context(1)
call("add_float", 1 << 32, 2 << 32, 3 << 32, 100)
assert nvrtc.fake_program_count() == 2
""")


def test_contexts_of_threads(run_c):
    """Each thread's calls go to the stream and the GPU of its context. The thread's CUDA context is put back."""
    run_c("""
import threading
failed = []
def work(number):
    try:
        made = context(number % 2, 0x100 + number)
        for _ in range(50):
            found = status("rms_norm_float", number << 32, None, (number << 32) + 65536, 4, 128, 0.5)
            assert found == ("METALCORE_OK", ""), found
        error = status("rms_norm_float", number << 32, None, 100 + number << 32, -number, 128, 0.5)
        assert error == ("METALCORE_INVALID_ARGUMENT", "metalcore_rms_norm_float: rows must not be negative")
        assert driver.fake_depth() == 0
        assert status("context_destroy", made) == ("METALCORE_OK", "")
    except BaseException as error:
        failed.append(error)
threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 9)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert not failed, failed
found = fake_gpu.launches()
assert len(found) == 400
for launch in found:
    number = launch.stream - 0x100
    assert launch.device == number % 2
    assert {value for name, value in launch.values.items() if name[0] == "b"} >= {number << 32}
""")


def test_scratch_memory_is_the_gpus_and_is_reused(run_c):
    """A call that fills scratch memory. Its context keeps that, and frees it at its end, behind the stream's work."""
    run_c("""
made = context(1, 0x99)
for _ in range(3):
    found = call("top_k_mask_logits_float", 1 << 32, 2 << 32, 4, 5000, 10)
    allocations = driver.fake_allocations()
    scratch = fills()[-1]
    assert (scratch.value, scratch.width, scratch.count, scratch.stream) == (0x41200000, 4, 4, 0x99)  # 10.0
    assert scratch.memory in {value for launch in found for value in launch.values.values()}
assert driver.fake_allocations() == allocations == driver.fake_allocated() == 1
assert driver.fake_waits() == 0
assert status("context_destroy", made) == ("METALCORE_OK", "")
assert driver.fake_allocated() == 0 and driver.fake_waits() == 1
""")


def test_memory_for_the_caller(run_c):
    """It is the GPU's of the thread's context, and another context of this GPU may free it."""
    run_c("""
context(1)
memory = ctypes.c_void_p()
assert status("memory_allocate", ctypes.c_size_t(1000), ctypes.byref(memory)) == ("METALCORE_OK", "")
assert memory.value and driver.fake_allocated() == 1
driver.fake_fill_memory(1)
other = ctypes.c_void_p(1)
assert status("memory_allocate", ctypes.c_size_t(1), ctypes.byref(other))[0] == "METALCORE_OUT_OF_MEMORY" and not other
context(1)
assert status("memory_free", memory) == ("METALCORE_OK", "")
assert driver.fake_allocated() == 0 and driver.fake_depth() == 0
""")


def test_memory_of_the_gpu_is_not_read(run_c):
    """The numbers of pages lie there too, and are not checked by the CPU."""
    run_c("""
class Pages(ctypes.Structure):
    _fields_ = [*((f"i{i}", ctypes.c_int) for i in range(7)), *((f"p{i}", ctypes.c_void_p) for i in range(3))]
context()
pages = Pages(8, 16, 2, 64, 0, 3, 8, *(i << 32 for i in (1, 2, 3)))
assert call("batch_decode_float", 4 << 32, 5 << 32, 6 << 32, ctypes.byref(pages), 7 << 32, None, 4, -1, 0.1, 0.0)
""")


def test_errors(run_c):
    run_c("""
context()
driver.fake_fail_launches(700)
said, error = status("add_float", 1 << 32, 2 << 32, 3 << 32, 100)
assert said == "METALCORE_FAILED" and "CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access" in error
driver.fake_fail_launches(0)
driver.fake_fill_memory(1)
said, error = status("top_k_mask_logits_float", 1 << 32, 2 << 32, 4, 5000, 10)
assert (said, error) == ("METALCORE_OUT_OF_MEMORY", "metalcore_top_k_mask_logits_float: there is not enough memory")
driver.fake_fill_memory(0)
assert call("top_k_mask_logits_float", 1 << 32, 2 << 32, 4, 5000, 10)
assert driver.fake_depth() == 0
""")


def test_capture_of_a_graph(run_c):
    """A call that has run before neither compiles nor allocates nor waits."""
    run_c("""
made = context(stream=0x77)
for capturing in (0, 1):
    driver.fake_capture(capturing)
    for vocab in (5000, 200):
        call("top_k_mask_logits_float", 1 << 32, 2 << 32, 4, vocab, 10)
    assert (driver.fake_allocations(), driver.fake_waits(), driver.fake_capture_mode()) == (1, 0, 0)
driver.fake_capture(0)
""")


def test_programs_that_do_not_compile(run_c):
    run_c(
        """
context()
said, error = status("add_float", 1 << 32, 2 << 32, 3 << 32, 100)
assert (said, error) == (
    "METALCORE_FAILED",
    "metalcore_add_float: NVRTC: NVRTC_ERROR_COMPILATION\\nmsl_program(7): error: failed",
)
assert driver.fake_launch_count() == 0
""",
        METALCORE_NVRTC_FLAGS="-DFAIL",
    )


CREATE = """
made = ctypes.c_void_p(1)
print(*status("context_create", ctypes.byref(made), 1, {index}, None))
assert not made
"""


@pytest.mark.parametrize("index", [-1, 2, 64])
def test_a_gpu_that_is_not_there(run_c, index):
    assert run_c(CREATE.format(index=index)).startswith("METALCORE_NO_DEVICE metalcore_context_create: ")


@pytest.mark.parametrize(
    "nvrtc_flags, environment, says",
    [
        ((), {"METALCORE_NVRTC": "/none.so"}, "NO_DEVICE metalcore_context_create: kernels for NVIDIA GPUs need NVRTC"),
        (["-DMINOR=5"], {}, "is version 12.5)"),
        (
            (),
            {"METALCORE_LIBRARY_DIR": "{folder}"},
            "METALCORE_NO_KERNELS metalcore_context_create: kernels for NVIDIA",
        ),
    ],
)
def test_what_is_missing(run_c, tmp_path, nvrtc_flags, environment, says):
    os.symlink(LIBRARY / "index", tmp_path / "index")
    environment = {name: value.format(folder=tmp_path) for name, value in environment.items()}
    assert says in run_c(CREATE.format(index=0), nvrtc_flags=nvrtc_flags, **environment)


@pytest.mark.skipif(os.path.exists("/proc/driver/nvidia"), reason="there is a driver")
def test_without_a_driver(run_c):
    said = run_c(CREATE.format(index=0), driver=False)
    assert said.startswith("METALCORE_NO_DEVICE metalcore_context_create: there is no NVIDIA driver: libcuda.so.1")


def test_nvidias_libraries_are_not_linked():
    library = str(LIBRARY / "libmetalcore.so")
    needed = subprocess.run(["ldd", library], capture_output=True, text=True, check=True).stdout
    assert "libc.so" in needed and "cuda" not in needed and "nvrtc" not in needed
