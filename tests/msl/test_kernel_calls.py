"""Calls of compile_shader's kernels: grids, what is bound to each buffer, and calls that cannot be made."""

import contextlib
import math
import struct
import sys
from pathlib import Path

import pytest
import torch

import metalcore

PYTORCHS = Path(torch.__file__).parent / "include/c10/metal"


@pytest.fixture(scope="module")
def fill():
    return metalcore.compile_shader("""
        kernel void fill(device float* out, constant float& value, uint i [[thread_position_in_grid]]) {
          out[i] = value;
        }""")


def test_kernel_properties(fill):
    assert fill.fill.max_threads_per_threadgroup == 1024
    assert fill.fill.thread_execution_width == 32
    assert fill.fill.static_thread_group_memory_length == 0
    limited = metalcore.compile_shader(
        "[[kernel, max_total_threads_per_threadgroup(96)]] void k(device int* x) { x[0] = 1; }"
    )
    assert limited.k.max_threads_per_threadgroup == 96


SHARED = """kernel void k(device int* x, uint t [[thread_index_in_threadgroup]]) {
  threadgroup int a[24];
  a[t % 24] = x[t];
  threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  x[t] = a[23 - t % 24];
}"""


@pytest.mark.only_on("simulator")
def test_the_simulator_learns_of_threadgroup_memory_as_it_runs():
    with pytest.raises(RuntimeError, match="only as it runs"):
        metalcore.compile_shader(SHARED).k.static_thread_group_memory_length  # noqa: B018


@pytest.mark.only_on("cuda")
def test_cuda_knows_the_threadgroup_memory():
    assert metalcore.compile_shader(SHARED).k.static_thread_group_memory_length == 96


def test_threads_default_to_the_first_tensor(device, fill):
    x = torch.zeros(5000, device=device)
    fill.fill(x, 3.14)
    assert torch.equal(x.cpu(), torch.full((5000,), 3.14))
    fill.fill(x, 1.0, threads=7)
    assert x.sum().item() == pytest.approx(7 + 4993 * 3.14, rel=1e-5)
    fill.fill(x, 5.0, threads=0)
    fill.fill(x[:0], 5.0)
    assert x.max().item() < 4


@pytest.mark.parametrize("threads, group_size", [((6, 4), None), ((6, 4), (3, 2)), ((6, 4), (4, 3)), ([6, 4], [1, 1])])
def test_grids_of_two_dimensions(device, threads, group_size):
    library = metalcore.compile_shader("""
        kernel void k(device int* out, uint2 p [[thread_position_in_grid]], uint2 n [[threads_per_grid]]) {
          out[p.y * n.x + p.x] = p.x * 100 + p.y;
        }""")
    out = torch.full((4, 6), -1, dtype=torch.int32, device=device)
    library.k(out, threads=threads, group_size=group_size)
    assert out.tolist() == [[x * 100 + y for x in range(6)] for y in range(4)]


def test_grids_of_three_dimensions(device):
    library = metalcore.compile_shader("""
        kernel void k(device int* out, uint3 p [[thread_position_in_grid]], uint3 n [[threads_per_grid]]) {
          out[(p.z * n.y + p.y) * n.x + p.x] = p.x + 10 * p.y + 100 * p.z;
        }""")
    out = torch.full((2, 3, 5), -1, dtype=torch.int32, device=device)
    library.k(out, threads=(5, 3, 2), group_size=(2, 2, 2))
    x, y, z = torch.arange(5), torch.arange(3)[:, None], torch.arange(2)[:, None, None]
    assert torch.equal(out.cpu(), (x + 10 * y + 100 * z).int())


def test_tensors_are_bound_at_their_first_element(device):
    library = metalcore.compile_shader("""
        kernel void k(device float* out, device const float* x, uint i [[thread_position_in_grid]]) {
          out[i] = x[2 * i];
        }""")
    x = torch.arange(20.0, device=device)
    out = torch.zeros(6, device=device)
    library.k(out[2:], x[3:67])
    assert out.tolist() == [0, 0, 3, 5, 7, 9]


