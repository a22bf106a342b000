"""Programs with simdgroup_matrix number the lanes of a warp in another way, which no program can see. Half members of
unions, which hold the scales of quantized blocks, have the arithmetic of halves."""

import itertools

import numpy
import pytest
import torch

import metalcore

USES_MATRICES = "using matrix = simdgroup_float8x8;"
HEADER = """
#include <metal_stdlib>
using namespace metal;
"""
EVERYTHING = """
kernel void everything(device uint* out, uint3 at [[thread_position_in_grid]], uint3 grid [[threads_per_grid]],
                       uint3 inside [[thread_position_in_threadgroup]], uint index [[thread_index_in_threadgroup]],
                       uint3 group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]],
                       uint simdgroup [[simdgroup_index_in_threadgroup]], uint quad [[quadgroup_index_in_threadgroup]],
                       uint corner [[thread_index_in_quadgroup]], constant uint& way) {
  device uint* mine = out + 40 * (at.x + grid.x * (at.y + grid.y * at.z));
  threadgroup uint first;
  if (index == 0) first = at.x + 7 * at.y;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  uint n = 0;
  mine[n++] = inside.x + 100 * inside.y + 10000 * inside.z;
  mine[n++] = index;
  mine[n++] = lane + 100 * simdgroup;
  mine[n++] = corner + 100 * quad;
  mine[n++] = first;
  const uint v = index * index + 3 * group.x + 1;
  const float f = 1.0f / float(v);
  if (way == 1 && lane % 3 == 1 || way == 2 && lane > 9 && lane < 27) return;
  mine[n++] = simd_sum(v);
  mine[n++] = as_type<uint>(simd_sum(f));  // the order of the sum shows in its last bits
  mine[n++] = as_type<uint>(quad_sum(f));
  mine[n++] = as_type<uint>(simd_prefix_inclusive_sum(f));
  mine[n++] = as_type<uint>(simd_prefix_exclusive_product(f));
  mine[n++] = as_type<uint>(quad_prefix_exclusive_sum(f));
  mine[n++] = as_type<uint>(simd_max(float2(f, -f)).y);
  mine[n++] = simd_xor(v);
  mine[n++] = simd_shuffle(v, ushort(lane * 5 % 32));
  mine[n++] = simd_shuffle_up(v, 3);
  mine[n++] = simd_shuffle_down(v, 6);
  mine[n++] = simd_shuffle_xor(v, 13);
  mine[n++] = simd_shuffle_xor(v, ushort(v % 32));
  mine[n++] = simd_shuffle_rotate_up(v, 7);
  mine[n++] = simd_shuffle_rotate_down(v, 9);
  mine[n++] = simd_shuffle_and_fill_up(v, v + 1, 5, 16);
  mine[n++] = simd_shuffle_and_fill_down(v, v + 1, 2, 8);
  mine[n++] = simd_broadcast(v, 11);
  mine[n++] = simd_broadcast_first(v);
  mine[n++] = quad_shuffle(v, ushort(3 - corner));
  mine[n++] = quad_shuffle_up(v, 1);
  mine[n++] = quad_shuffle_down(v, 2);
  mine[n++] = quad_shuffle_xor(v, 3);
  mine[n++] = quad_shuffle_rotate_down(v, 1);
  mine[n++] = quad_broadcast(v, 2);
  mine[n++] = quad_broadcast_first(v);
  mine[n++] = uint(ulong(simd_vote::vote_t(simd_ballot(v % 3 == 0))));
  mine[n++] = uint(ulong(quad_vote::vote_t(quad_ballot(v % 3 == 0))));
  mine[n++] = uint(ulong(simd_vote::vote_t(simd_active_threads_mask())));
  mine[n++] = simd_is_first() + 2 * quad_is_first();
  mine[n++] = simd_all(v > 3) + 2 * simd_any(v == 2) + 4 * quad_any(v == 5);
}
"""


