// As a library's generator of matrix products writes them: sizes and transposition as function constants, one block of
// threadgroup memory shared out by casts, parts with their own loads and stores.
#include <metal_stdlib>
#include <metal_simdgroup_matrix>
using namespace metal;

constant uint M [[function_constant(0)]];
constant uint N [[function_constant(1)]];
constant uint K [[function_constant(2)]];
constant bool A_trans [[function_constant(10)]];
constant bool B_trans [[function_constant(11)]];
constant bool fused_bias [[function_constant(50)]];

constant ushort M_group [[function_constant(200)]];
constant ushort N_group [[function_constant(201)]];
constant ushort K_simd = 8;
constant ushort M_simd = M_group / 2;
constant ushort N_simd = N_group / 2;

constant uint A_leading = A_trans ? M : K;
constant uint B_leading = B_trans ? K : N;
constant ushort A_block_leading = K_simd;
constant ushort A_block_bytes = M_group * K_simd * 4;

template <typename T>
struct part {
  vec<T, 2> t;

  METAL_FUNC thread vec<T, 2>* elements() thread { return &t; }

  template <typename U>
  METAL_FUNC void load(const threadgroup U* source, ushort leading, ushort2 origin) thread {
    const threadgroup U* p = source + origin.y * leading + origin.x;
    *elements() = vec<T, 2>(p[0], p[1]);
  }

  template <typename U>
  METAL_FUNC void store(device U* destination, uint leading, uint2 origin) thread {
    device U* p = destination + origin.y * leading + origin.x;
    p[0] = U(elements()->x);
    p[1] = U(elements()->y);
  }

  template <typename U, typename V>
  METAL_FUNC void multiply(part<U> a, part<V> b, bool accumulate = true) thread {
    simdgroup_matrix<T, 8, 8> c;
    simdgroup_matrix<U, 8, 8> x;
    simdgroup_matrix<V, 8, 8> y;
    c.thread_elements() = accumulate ? t : vec<T, 2>(0);
    x.thread_elements() = a.t;
    y.thread_elements() = b.t;
    simdgroup_multiply_accumulate(c, x, y, c);
    t = c.thread_elements();
  }
};

METAL_FUNC ushort2 lane_offset(ushort lane) {
  return ushort2((lane & 1) * 2 + (lane & 8) / 2, (lane >> 1 & 3) + (lane & 16) / 4);
}

METAL_FUNC ushort2 block_of(ushort simd) { return ushort2(simd % 2, simd / 2); }

// Values of a matrix outside of it are zero.
template <typename T>
METAL_FUNC T element(const device T* x, uint leading, uint row, uint column, uint rows, uint columns, bool transposed) {
  if (row >= rows || column >= columns) return T(0);
  return transposed ? x[column * leading + row] : x[row * leading + column];
}

template <typename T>
METAL_FUNC void gemm_impl(device T* A, device T* B, device T* C, device T* D,
                          threadgroup uchar* block, uint3 gid, ushort sidx, ushort lane, ushort thread_index) {
  auto A_block = (threadgroup T*)(block);
  auto B_block = (threadgroup T*)(block + A_block_bytes);
  const ushort2 offset = lane_offset(lane), simd = block_of(sidx);
  const uint2 group(gid.x * N_group, gid.y * M_group);
  part<float> sram[8];
#pragma clang loop unroll(full)
  for (ushort i = 0; i < 8; ++i) sram[i] = {float2(0)};
  for (uint k = 0; k < K; k += K_simd) {
    for (ushort i = thread_index; i < M_group * K_simd; i += 128) {
      A_block[i] = element(A, A_leading, group.y + i / K_simd, k + i % K_simd, M, K, A_trans);
    }
    for (ushort i = thread_index; i < K_simd * N_group; i += 128) {
      B_block[i] = element(B, B_leading, k + i / N_group, group.x + i % N_group, K, N, B_trans);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    ushort out = 0;
    for (ushort m = 0; m < M_simd; m += 8) {
      for (ushort n = 0; n < N_simd; n += 8, ++out) {
        part<T> a, b;
        a.load(A_block, A_block_leading, ushort2(offset.x, simd.y * M_simd + m + offset.y));
        b.load(B_block, N_group, ushort2(simd.x * N_simd + n + offset.x, offset.y));
        sram[out].multiply(a, b);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  ushort out = 0;
  for (ushort m = 0; m < M_simd; m += 8) {
    for (ushort n = 0; n < N_simd; n += 8, ++out) {
      const uint2 at(group.x + simd.x * N_simd + n + offset.x, group.y + simd.y * M_simd + m + offset.y);
      if (at.y >= M || at.x + 1 >= N) continue;
      if (fused_bias) {
        sram[out].elements()->x += float(D[at.x]);
        sram[out].elements()->y += float(D[at.x + 1]);
      }
      sram[out].store(C, N, at);
    }
  }
}

kernel void gemm(device float* A [[buffer(0)]], device float* B [[buffer(1)]], device float* C [[buffer(2)]],
                 device float* D [[buffer(3), function_constant(fused_bias)]],
                 threadgroup uchar* block [[threadgroup(0)]], uint3 gid [[threadgroup_position_in_grid]],
                 ushort sidx [[simdgroup_index_in_threadgroup]], ushort lane [[thread_index_in_simdgroup]],
                 ushort thread_index [[thread_index_in_threadgroup]]) {
  device float* bias = nullptr;
  if (fused_bias) {
    bias = D;
  }
  gemm_impl<float>(A, B, C, bias, block, gid, sidx, lane, thread_index);
}
