"""Threadgroups of every shape: each thread has the right positions, simdgroup and threadgroup memory."""

import numpy
import pytest
import torch

import metalcore

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
