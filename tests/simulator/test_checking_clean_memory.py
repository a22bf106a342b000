"""Kernels that use memory in unusual ways: checking mode raises no alarm and does not change what they compute."""

import torch
from checked_kernels import in_several_orders, run

pytestmark = in_several_orders


def test_neighbouring_bytes_of_different_threads(seed):
    _, out = run(
        """
kernel void run(device const uchar* x, device uchar* out, uint t [[thread_position_in_threadgroup]]) {
  threadgroup uchar values[64];
  values[t] = x[t];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[t] = values[t ^ 1] + 1;
}""",
        torch.arange(64, dtype=torch.uint8, device="mps"),
        torch.zeros(64, dtype=torch.uint8, device="mps"),
        threads=64,
        group=64,
        seed=seed,
    )
    assert torch.equal(out, torch.arange(64, dtype=torch.uint8).view(32, 2).flip(1).flatten() + 1)


def test_structs_and_vectors_in_threadgroup_memory(seed):
    out = run(
        """
struct Pair { float value; uint index; };
kernel void run(device const float* x, device uint* out, device float4* sums,
                uint t [[thread_position_in_threadgroup]]) {
  threadgroup Pair best[64];
  threadgroup float4 quads[64];
  best[t] = {x[t], t};
  quads[t] = float4(x[t], 1, 2, 3);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint k = 32; k > 0; k /= 2) {
    if (t < k) {
      if (best[t + k].value > best[t].value) best[t] = best[t + k];
      quads[t].yzw += quads[t + k].yzw;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  if (t == 0) {
    *out = best[0].index;
    *sums = quads[0];
  }
}""",
        torch.rand(64).sort().values.to("mps"),
        torch.zeros(1, dtype=torch.int32, device="mps"),
        torch.zeros(4, device="mps"),
        threads=64,
        group=64,
        seed=seed,
    )
    assert out[1].item() == 63
    assert out[2].tolist()[1:] == [64, 128, 192]


def test_grid_that_does_not_fill_its_threadgroups(seed):
    out = run(
        """
kernel void run(device int* out, uint3 i [[thread_position_in_grid]], uint3 n [[threads_per_grid]],
                uint t [[thread_index_in_threadgroup]], uint3 size [[threads_per_threadgroup]]) {
  threadgroup int count;
  if (t == 0) count = size.x * size.y * size.z;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[(i.z * n.y + i.y) * n.x + i.x] = count;
}""",
        torch.zeros(5 * 3 * 3, dtype=torch.int32, device="mps"),
        threads=(5, 3, 3),
        group=(4, 2, 2),
        seed=seed,
    )[0]
    assert out.view(3, 3, 5)[0, 0].tolist() == [16, 16, 16, 16, 4]
    assert out.view(3, 3, 5)[2, 2].tolist() == [4, 4, 4, 4, 1]


def test_constants_and_local_arrays(seed):
    out = run(
        """
constant float weights[4] = {1, 2, 4, 8};
constant int2 offsets[] = {int2(1, 0), int2(0, 1)};
kernel void run(device float* out, constant float4& scale, uint i [[thread_position_in_grid]]) {
  float local[4];
  for (uint k = 0; k < 4; ++k) local[(k + i) % 4] = weights[k] * scale[k];
  out[i] = local[i % 4] + offsets[i % 2].x;
}""",
        torch.zeros(8, device="mps"),
        [1.0, 1.0, 1.0, 1.0],
        threads=8,
        group=8,
        seed=seed,
    )[0]
    assert out.tolist() == [2.0, 1.0] * 4


def test_strided_and_offset_views(seed):
    storage = torch.arange(40.0, device="mps")
    x, out = storage[3:23], storage[24:34]
    run(
        """
kernel void run(device const float* x, device float* out, uint i [[thread_position_in_grid]]) { out[i] = x[2 * i]; }""",
        x[::2],
        out,
        threads=10,
        group=10,
        seed=seed,
    )
    assert torch.equal(out.cpu(), torch.arange(3.0, 23.0, 2))


def test_memory_that_was_not_written_may_be_read_and_left_unused(seed):
    """An exclusive scan over as many lanes as there are simdgroups; no thread uses the values of the other lanes."""
    x = torch.randint(0, 100, (96,)).float()
    _, out = run(
        """
struct Total { float sum; bool known; };
kernel void run(device const float* x, device float* out, uint t [[thread_position_in_threadgroup]],
                uint lane [[thread_index_in_simdgroup]], uint s [[simdgroup_index_in_threadgroup]]) {
  threadgroup float sums[32];
  threadgroup Total totals[32];
  float before = simd_prefix_exclusive_sum(x[t]);
  if (lane == 31) sums[s] = before + x[t];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (s == 0) {
    totals[lane].sum = simd_prefix_exclusive_sum(sums[lane]);
    totals[lane].known = true;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  Total total = totals[s];  // with the bytes between its members
  out[t] = total.known ? total.sum + before : 0;
}""",
        x.to("mps"),
        torch.zeros(96, device="mps"),
        threads=96,
        group=96,
        seed=seed,
    )
    assert torch.equal(out, x.cumsum(0) - x)