@pytest.mark.parametrize(
    "value, casts, type, expected",
    [
        (7, None, "long", 7),
        (-7, None, "int", -7),
        (2.5, None, "float", 2.5),
        (True, None, "long", 1),
        (2.5, "fp16", "half", 2.5),
        (2.5, "bf16", "bfloat", 2.5),
        (-3, "int32", "int", -3),
        (-3, "int16", "short", -3),
        (300, "uint8", "uchar", 44),
        (-1, {1: "int8"}, "char", -1),
        (2.75, {1: "int32"}, "int", 2),
        (2**62, None, "long", 2**62),
        (1e300, None, "float", math.inf),
    ],
)
def test_scalars(device, value, casts, type, expected):
    library = metalcore.compile_shader(
        f"kernel void k(device float* out, constant {type}& value) {{ out[0] = value; }}"
    )
    out = torch.zeros(1, device=device)
    library.k(out, value, arg_casts=casts)
    assert out.item() == expected


@pytest.mark.parametrize(
    "type, value, casts, problem",
    [
        ("int", 3.7, None, "3.7 is a float, whose bits are read as those of an int"),
        ("int", math.nan, None, "nan is a float"),
        ("int", 2**40, None, "1099511627776 is not -2147483648 to 4294967295"),
        ("uint", -(2**31) - 1, None, "-2147483649 is not"),
        ("uchar", 256, None, "256 is not -128 to 255"),
        ("bool", 2, None, "2 is not 0 to 1"),
        ("half", 1.5, None, r"1.5 is bound as a float32 \(see arg_casts\)"),
        ("bfloat", 1.5, "fp16", "1.5 is bound as a float16"),
        ("int", 7, "int16", r"7 is bound as an int16 \(see arg_casts\)"),
        ("int2", [1, 2], None, "1 is bound as an int64"),
        ("float4", [1.0, 2.0], None, "2 numbers for 4"),
        ("uint", 0xFFFFFFFF, None, None),
        ("uint", -1, None, None),
        ("bool", True, None, None),
        ("float", 0, None, None),
        ("float", math.nan, None, None),
        ("float2", [1.0, 2.0], None, None),
        ("uint2", [1, 2], "int32", None),
        ("long", 2**63 - 1, None, None),
    ],
)
def test_numbers_that_the_kernel_would_read_as_others(device, type, value, casts, problem):
    kernel = metalcore.compile_shader(f"kernel void k(device float* out, constant {type}& value) {{}}").k
    out = torch.zeros(1, device=device)
    if problem is None:
        kernel(out, value, arg_casts=casts)
    else:
        with pytest.raises(RuntimeError, match=f"argument 'value' of kernel 'k' is {type}: {problem}"):
            kernel(out, value, arg_casts=casts)


def test_none_where_a_function_constant_is_off(device):
    source = """
        constant bool biased [[function_constant(0)]];
        kernel void k(device float* out, constant float& bias [[buffer(1), function_constant(biased)]]) {
          out[0] = biased ? bias : 7.0f;
        }"""
    out = torch.zeros(1, device=device)
    metalcore.compile_shader(source, constants={0: False}).k(out, None)
    assert out.item() == 7
    biased = metalcore.compile_shader(source, constants={0: True}).k
    biased(out, 2.5)
    assert out.item() == 2.5
    with pytest.raises((RuntimeError, ValueError), match="bias"):
        biased(out, None)


def test_lists_of_scalars_and_cpu_scalars(device):
    library = metalcore.compile_shader("""
        kernel void k(device float* out, constant long* ints, constant float* floats, constant int& zero,
                      constant float& d) {
          out[0] = ints[0] + ints[2]; out[1] = floats[1]; out[2] = zero; out[3] = d;
        }""")
    out = torch.zeros(4, device=device)
    library.k(
        out,
        (1, 2, 3),
        [0.5, 1.5],
        torch.tensor(9, dtype=torch.int32),
        torch.tensor(2.25, dtype=torch.float64),
        threads=1,
    )
    assert out.tolist() == [4, 1.5, 9, 2.25]