@pytest.mark.parametrize(
    "grid, group",
    [((96, 1, 1), (96, 1, 1)), ((75, 1, 1), (64, 1, 1)), ((32, 4, 3), (32, 2, 3)), ((8, 12, 2), (8, 12, 1)),
     ((5, 7, 4), (5, 4, 3)), ((64, 3, 1), (64, 2, 1)), ((3, 2, 131), (3, 1, 65))],
)  # fmt: skip
@pytest.mark.parametrize("way", [0, 1, 2])
def test_no_program_sees_the_lanes_numbers(grid, group, way):
    """All positions and functions across lanes, with all lanes, with every third lane gone, and with a gap."""
    results = []
    for uses in (USES_MATRICES, ""):
        out = torch.zeros(grid[2] * grid[1] * grid[0], 40, dtype=torch.int32, device="cuda")
        metalcore.compile_shader(HEADER + uses + EVERYTHING).everything(out, way, threads=grid, group_size=group)
        results.append(out)
    assert torch.equal(*results)


PRODUCT = """
template <typename T, typename U, typename V>
kernel void product(device const T* a, device const U* b, device float* c, constant uint& count,
                    uint lane [[thread_index_in_simdgroup]]) {
  const short quad = lane / 4, row = (quad & 4) + (lane / 2) %% 4, column = (quad & 2) * 2 + (lane %% 2) * 2;
  simdgroup_matrix<float, 8, 8> sum(0.0f);
  for (uint k = 0; k < count; k += 8) {
    simdgroup_matrix<V, 8, 8> x, y;
    reinterpret_cast<thread vec<V, 2>&>(x.thread_elements()) =
        vec<V, 2>(V(a[row * count + k + column]), V(a[row * count + k + column + 1]));
    reinterpret_cast<thread vec<V, 2>&>(y.thread_elements()) =
        vec<V, 2>(V(b[(k + row) * 8 + column]), V(b[(k + row) * 8 + column + 1]));
    simdgroup_multiply_accumulate(sum, x, y, sum);
  }
  simdgroup_store(sum, c, 8);
}
// The sum in the order and with the roundings of float32.
kernel void sequential(device const float* a, device const float* b, device float* c, constant uint& count,
                       uint i [[thread_position_in_grid]]) {
  float sum = 0.0f;
  for (uint k = 0; k < count; ++k) sum = fma(a[i / 8 * count + k], b[k * 8 + i %% 8], sum);
  c[i] = sum;
}
template [[host_name("product")]] kernel void product<%s, %s, %s>(device const %s*, device const %s*, device float*,
                                                              constant uint&, uint);
"""
TYPES = {torch.float32: "float", torch.float16: "half", torch.bfloat16: "bfloat"}


def product(a, b, held="float"):
    left, right = TYPES[a.dtype], TYPES[b.dtype]
    library = metalcore.compile_shader(HEADER + PRODUCT % (left, right, held, left, right))
    c, expected = torch.empty(8, 8, device="cuda"), torch.empty(8, 8, device="cuda")
    library.product(a, b, c, a.shape[1], threads=32, group_size=32)
    library.sequential(a.float(), b.float(), expected, a.shape[1], threads=64)
    return c, expected


def factors(left, right, count, positive):
    a, b = torch.randn(8, count, device="cuda").to(left), torch.randn(count, 8, device="cuda").to(right)
    return (a.abs(), b.abs()) if positive else (a, b)


@pytest.mark.parametrize("left, right", [pair for pair in itertools.product(TYPES, TYPES) if torch.float32 in pair])
@pytest.mark.parametrize("count", [8, 64, 4096])
@pytest.mark.parametrize("positive", [False, True])
def test_products_of_floats_are_as_accurate_as_float32(left, right, count, positive):
    """Whichever types the floats were converted from: rounding towards zero and lost bits would show in positive
    sums."""
    torch.manual_seed(count)
    errors = torch.zeros(2)
    for _ in range(8):
        a, b = factors(left, right, count, positive)
        exact = a.double() @ b.double()
        errors += torch.tensor([(c - exact).square().mean().item() for c in product(a, b)])
    assert errors[0] <= 1.5 * errors[1]


