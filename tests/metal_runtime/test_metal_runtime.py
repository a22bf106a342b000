"""The rules of Metal's API validation and of PyTorch's streams in the Metal runtime for tests, each with a fault that
breaks it; and the backend's errors."""

import json
import shutil

import pytest
from running import PROGRAM, needs_runtime, run

pytestmark = needs_runtime

FAULTS = {
    "an encoder kept after its block": "used after the block that fetched it",
    "an encoder kept across an op of PyTorch's": "used after PyTorch ended it",
    "an encoder used off the queue": "used outside of the stream's queue",
    "commandEncoder() off the queue": "commandEncoder() is called outside of the stream's queue",
    "another stream's encoder": "commandEncoder() is called outside of the stream's queue",
    "another stream's queue": "work for stream 0 where stream 1 is the current one",
    "the current stream asked for on the queue": "getCurrentMPSStream() is called on a stream's queue",
    "a block on the queue within a block on the queue": "called on a stream's queue",
    "an op of PyTorch's on the queue": "work of PyTorch in a block on a stream's queue",
    "an allocation on the queue": "an allocation in a block on a stream's queue",
    "memory freed before its dispatch": "memory that was freed before the dispatch",
    "memory freed while another stream's command is in flight": (
        "memory of stream 1 is freed while a command in flight on stream 0 uses it"
    ),
    "an unbound buffer": "at index 0 is not bound",
    "a buffer bound for the kernel before": "at index 0 is not bound",
    "buffers that an op of PyTorch's left bound": "at index 0 is not bound",
    "a buffer smaller than a struct": "has 4 bytes, and its type",
    "more threads than registers may allow": "a threadgroup of 385 threads",
    "more threads than a template's instance has": "a threadgroup of 257 threads",
    "a result read after a commit without a wait": "read before it is there",
    "a command buffer that is too long": "seconds long, and macOS ends long ones",
    "a commit off the queue": "synchronize() is called outside of the stream's queue",
    "a program's encoder used after its end": "used after endEncoding",
    "a program's command buffer committed with an open encoder": "committed while its encoder is open",
    "a program's command buffer committed twice": "committed twice",
    "a wait before a commit": "a wait for a command buffer that is not committed",
    "a program's encoder behind a commit": "an encoder of a command buffer that is committed",
    "PyTorch's encoder ended": "PyTorch's encoder is ended by somebody else",
    "the memory of PyTorch's buffer": "the CPU asks for the memory of a buffer of PyTorch's",
    "a buffer without bytes": "a buffer of 0 bytes",
    "a program's command buffer that is too long": "seconds long, and macOS ends long ones",
    "a program's result read without a wait": "read before it is there",
    "no pipeline": "without a pipeline state",
    "too many bytes": "4097 bytes at index 0",
    "no bytes": "0 bytes at index 0",
    "an index beyond 30": "indices go up to 30",
    "an offset outside the buffer": "lies outside its buffer",
    "an offset that is not aligned": "has an offset of 2 bytes, no multiple of 4",
    "no threads": "a dispatch of no threads",
    "too many threads in a threadgroup": "a threadgroup of 1025 threads",
    "threadgroup memory beside a kernel's own": "34176 bytes of threadgroup memory",
    "threadgroup memory of an odd length": "20 bytes of threadgroup memory",
    "an address without useResource": "without useResource",
    "a written buffer used for reading only": "for reading only",
    "no buffer among those in use": "no buffer among those that kernels use",
    "a program compiled on the queue": "a program is compiled in a block on a stream's queue",
    "a program compiled with the GIL": "a program is compiled while the thread has Python's GIL",
    "fast math": "fastMathEnabled is set, which macOS 15 deprecates",
    "another math mode": "another math mode than MTLMathModeSafe",
    "the fast functions": "with the fast floating-point functions",
    "another version of Metal": "not compiled as MSL 3.1",
    "an include": "includes a file",
    "a function constant": "has function constants",
    "a program that avoids subnormal numbers": "or avoids them where not",
    "an object autoreleased outside of a pool": "outside of a pool",
}

RIGHT = (
    "none",
    "the backend's options",
    "a program that counts on subnormal numbers",
    "a result read after a wait",
    "memory freed while its own stream's command is in flight",
    "memory freed when another stream's command is over",
    "a program's result read after a wait",
)


def test_every_kernel_becomes_a_pipeline(extension):
    run(
        extension,
        "-c",
        PROGRAM
        + """
assert len(_C.mps_kernels()) > 200
limits = _C.mps_compile(*_C.mps_kernels())
for name, of_kernel in limits.items():
    assert 32 <= of_kernel["max_total_threads_per_threadgroup"] <= 1024, name
assert use_runtime.compiled()[0] == len(set(_C.mps_kernels().values()))
assert _C.mps_gpu_family() == "apple7"
memory = {name: of_kernel["static_threadgroup_memory_length"] for name, of_kernel in limits.items()}
assert max(memory.values()) <= 32768 and sum(size > 0 for size in memory.values()) > 100
assert memory["silu_dense_float"] == 0 and memory["softmax_block4_float"] == 256
assert memory["jacobi_round"] == 4 * (4 * 32 * 33 + 32 * 33 + 32 * 36 + 4 * 16)
""",
    )