def test_lists_of_tensors_are_tables_of_their_addresses(device):
    library = metalcore.compile_shader("""
        kernel void k(device float* out, device float* const device* tensors, constant long& n,
                      uint i [[thread_position_in_grid]]) {
          for (int j = 0; j < n; ++j) out[i] += tensors[j][i];
        }""")
    out = torch.zeros(4, device=device)
    library.k(out, [torch.full((4,), float(i), device=device)[:] for i in range(5)], 5)
    assert out.tolist() == [10.0] * 4


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda k, x: k(torch.zeros(3), 1.0), RuntimeError, "Passed CPU tensor to MPS op"),
        (lambda k, x: k(x, "text"), RuntimeError, "Unsupported argument type"),
        (lambda k, x: k(x, None), RuntimeError, "Unsupported argument type"),
        (lambda k, x: k(x, []), RuntimeError, "Empty list/tuple"),
        (lambda k, x: k(x, ["a"]), RuntimeError, "Unexpected argument types"),
        (lambda k, x: k(x, [1, 2.5]), RuntimeError, "Unexpected argument types"),
        (lambda k, x: k(x, [x, 1]), RuntimeError, "must hold MPS tensors only"),
        (lambda k, x: k(x, 2**70), RuntimeError, "must fit in 64 bits"),
        (lambda k, x: k(12), RuntimeError, "Number of threads is undefined"),
        (lambda k, x: k(x, 1.0, threads=(1, 1, 1, 1)), RuntimeError, "one, two or three numbers"),
        (lambda k, x: k(x, 1.0, threads=-1), TypeError, "non-negative integers"),
        (lambda k, x: k(x, 1.0, threads=1.5), TypeError, "non-negative integers"),
        (lambda k, x: k(torch.complex(x, x).conj(), 1.0), RuntimeError, "would read a conjugated or negated view"),
        (lambda k, x: k(torch.complex(x, x).conj().imag, 1.0), RuntimeError, "would read a conjugated or negated"),
        (lambda k, x: k(x, 1.0, threads=True), TypeError, "non-negative integers"),
        (lambda k, x: k(x, 1.0, threads="12"), TypeError, "threads must be non-negative integers, got '12'"),
        (lambda k, x: k(x, 1.0, threads=2**32), ValueError, "threads must be less than"),
        (lambda k, x: k(x, 1.0, threads=3, group_size=(1.0,)), TypeError, "group_size must be non-negative integers"),
        (lambda k, x: k(x, 1.0, threadgroup_memory=-1), TypeError, "threadgroup_memory must be non-negative"),
        (lambda k, x: k(x, 1.0, threadgroup_memory=[None]), TypeError, "threadgroup_memory must be non-negative"),
        (lambda k, x: k(x, 1.0, threadgroup_memory=40000), ValueError, "40000 bytes; 32768 is the limit"),
        (lambda k, x: k(x, 1.0, threadgroup_memory=16), ValueError, "16 bytes for index 0, of which kernel 'fill'"),
        (lambda k, x: k(x, 1.0, error_buf_idx=-1), ValueError, "error_buf_idx must be 0 to 30"),
        (lambda k, x: k(x, 1.0, error_buf_idx=10**9), ValueError, "error_buf_idx must be 0 to 30"),
        (lambda k, x: k(x, 1.0, error_buf_idx=True), TypeError, "error_buf_idx must be an int"),
        (lambda k, x: k(x, 1.0, error_buf_idx=1), ValueError, "error_buf_idx is 1, where an argument is bound"),
        (lambda k, x: k(x, 3), RuntimeError, "'value' of kernel 'fill' is float: 3 is an int, whose bits are read"),
        (lambda k, x: k(x, torch.tensor(3)), RuntimeError, "'value' of kernel 'fill' is float: 3 is an int"),
        (lambda k, x: k(x, 3.0, arg_casts="fp16"), RuntimeError, "is float: 3.0 is bound as a float16"),
        (lambda k, x: k(x, math.nan, arg_casts="int32"), RuntimeError, r"\[nan\] cannot be cast to int32"),
        (lambda k, x: k(x, 3.0, arg_casts={2: "fp16"}), RuntimeError, "arg_casts names argument 2, and there are 2"),
        (lambda k, x: k(x, 3.0, arg_casts={"value": "fp16"}), RuntimeError, "arg_casts names argument 'value'"),
        (lambda k, x: k(x, 3.0, arg_casts={0: "fp16"}), RuntimeError, "argument 0, which is no scalar"),
        (lambda k, x: k(x, 1.0, *[1.0] * 30), RuntimeError, "is given 32 arguments; 31 buffers is the limit"),
        (lambda k, x: k(x, 1.0, threads=(2, 2), group_size=2), RuntimeError, "same number of dimensions"),
        (lambda k, x: k(x, 1.0, threads=3, group_size=1025), ValueError, "Threadgroup size exceeds 1024 limit"),
        (
            lambda k, x: k(x, 1.0, threads=(3, 3), group_size=(3, 1029)),
            ValueError,
            "Threadgroup size exceeds 1024 limit",
        ),
        (lambda k, x: k(x, 1.0, threads=3, group_size=0), ValueError, "group_size must be positive"),
        (lambda k, x: k(x, 1.0, arg_casts="fp64"), RuntimeError, "Unsupported cast instruction fp64"),
        (lambda k, x: k(x, 1.0, arg_casts=3), RuntimeError, "Unexpected caster arg type int"),
    ],
)
def test_calls_that_cannot_be_made(device, fill, call, error, message):
    x = torch.zeros(3, device=device)
    with pytest.raises(error, match=message.replace("MPS", device.upper())):
        call(fill.fill, x)
    assert x.tolist() == [0, 0, 0]