@pytest.mark.parametrize("left, right", [pair for pair in itertools.product(TYPES, TYPES) if torch.float32 not in pair])
@pytest.mark.parametrize("count", [8, 64, 4096])
@pytest.mark.parametrize("positive", [False, True])
def test_products_of_16_bits_add_up_in_the_tensor_cores(left, right, count, positive):
    """A step adds eight products to the sum. It cuts each of these nine addends, and what they add up to, below 2^-23
    of the largest: by less than 10 units of 2^-23 times the sum of the products' sizes."""
    torch.manual_seed(count)
    for _ in range(8):
        a, b = factors(left, right, count, positive)
        a, b, found = a.double(), b.double(), product(a, b)[0]
        assert ((found - a @ b).abs() <= count / 8 * 10 * 2**-23 * (a.abs() @ b.abs())).all()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("held", ["float", "T"])
def test_products_with_the_unit_matrix_are_exact(dtype, held):
    held = TYPES[dtype] if held == "T" else held
    x, unit = torch.randn(8, 8, device="cuda").to(dtype), torch.eye(8, device="cuda").to(dtype)
    assert torch.equal(product(x, unit, held)[0], x.float())
    assert torch.equal(product(unit, x, held)[0], x.float())


@pytest.mark.parametrize("left", TYPES)
@pytest.mark.parametrize("right", TYPES)
def test_products_of_what_is_not_finite(left, right):
    infinity, nan = float("inf"), float("nan")
    a, b = torch.ones(8, 8), torch.ones(8, 8)
    a[0, 0], a[1, 1], a[2, 2], a[3, :2] = infinity, -infinity, nan, torch.tensor([infinity, -infinity])
    b[3, 3], b[4, 4], b[0, 5] = infinity, nan, 0
    a[4] *= 1.37
    c, expected = product(a.to(left).cuda(), b.to(right).cuda())
    torch.testing.assert_close(c, expected, equal_nan=True, rtol=1e-6, atol=0)


def test_large_and_small_floats_multiply():
    largest, smallest = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny
    a, b = torch.zeros(8, 8, device="cuda"), torch.zeros(8, 8, device="cuda")
    a.fill_diagonal_(largest), b.fill_diagonal_(0.75)
    b[0, 1] = smallest
    c, expected = product(a, b)
    torch.testing.assert_close(c, expected, rtol=1e-7, atol=0)


def test_half_members_of_unions_divide_as_halves():
    """A scale below 2^-10, divided by 16, is rounded to a denormal half."""
    library = metalcore.compile_shader("""#include <metal_stdlib>
    using namespace metal;
    struct Scales { union { struct { half scale; half offset; }; half2 both; }; uchar code; uchar unused; };
    kernel void decode(device const Scales* b, device float* y, uint i [[thread_position_in_grid]]) {
      const float scale = i & 1 ? b[i].scale / 16.h : b[i].scale;
      y[i] = scale * float(b[i].code) - float(b[i].scale * b[i].offset);
    }""")
    generator = numpy.random.default_rng(2)
    blocks = numpy.zeros(
        512, dtype=[("scale", "<f2"), ("offset", "<f2"), ("code", "u1"), ("unused", "u1"), ("padding", "u2")]
    )  # half2 is aligned to 4
    blocks["scale"] = 10 ** generator.uniform(-4.5, -1, 512)
    blocks["offset"], blocks["code"] = generator.uniform(0, 1, 512), generator.integers(0, 256, 512)
    y = torch.zeros(512, device="cuda")
    library.decode(torch.from_numpy(blocks.view(numpy.uint8)).cuda(), y, threads=512)
    scale = numpy.where(numpy.arange(512) & 1, blocks["scale"] / numpy.float16(16), blocks["scale"])
    assert scale.dtype == numpy.float16
    expected = scale.astype(numpy.float32) * blocks["code"] - (blocks["scale"] * blocks["offset"]).astype(numpy.float32)
    numpy.testing.assert_allclose(y.cpu().numpy(), expected, rtol=1e-6, atol=1e-8)
