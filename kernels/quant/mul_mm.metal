// Products of packed weights and many rows of x, or of a gradient: a threadgroup makes a tile of the result. All of its
// threads unpack weights into threadgroup memory, in x's dtype, load x, and multiply.
//
// Terms come in the order of slices: sums take them in any order, as long as weights and x have the same.
#include <metal_stdlib>
using namespace metal;

#include "common/matrices.h"
#include "formats.h"
#include "quant.h"

constant constexpr uint kPitchW = QUANT_MM_COLUMNS + 8, kPitchX = QUANT_MM_DEPTH + 8;

// Slice i of a row: its first number, and the distance of its runs.
struct Runs {
  uint first, apart;
  uint of(uint run) const { return first + run * apart; }
};
inline Runs runs_of(uint type, uint i) {
#define QUANT_PLACE(F) \
  if (type == F::number) return {SliceOf<F>(i).first(), F::apart};
  FOR_QUANT_TYPES(QUANT_PLACE)
#undef QUANT_PLACE
  return {0, 0};
}

// Unpacks a run of a slice. Two threads decode the same slice, of which each needs one half.
template <typename F, typename T>
inline void unpack_run(Bytes row, uint slice, uint run, threadgroup T* to, uint step) {
  const SliceOf<F> of(slice);
  const Slice numbers = of.decode(of.load(row));
#pragma unroll
  for (uint i = 0; i < 4; ++i) {
    const float4 w = run == 0 ? weights<F>(numbers, i) : weights<F>(numbers, i + 4);
#pragma unroll
    for (uint k = 0; k < 4; ++k) to[(4 * i + k) * step] = static_cast<T>(w[k]);
  }
}
template <typename T>
inline void unpack_run(uint type, Bytes row, uint slice, uint run, threadgroup T* to, uint step) {
#define QUANT_UNPACK(F) \
  if (type == F::number) return unpack_run<F>(row, slice, run, to, step);
  FOR_QUANT_TYPES(QUANT_UNPACK)
#undef QUANT_UNPACK
}

// 8 numbers of x; zeros behind `end`.
template <typename T>
inline void copy_half_run(device const T* x, uint from, uint end, bool aligned, threadgroup T* to) {
  if (aligned && from + 8 <= end) {
#pragma unroll
    for (uint i = 0; i < 2; ++i)
      *reinterpret_cast<threadgroup vec<T, 4>*>(to + 4 * i) =
          *reinterpret_cast<device const vec<T, 4>*>(x + from + 4 * i);
    return;
  }
  for (uint i = 0; i < 8; ++i) to[i] = from + i < end ? x[from + i] : T(0);
}

template <typename T>
[[kernel]] [[max_total_threads_per_threadgroup(QUANT_MM_THREADS)]] void quant_mm(
    device const uint* packed [[buffer(0)]], device const T* x [[buffer(1)]], device T* y [[buffer(2)]],
    device const int* order [[buffer(3)]], device const int* begins [[buffer(4)]],
    constant QuantMmParams& p [[buffer(5)]], uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  alignas(16) threadgroup T tile_w[QUANT_MM_DEPTH * kPitchW];  // [term][column]
  alignas(16) threadgroup T tile_x[QUANT_MM_ROWS * kPitchX];   // [row][term]
  threadgroup float tile_y[QUANT_MM_ROWS * QUANT_MM_COLUMNS];

  const uint expert = group.z;
  const uint begin = p.experts ? uint(begins[expert]) : 0, end = p.experts ? uint(begins[expert + 1]) : p.x_rows;
  const uint first_row = begin + group.y * QUANT_MM_ROWS;
  if (first_row >= end) return;
  const uint first_column = group.x * QUANT_MM_COLUMNS;
  const Bytes matrix = place(packed, expert * p.expert_bytes);
  const uint length = p.slices * 32;
  const uint x_length = p.transposed ? p.weights : length, y_length = p.transposed ? length : p.weights;
  const uint simdgroup = thread_index / 32;
  const uint corner_row = simdgroup / 2 * 16, corner_column = simdgroup % 2 * 32;

  Fragments<float, 2, 4> sums;
  clear(sums);

  const uint steps = p.transposed ? (p.weights + QUANT_MM_DEPTH - 1) / QUANT_MM_DEPTH : p.slices;
  const bool exists = !p.experts || expert < p.experts;  // what an expert that does not exist makes is NaN
  for (uint step = 0; step < (exists ? steps : 0); ++step) {
    {
      // Forward, two threads have a row of weights, and a run each of the step's slice of it; transposed, one of 32
      // rows of weights and one of the columns' two slices. What does not exist is zero.
      const uint run = thread_index / 64, pair = thread_index % 64;
      const uint row = p.transposed ? step * 32 + pair % 32 : first_column + pair;
      const uint slice = p.transposed ? first_column / 32 + pair / 32 : step;
      const uint step_w = p.transposed ? 1 : kPitchW;
      const uint at = (p.transposed ? pair % 32 * kPitchW + pair / 32 * 32 : pair) + 16 * run * step_w;
      if (row < p.weights && slice < p.slices) {
        unpack_run(p.type, matrix.plus(row * p.row_bytes), slice, run, tile_w + at, step_w);
      } else {
        for (uint i = 0; i < 16; ++i) tile_w[at + i * step_w] = T(0);
      }
    }
    {
      // Four threads have a row of x, and 8 terms each.
      const uint row = thread_index / 4, run = thread_index / 2 % 2, half_run = thread_index % 2 * 8;
      const uint result = min(first_row + row, end - 1);
      const ulong from = ulong(p.experts ? uint(order[result]) / p.shared : result) * x_length;
      const uint term = (p.transposed ? step * 32 + run * 16 : runs_of(p.type, step).of(run)) + half_run;
      copy_half_run(x + from, term, x_length, p.aligned, tile_x + row * kPitchX + run * 16 + half_run);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
    for (uint k = 0; k < QUANT_MM_DEPTH; k += 16) {
      Fragments<T, 2, 2> left;
      RightFragments<T, 2, 4> right;
      load<kPitchX>(left, tile_x + corner_row * kPitchX + k);
      load<kPitchW>(right, tile_w + k * kPitchW + corner_column);
      multiply(sums, left, 0, right);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

#pragma unroll
  for (uint i = 0; i < 2; ++i) {
#pragma unroll
    for (uint j = 0; j < 4; ++j)
      simdgroup_store(sums.at[i][j], tile_y + (corner_row + 8 * i) * QUANT_MM_COLUMNS + corner_column + 8 * j,
                      QUANT_MM_COLUMNS);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = thread_index; i < QUANT_MM_ROWS * QUANT_MM_COLUMNS; i += QUANT_MM_THREADS) {
    const uint row = first_row + i / QUANT_MM_COLUMNS, at = i % QUANT_MM_COLUMNS;
    uint column = first_column + at;
    bool there = row < end && column < y_length;
    if (p.transposed && there) column = runs_of(p.type, column / 32).of(at / 16 % 2) + at % 16;
    if (there)
      y[ulong(p.experts ? uint(order[row]) : row) * y_length + column] = exists ? static_cast<T>(tile_y[i]) : T(NAN);
  }
}

#define QUANT_MM(T, name)                                                                                              \
  template [[host_name("quant_mm_" name)]] [[kernel]] void quant_mm<T>(device const uint*, device const T*, device T*, \
                                                                       device const int*, device const int*,           \
                                                                       constant QuantMmParams&, uint3, uint);
QUANT_MM(float, "float")
QUANT_MM(half, "half")
QUANT_MM(bfloat, "bfloat")