@pytest.mark.parametrize("header", sorted(path.name for path in PYTORCHS.glob("*.h")))
def test_pytorchs_headers(device, header):
    library = metalcore.compile_shader(f"""
        #include <metal_stdlib>
        #include <c10/metal/{header}>
        kernel void k(device float* x, uint i [[thread_position_in_grid]]) {{ x[i] = i; }}""")
    x = torch.zeros(3, device=device)
    library.k(x)
    assert x.tolist() == [0, 1, 2]


def test_pytorchs_indexing(device):
    """Its functions have overloads for device and constant memory."""
    library = metalcore.compile_shader("""
        #include <metal_stdlib>
        #include <c10/metal/indexing.h>
        using namespace metal;
        struct twice_functor {
          template <typename T> T operator()(const T x) { return x + x; }
        };
        REGISTER_UNARY_OP(twice, float, float);
        kernel void moved(device char* out, constant char* given, constant long& offset,
                          uint i [[thread_position_in_grid]]) {
          c10::metal::ref_at_offs<float>(out, i * 4) = c10::metal::val_at_offs<float>(given, offset + i * 4) +
                                                       c10::metal::val_at_offs<float>(out, i * 4);
        }""")
    x = torch.tensor([1.0, 2.0, 3.0, 4.0], device=device)
    out = torch.zeros(4, device=device)
    library.twice_dense_scalar_float_float(out, x)
    assert out.tolist() == [2, 4, 6, 8]
    library.moved(out, x, 4, threads=3)
    assert out.tolist() == [4, 7, 10, 8]


def test_errors_reported_by_kernels(device):
    library = metalcore.compile_shader("""
        #include <metal_stdlib>
        #include <c10/metal/error.h>
        using namespace metal;
        kernel void k(device float* x, device c10::metal::ErrorMessages* errors [[buffer(1)]],
                      uint i [[thread_position_in_grid]]) {
          if (x[i] < 0) { TORCH_REPORT_ERROR(errors, "negative value at ", i); return; }
          x[i] = sqrt(x[i]);
        }""")
    x = torch.tensor([4.0, 9.0], device=device)
    library.k(x, error_buf_idx=1)
    assert x.tolist() == [2, 3]
    x[1] = -1
    with pytest.raises(RuntimeError, match="negative value at 1 .*program_source:7"):
        library.k(x, error_buf_idx=1)


@pytest.mark.only_on("simulator")
def test_checking_mode_runs_the_instrumented_program(device, fill):
    from metalcore.simulator import checking
    from metalcore.simulator.errors import KernelError

    x = torch.zeros(4, device=device)
    with checking():
        fill.fill(x, 1.0)
        assert x.tolist() == [1] * 4
        with pytest.raises(KernelError, match="out-of-bounds write") as caught:
            fill.fill(x, 1.0, threads=5)
    assert (caught.value.kernel, caught.value.line) == ("fill", 3)


