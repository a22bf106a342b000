"""Kernels and globals with names that metal_stdlib has too, and threadgroups of every shape: each thread has the right
positions, simdgroup and threadgroup memory."""

import numpy
import pytest
import torch

import metalcore

pytestmark = pytest.mark.usefixtures("compiles_for_cuda")
HEADER = "#include <metal_stdlib>\nusing namespace metal;\n"
KERNELS = """transpose dot clamp min max exp select fma abs length normalize mix step sin floor round pow sqrt any all
    cross distance popcount rotate fmod reflect sign saturate log2 rsqrt max3 ctz ceil trunc fract array vec move swap
    decay rank simd_sum simd msl std""".split()


def test_kernels_named_as_functions_of_metal(device):
    body = "".join(
        f"kernel void {name}(device float* out, device const float* x) {{\n"
        "out[0] += exp(x[0]) + dot(float2(x[0]), 1); }\n"
        for name in KERNELS[:4]
    )
    library = metalcore.compile_shader(HEADER + body)
    out, x = torch.zeros(1, device=device), torch.zeros(1, device=device)
    for name in KERNELS[:4]:
        getattr(library, name)(out, x, threads=1)
    assert out.tolist() == [4]


def test_every_such_name_compiles():
    """All names are in one source, in which the compilers see each kernel's address."""
    from metalcore.msl.language.translate import translate
    from metalcore.msl.runtime import host

    source = HEADER + "".join(
        f"kernel void {name}(device float* out) {{ out[0] = metal::exp(out[1]); }}\n" for name in KERNELS
    )
    translation = translate(source)
    host.check_source(translation.source(), msl=source)


def test_a_kernel_named_as_a_namespace(device):
    body = "#include <simd/simd.h>\nkernel void simd(device float* out, constant simd::float2& x) { out[0] = x.y; }"
    out = torch.zeros(1, device=device)
    metalcore.compile_shader(HEADER + body).simd(out, [1.0, 2.0], threads=1)
    assert out.item() == 2


def test_templates_of_kernels_and_namespaces(device):
    body = """
        namespace a { namespace b {
          kernel void dot(device float* out) { out[0] += metal::dot(float2(1), float2(2)); }
        } }
        template <typename T> kernel void exp(device T* out) { out[0] += 1; }
        template [[host_name("made")]] kernel void exp<float>(device float*);"""
    library = metalcore.compile_shader(HEADER + body)
    out = torch.zeros(1, device=device)
    getattr(library, "a::b::dot")(out, threads=1)
    library.made(out, threads=1)
    assert out.tolist() == [5]


def test_globals_named_as_type_traits(device):
    body = """
        constant float decay = 0.5f;
        constant int rank = 3;
        constant uint extent [[function_constant(0)]];
        constant constexpr int negation = 5;
        struct P { float decay; int rank; };
        float conditional(float x) { return x; }
        kernel void k(device float* out, device const float* more [[buffer(1), function_constant(extent)]]) {
          P p = {1, 2};
          out[0] = decay * p.decay + rank * p.rank + extent + ::negation + conditional(100);
          out[1] = is_same_v<metal::decay_t<float&>, float> + metal::rank<float[3]>::value;
          for (int extent = 0; extent < 3; ++extent) out[1] += extent;
          out[2] = more[0];
        }"""
    library = metalcore.compile_shader(HEADER + body, constants={"extent": 1000})
    out, more = torch.zeros(3, device=device), torch.ones(1, device=device)
    library.k(out, more, threads=1)
    assert out.tolist() == [1111.5, 5, 1]


pytestmark = pytest.mark.usefixtures("compiles_for_cuda")
PLACES = """#include <metal_stdlib>
using namespace metal;
kernel void places(device uint* out, uint3 at [[thread_position_in_grid]], uint3 grid [[threads_per_grid]],
                   uint3 inside [[thread_position_in_threadgroup]], uint index [[thread_index_in_threadgroup]],
                   uint3 group [[threadgroup_position_in_grid]], uint3 size [[threads_per_threadgroup]],
                   uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup uint first;
  if (index == 0) first = at.x + grid.x * (at.y + grid.y * at.z);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  device uint* mine = out + 9 * (at.x + grid.x * (at.y + grid.y * at.z));
  mine[0] = inside.x + 1000 * inside.y + 1000000 * inside.z;
  mine[1] = group.x + 1000 * group.y + 1000000 * group.z;
  mine[2] = size.x + 1000 * size.y + 1000000 * size.z;
  mine[3] = index;
  mine[4] = lane;
  mine[5] = simdgroup;
  mine[6] = first;
  mine[7] = simd_sum(1);
  mine[8] = simd_min(index);
}
"""


@pytest.mark.parametrize(
    "grid, group",
    [((2, 3, 512), (1, 1, 512)), ((3, 5, 200), (2, 4, 128)), ((3, 2, 131), (3, 1, 65)), ((2, 2, 70), (8, 1, 128)),
     ((4, 3, 100), (2, 2, 64)), ((1, 2000, 1), (1, 1024, 1))],
)  # fmt: skip
def test_threads_know_their_places(device, grid, group):
    out = torch.zeros(grid[2], grid[1], grid[0], 9, dtype=torch.int32, device=device)
    metalcore.compile_shader(PLACES).places(out, threads=grid, group_size=group)
    at = numpy.stack(numpy.meshgrid(*(numpy.arange(n) for n in reversed(grid)), indexing="ij")[::-1], -1)
    grid, group, coded = numpy.array(grid), numpy.array(group), numpy.array([1, 1000, 1000000])
    threadgroup, inside = at // group, at % group
    size = numpy.minimum(group, grid - threadgroup * group)
    index = inside[..., 0] + size[..., 0] * (inside[..., 1] + size[..., 1] * inside[..., 2])
    first = threadgroup * group
    lanes = numpy.minimum(32, size.prod(-1) - index // 32 * 32)
    expected = [
        inside @ coded,
        threadgroup @ coded,
        size @ coded,
        index,
        index % 32,
        index // 32,
        first[..., 0] + grid[0] * (first[..., 1] + grid[1] * first[..., 2]),
        lanes,
        index // 32 * 32,
    ]
    numpy.testing.assert_array_equal(out.cpu().numpy(), numpy.stack(expected, -1))