def test_unknown_kernels(extension):
    run(
        extension,
        "-c",
        PROGRAM
        + """
try:
    _C.mps_compile("no_such_kernel")
except RuntimeError as error:
    assert "no built-in kernel named 'no_such_kernel'" in str(error)
""",
    )


def test_families_with_sources_of_one_name(extension, tmp_path):
    copy = tmp_path / "_C.abi3.so"
    shutil.copy(extension, copy)
    for folder in ("first", "second"):
        source = tmp_path / "lib" / "metal" / folder / "forward.metal"
        source.parent.mkdir(parents=True)
        source.write_text(f"#error of the {folder}\n")
    (tmp_path / "lib" / "index").write_text("first/forward one\nsecond/forward another\n")
    run(
        copy,
        "-c",
        PROGRAM
        + """
assert _C.mps_kernels() == {"another": "second/forward", "one": "first/forward"}
for kernel, folder in (("one", "first"), ("another", "second")):
    try:
        _C.mps_compile(kernel)
    except RuntimeError as error:
        assert f"#error of the {folder}" in str(error), error
    else:
        raise AssertionError(kernel)
""",
    )


def faults(extension, names, **environment):
    """{fault: the error that it caused}, of a process of its own, which has only this build."""
    return json.loads(
        run(
            extension,
            "-c",
            PROGRAM
            + f"""
import json
print(json.dumps({{name: use_runtime.fault(name) for name in {[*names]!r}}}))
""",
            **environment,
        )
    )


@pytest.fixture(scope="module")
def said(extension):
    return faults(extension, (*RIGHT, *FAULTS), METALCORE_FTZ="0")


@pytest.mark.parametrize("fault", FAULTS)
def test_misuse_is_found(said, fault):
    assert FAULTS[fault] in said[fault]


@pytest.mark.parametrize("use", RIGHT)
def test_right_use_is_not_misuse(said, use):
    assert said[use] == ""


def test_the_options_of_macos_14(extension):
    """It has the old switch alone."""
    names = ("none", "the backend's options", "fast math", "another math mode", "the fast functions")
    said = faults(extension, names, METAL_RUNTIME_MACOS="14")
    assert [said[name] for name in names[:2]] == ["", ""]  # "none" has kernels compiled
    assert "compiled with fast math" in said["fast math"]
    assert "unrecognized selector setMathMode:" in said["another math mode"]
    assert "unrecognized selector setMathFloatingPointFunctions:" in said["the fast functions"]


@pytest.mark.parametrize("flushes", ["0", "1"])
def test_a_gpu_without_half_subnormals_gets_other_programs(extension, flushes):
    """The backend asks the GPU, once, and only for kernels that depend on it."""
    names = ("a program that counts on subnormal numbers", "a program that avoids subnormal numbers")
    said = faults(extension, names, METALCORE_FTZ=flushes)
    assert [said[name] == "" for name in names] == [flushes == "0", flushes == "1"]
    run(
        extension,
        "-c",
        PROGRAM
        + f"""
from metalcore.quant._types import packed_sample
from metalcore.quant import type_of
from metalcore.quant._unpack import unpack
torch.softmax(torch.ones(4, device="mps"), -1)
assert metalcore.softmax(torch.ones(4, device="mps"), -1).sum().item() == 1
before = use_runtime.compiled()[0]
for kind in ("Q4_K", "MXFP4", "IQ4_NL"):
    packed = packed_sample(kind, 6, 512)
    found = metalcore.dequantize(packed.to("mps"), kind).cpu()
    assert torch.equal(found, unpack(packed, type_of(kind))), kind
assert use_runtime.compiled()[0] == before + 4  # a program for each type, and the one that asks
assert _C.mps_half_subnormals() is {flushes == "0"}
assert use_runtime.compiled()[0] == before + 4
""",
        METALCORE_FTZ=flushes,
    )


@pytest.mark.parametrize("cores", ["10", "40", "0"])
def test_plans_know_the_cores_of_the_gpu(extension, cores):
    """From IOKit's registry; where it says nothing, there are eight. Each object of the registry is given back."""
    run(
        extension,
        "-c",
        PROGRAM
        + f"""
expected = {int(cores) or 8}
found = {{(t["table"], t["field"]): t for t in _C.tunables("mps")}}["parallelism", "fill_threadgroups"]
assert found["value"] == [found["per_core"] * expected] and found["per_core"] == 3
_C.use_tuning("apple7")
assert {{t["field"]: t["value"] for t in _C.tunables("mps")}}["row_threads"] == [1024 * expected]
_C.use_tuning("apple9")  # another GPU than the one here
assert {{t["field"]: t["value"] for t in _C.tunables("mps")}}["row_threads"] == [1024 * 8]
import ctypes, os
assert ctypes.CDLL(os.environ["METALCORE_TEST_EXTENSION"]).metal_runtime_registry_objects() == 0
""",
        METAL_RUNTIME_CORES=cores,
    )