def argument_buffer(device):
    """A kernel with an argument buffer, its output, its input, and the buffer's bytes as ints."""
    library = metalcore.compile_shader("""
        struct Arguments { device float* out [[id(0)]]; device const float* in [[id(1)]]; float scale [[id(2)]]; };
        kernel void k(constant Arguments& a, uint i [[thread_position_in_grid]]) { a.out[i] = a.in[i] * a.scale; }""")
    out, x = torch.zeros(3, device=device), torch.arange(3.0, device=device)
    packed = struct.pack("<QQfi", out.data_ptr(), x.data_ptr(), 2.5, 0)
    return library.k, out, x, list(struct.unpack("<3q", packed))


def test_argument_buffers(device):
    kernel, out, _x, packed = argument_buffer(device)
    kernel(packed, threads=3)
    assert out.tolist() == [0, 2.5, 5]


@pytest.mark.only_on("simulator")
def test_checking_mode_finds_the_memory_behind_addresses(device):
    kernel, out, _x, packed = argument_buffer(device)
    with metalcore.simulator.checking():
        kernel(packed, threads=3)
        assert out.tolist() == [0, 2.5, 5]
        with pytest.raises(metalcore.simulator.KernelError, match="out-of-bounds"):
            kernel(packed, threads=4)


def test_threadgroup_arguments_have_the_length_that_the_call_says(device):
    run = metalcore.compile_shader("""#include <metal_stdlib>
using namespace metal;
kernel void run(device float* x, threadgroup float* a [[threadgroup(0)]], threadgroup float2* b [[threadgroup(1)]],
                uint t [[thread_position_in_threadgroup]], uint n [[threads_per_threadgroup]]) {
  a[t] = x[t];
  b[t] = float2(t, 1);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  x[t] = a[n - 1 - t] + b[(t + 1) % n].x;
}""").run
    x = torch.rand(64)
    moved = x.to(device)
    run(moved, threads=64, group_size=64, threadgroup_memory=(256, 512))
    assert torch.equal(moved.cpu(), x.flip(0) + torch.arange(64).roll(-1))
    if "metalcore.simulator" in sys.modules:
        found = pytest.raises(metalcore.simulator.KernelError, match="threadgroup argument 1")
        with metalcore.simulator.checking(), found:
            run(moved, threads=64, group_size=64, threadgroup_memory=(256, 504))
    unused = "kernel void unused(device int* x, threadgroup void* y, uint i [[thread_position_in_grid]]) { x[i] *= 2; }"
    metalcore.compile_shader(unused).unused(moved, threads=64, threadgroup_memory=0)
    with pytest.raises(ValueError, match=r"'b' at index 1 has no length set \(see threadgroup_memory of a call\)"):
        run(moved, threads=64, group_size=64, threadgroup_memory=256)


@pytest.mark.only_on("simulator")
@pytest.mark.parametrize("checking", [False, True])
def test_vectors_may_lie_at_any_multiple_of_their_element(checking):
    """GPUs load such vectors, and a compiler for the CPU must not treat them as aligned."""
    shift = metalcore.compile_shader("""
struct Pair { float4 a, b; };
kernel void shift(device const float* x, device float* y, device short* z, uint i [[thread_position_in_grid]]) {
  device float4* to = (device float4*)(y + 1) + 2 * i;
  *(device Pair*)to = *(device const Pair*)((device const float4*)(x + 3) + 2 * i);
  to[0] = to[0].wzyx * 2;
  *(device short4*)(z + 1 + 4 * i) += 1;
}""").shift
    x, y, z = torch.rand(67), torch.zeros(65, device="mps"), torch.zeros(33, dtype=torch.int16, device="mps")
    with metalcore.simulator.checking() if checking else contextlib.nullcontext():
        shift(x.to("mps"), y, z, threads=8, group_size=8)
    expected = x[3:67].view(8, 2, 4).clone()
    expected[:, 0] = expected[:, 0].flip(-1) * 2
    assert torch.equal(y.cpu()[1:], expected.view(-1)) and torch.equal(z.cpu()[1:], torch.ones(32, dtype=torch.int16))
