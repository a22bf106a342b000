// metalcore_unit_gradients() for Hopper GPUs, which the kernels of attention's gradients call
// (kernels/attention/unit_gradients.h). A threadgroup's own rows are in shared memory, and tiles of the others' rows are
// brought there while products go on. Warpgroups multiply (wgmma) 64 own rows each, whose scores, weights and sums stay
// in registers.
//
// A tile has kInner rows, so that scores read its lines along rows, and sums read the same lines across them. One stage
// of the pipeline is in use while the other one is filled.
#pragma once

#include "target/unit_products.h"

#if __CUDA_ARCH_FEAT_SM90_ALL

namespace msl {

template <class T, int size, bool both, int simdgroups, class Pair>
struct UnitGradients {
  static constexpr int rows = 16 * simdgroups, threads = 32 * simdgroups, kAll = 0x7fffffff;
  static constexpr uint32_t kColumns = kInner;
  using Own = Stage<rows, true>;
  using Along = Stage<kInner, true>;
  using Across = Stage<size, false>;
  using Tensor = decltype(Pair::of_scores);
  using Products = HeldNumbers<kInner / 2>;
  static constexpr int own_bytes = size / kInner * Own::bytes, tile_bytes = size / kInner * Along::bytes;
  static_assert(tile_bytes == Across::bytes);
  static constexpr int stage_bytes = 2 * tile_bytes;
  static constexpr int kib = (2 * own_bytes + 2 * stage_bytes) / 1024 + 1;

  Copies<T, int, Along, true, threads> score_copies, derivative_copies;
  uint32_t memory, stage, factors[kInner / 16][4] = {}, weights[kInner / 16][4] = {};  // of the sums that go on
  int warpgroup, first, tiles = 0;
  Products scores, derivatives;
  HeldNumbers<size / 2> sums, value_sums;

  METAL_FUNC UnitGradients(const Pair& own, uint32_t simd)
      : score_copies(own.of_scores, kAll),
        derivative_copies(own.of_derivatives, kAll),
        memory(pipeline_memory<kib>()),
        stage(memory + 2 * own_bytes),
        warpgroup(__shfl_sync(kEveryLane, int(simd) / 4, 0)),
        first(16 * int(simd)) {
    const Copies<T, int, Own, true, threads> of_scores(own.of_scores, kAll), of_derivatives(own.of_derivatives, kAll);
#pragma unroll 1
    for (int step = 0; step < size / kInner; ++step) {
      of_scores.copy(memory + step * Own::bytes, step);
      of_derivatives.copy(memory + own_bytes + step * Own::bytes, step);
    }
#pragma unroll
    for (int i = 0; i < size / 2; ++i) sums[i] = value_sums[i] = 0.0f;
  }

  METAL_FUNC metal::uint2 place(int i) const {
    const int lane = tile_lane();
    const int row = first + lane / 4 + (i & 2) * 4, column = i / 4 * 8 + lane % 4 * 2 + (i & 1);
    return metal::uint2(uint32_t(column), uint32_t(row));
  }

  METAL_FUNC void start(const Pair& others, uint32_t begin, uint32_t end) {
    finish();
    __syncthreads();  // all stages are free
    score_copies = {others.of_scores, kAll};
    derivative_copies = {others.of_derivatives, kAll};
    skip(int(begin));
    tiles = (int(end) - int(begin) + kInner - 1) / kInner;
    copy(stage);
  }
  METAL_FUNC void multiply(uint32_t) {
    finish();  // the step before, whose stage is free then
    wait_for_copies<0>();
    // What the copies brought is seen by all threads and by the tensor cores.
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    multiply_rows(scores, memory, stage);
    multiply_rows(derivatives, memory + own_bytes, stage + tile_bytes);
    if (--tiles > 0) copy(next());
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
    scores.fence();
  }
  METAL_FUNC void wait() {
    wait_for_products();
    derivatives.fence();
  }
  METAL_FUNC void add(uint32_t) {
    round(factors, derivatives);
    if (both) round(weights, scores);
    sums.fence();
    if (both) value_sums.fence();
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    if (both) add_rows(value_sums, weights, stage + tile_bytes);
    add_rows(sums, factors, stage);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    stage = next();
  }
  METAL_FUNC void finish() {
    wait_for_products();
    // Uses of the sums stay behind the instruction that waits for them. So do registers of left operands, which the
    // compiler takes for other things as soon as products have begun.
    sums.fence();
    if (both) value_sums.fence();
#pragma unroll
    for (int i = 0; i < kInner / 4; ++i) {
      asm volatile("" : "+r"(factors[i / 4][i % 4])::"memory");
      if (both) asm volatile("" : "+r"(weights[i / 4][i % 4])::"memory");
    }
  }

  METAL_FUNC void store(const Tensor& to, float factor) const { store(sums, to, factor); }
  METAL_FUNC void store_values(const Tensor& to) const { store(value_sums, to, 1.0f); }

 private:
  METAL_FUNC uint32_t next() const { return 2 * (memory + 2 * own_bytes) + stage_bytes - stage; }
  METAL_FUNC void skip(int count) {
    score_copies.data += int64_t(score_copies.line_stride) * count;
    score_copies.outer -= count;
    derivative_copies.data += int64_t(derivative_copies.line_stride) * count;
    derivative_copies.outer -= count;
  }
  METAL_FUNC void copy(uint32_t to) {
#pragma unroll 1
    for (int step = 0; step < size / kInner; ++step) {
      score_copies.copy(to + step * Along::bytes, step);
      derivative_copies.copy(to + tile_bytes + step * Along::bytes, step);
    }
    skip(kInner);
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  METAL_FUNC void multiply_rows(Products& products, uint32_t left_rows, uint32_t right_rows) const {
    Products made;
#pragma unroll
    for (int inner = 0; inner < size; inner += 16) {
      const uint64_t left = Own::descriptor(left_rows + inner / kInner * Own::bytes, 64 * warpgroup, inner % kInner);
      const uint64_t right = Along::descriptor(right_rows + inner / kInner * Along::bytes, 0, inner % kInner);
      if (inner == 0)
        multiply_warpgroup<false, false, false>(Columns<kInner>(), T(), made.elements, left, right);
      else
        multiply_warpgroup<false, false>(Columns<kInner>(), T(), made.elements, left, right);
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    products = made;
  }
  static METAL_FUNC void round(uint32_t (&to)[kInner / 16][4], const Products& from) {
#pragma unroll
    for (int i = 0; i < kInner / 4; ++i) to[i / 4][i % 4] = packed(T(), from.elements[2 * i], from.elements[2 * i + 1]);
  }
  static METAL_FUNC void add_rows(HeldNumbers<size / 2>& to, const uint32_t (&left)[kInner / 16][4], uint32_t right) {
#pragma unroll
    for (int inner = 0; inner < kInner; inner += 16)
      multiply_warpgroup<true>(Columns<size>(), T(), to.elements, left[inner / 16], Across::descriptor(right, 0, inner));
  }
  static METAL_FUNC void store(const HeldNumbers<size / 2>& from, const Tensor& to, float factor) {
    T results[size / 2];
#pragma unroll
    for (int i = 0; i < size / 2; ++i) results[i] = T(factor * from.elements[i]);
    TileLayout<rows, size, simdgroups>::store(to, results);
  }
};

}  // namespace msl

template <class T, uint32_t size, bool both, uint32_t simdgroups, class Pair>
METAL_FUNC auto metalcore_unit_gradients(const Pair& own, uint32_t simd, int) {
  return msl::UnitGradients<T, int(size), both, int(simdgroups), Pair>(own, simd);
}

#endif
