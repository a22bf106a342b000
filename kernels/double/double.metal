// Kernels of pairs: functions of one or of two, sums of rows, and products of matrices.
#include "double/double.h"
#include "double/functions.h"

struct Add {
  static Pair of(Pair a, Pair b) { return add(a, b); }
};
struct Multiply {
  static Pair of(Pair a, Pair b) { return multiply(a, b); }
};
struct Divide {
  static Pair of(Pair a, Pair b) { return quotient(a, b); }
};
struct SquareRoot {
  static Pair of(Pair x) { return square_root(x); }
};
struct Exponential {
  static Pair of(Pair x) { return exponential(x); }
};
struct Logarithm {
  static Pair of(Pair x) { return logarithm(x); }
};
struct Sine {
  static Pair of(Pair x) { return sine(x, 0); }
};
struct Cosine {
  static Pair of(Pair x) { return sine(x, 1); }
};
struct HyperbolicTangent {
  static Pair of(Pair x) { return hyperbolic_tangent(x); }
};

// For each element of contiguous tensors.
template <typename Function>
kernel void double_of_one(device const Pair* x [[buffer(0)]], device Pair* result [[buffer(1)]],
                          uint i [[thread_position_in_grid]]) {
  result[i] = Function::of(x[i]);
}

template <typename Function>
kernel void double_of_two(device const Pair* x [[buffer(0)]], device const Pair* y [[buffer(1)]],
                          device Pair* result [[buffer(2)]], uint i [[thread_position_in_grid]]) {
  result[i] = Function::of(x[i], y[i]);
}

#define OF_ONE(name, Function) \
  template [[host_name("double_" name)]] [[kernel]] decltype(double_of_one<Function>) double_of_one<Function>;
#define OF_TWO(name, Function) \
  template [[host_name("double_" name)]] [[kernel]] decltype(double_of_two<Function>) double_of_two<Function>;
OF_TWO("add", Add)
OF_TWO("mul", Multiply)
OF_TWO("div", Divide)
OF_ONE("sqrt", SquareRoot)
OF_ONE("exp", Exponential)
OF_ONE("log", Logarithm)
OF_ONE("sin", Sine)
OF_ONE("cos", Cosine)
OF_ONE("tanh", HyperbolicTangent)

// Sums of rows, or of the products of two rows. A threadgroup takes a part of a row.
template <bool PRODUCTS>
[[kernel]] [[max_total_threads_per_threadgroup(DOUBLE_THREADS)]] void double_sum(
    device const Pair* x [[buffer(0)]], device const Pair* y [[buffer(1)]], device Pair* sums [[buffer(2)]],
    constant DoubleSumParams& p [[buffer(3)]], uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float2 partial[DOUBLE_THREADS];
  const long row = group / p.parts, first = long(group % p.parts) * p.share;
  const long end = min(first + p.share, long(p.length));
  Pair sum = Pair(0.0f, 0.0f);
  for (long i = first + thread_index; i < end; i += DOUBLE_THREADS) {
    const long at = row * p.length + i;
    sum = PRODUCTS ? add_product_to(sum, x[at], y[at]) : add_to(sum, x[at]);
    sum = ordered_sum(sum.x, sum.y);
  }
  partial[thread_index] = sum;
  for (uint half_way = DOUBLE_THREADS / 2; half_way > 0; half_way /= 2) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (thread_index < half_way) partial[thread_index] = add(partial[thread_index], partial[thread_index + half_way]);
  }
  if (thread_index == 0) sums[group] = pair(partial[0].x, partial[0].y);
}

template [[host_name("double_sum")]] [[kernel]] decltype(double_sum<false>) double_sum<false>;
template [[host_name("double_dot")]] [[kernel]] decltype(double_sum<true>) double_sum<true>;

// Products of matrices of any strides. A threadgroup makes a square tile of a result, and a thread has a part of it in
// registers.
constant constexpr uint kRows = 4, kColumns = 2;  // of a thread
constant constexpr uint kThreadsDown = DOUBLE_TILE / kRows, kThreadsAcross = DOUBLE_TILE / kColumns;
constant constexpr uint kPitch = DOUBLE_TILE + 1;  // a term's stride in threadgroup memory, spread over banks

// Loads DOUBLE_TILE rows (or columns) from `first` on of DOUBLE_DEPTH terms from `term` on, with zeros outside.
inline void load_tile(threadgroup float2* tile, device const Pair* from, long stride, long term_stride, uint first,
                      uint count, uint term, uint terms, uint thread_index) {
#pragma unroll
  for (uint i = 0; i < DOUBLE_TILE * DOUBLE_DEPTH / DOUBLE_MATMUL_THREADS; ++i) {
    const uint at = i * DOUBLE_MATMUL_THREADS + thread_index;
    // Neighbouring threads load neighbours in memory.
    const uint k = stride == 1 ? at / DOUBLE_TILE : at % DOUBLE_DEPTH;
    const uint row = stride == 1 ? at % DOUBLE_TILE : at / DOUBLE_DEPTH;
    const bool there = first + row < count && term + k < terms;
    tile[k * kPitch + row] = there ? from[(first + row) * stride + (term + k) * term_stride] : Pair(0.0f, 0.0f);
  }
}

[[kernel]] [[max_total_threads_per_threadgroup(DOUBLE_MATMUL_THREADS)]] void double_matmul(
    device const Pair* a [[buffer(0)]], device const Pair* b [[buffer(1)]], device Pair* result [[buffer(2)]],
    constant DoubleMatmulParams& p [[buffer(3)]], uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float2 left[DOUBLE_DEPTH * kPitch], right[DOUBLE_DEPTH * kPitch];
  const uint tiles = p.down * p.across, tile = group % tiles;
  const long matrix = group / tiles;
  const uint first_row = tile / p.across * DOUBLE_TILE, first_column = tile % p.across * DOUBLE_TILE;
  const uint row = thread_index / kThreadsAcross, column = thread_index % kThreadsAcross;
  a += matrix * p.a_batch;
  b += matrix * p.b_batch;
  result += matrix * p.rows * p.columns;

  Pair totals[kRows][kColumns], sums[kRows][kColumns];
#pragma unroll
  for (uint r = 0; r < kRows; ++r) {
#pragma unroll
    for (uint c = 0; c < kColumns; ++c) totals[r][c] = sums[r][c] = Pair(0.0f, 0.0f);
  }
  for (uint term = 0; term < p.terms; term += DOUBLE_DEPTH) {
    load_tile(left, a, p.a_row, p.a_column, first_row, p.rows, term, p.terms, thread_index);
    load_tile(right, b, p.b_column, p.b_row, first_column, p.columns, term, p.terms, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll 4
    for (uint k = 0; k < DOUBLE_DEPTH; ++k) {
      Pair columns[kColumns];
#pragma unroll
      for (uint c = 0; c < kColumns; ++c) columns[c] = right[k * kPitch + column + c * kThreadsAcross];
#pragma unroll
      for (uint r = 0; r < kRows; ++r) {
        const Pair factor = left[k * kPitch + row + r * kThreadsDown];
#pragma unroll
        for (uint c = 0; c < kColumns; ++c) sums[r][c] = add_product_to(sums[r][c], factor, columns[c]);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    // Fewer roundings at the size of the total: a sum of few terms is smaller.
#pragma unroll
    for (uint r = 0; r < kRows; ++r) {
#pragma unroll
      for (uint c = 0; c < kColumns; ++c) {
        totals[r][c] = add(totals[r][c], ordered_sum(sums[r][c].x, sums[r][c].y));
        sums[r][c] = Pair(0.0f, 0.0f);
      }
    }
  }
#pragma unroll
  for (uint r = 0; r < kRows; ++r) {
#pragma unroll
    for (uint c = 0; c < kColumns; ++c) {
      const uint i = first_row + row + r * kThreadsDown, j = first_column + column + c * kThreadsAcross;
      if (i < p.rows && j < p.columns) result[i * p.columns + j] = totals[r][c];
    }
  }
}
