// metalcore_unit_products() for Hopper GPUs, which attention's kernels call (kernels/attention/unit_products.h). A
// threadgroup's queries are in shared memory, and tiles of keys and values are brought there while products go on.
// Warpgroups multiply (wgmma) 64 queries each, whose scores, weights and results stay in registers.
//
// Step t adds the values of tile t. While it computes weights, the products of step t - 1 go on; then it begins the
// scores of tile t + 1, and the products of its own. Its stage of the pipeline has these keys and these values. Where a
// threadgroup has two warpgroups, barriers in shared memory tell which stages are filled and which are free, so that a
// warpgroup can be a step ahead of another one, and one computes weights while the other multiplies.
#pragma once

#include "target/tensor_product.h"

#if __CUDA_ARCH_FEAT_SM90_ALL

namespace msl {

// Numbers of a thread.
template <int n>
struct HeldNumbers {
  float elements[n];

  static METAL_FUNC constexpr int get_capacity() { return n; }
  METAL_FUNC float& operator[](int i) { return elements[i]; }
  // Keeps uses of the numbers behind the instructions that wait for them.
  METAL_FUNC void fence() {
#pragma unroll
    for (int i = 0; i < n; ++i) asm volatile("" : "+f"(elements[i])::"memory");
  }
};

METAL_FUNC uint32_t packed(metal::half, float low, float high) {
  uint32_t result;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}
METAL_FUNC uint32_t packed(metal::bfloat, float low, float high) {
  uint32_t result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}

// A barrier in shared memory, which counts arrivals. Its phases have the parities 0, 1, 0, …; a wait for the other
// parity ends at once in the first phase.
METAL_FUNC void begin_barrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
METAL_FUNC void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives when the copies that this thread has begun have ended.
METAL_FUNC void arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
METAL_FUNC void wait_for_barrier(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{.reg .pred ended; again: mbarrier.try_wait.parity.shared::cta.b64 ended, [%0], %1; @!ended bra again;}" ::"r"(
          barrier),
      "r"(parity)
      : "memory");
}

template <class T, int size, int simdgroups, class Tensor>
struct UnitProducts {
  static constexpr int keys = size <= 128 ? 128 : 64;
  static constexpr int rows = 16 * simdgroups, threads = 32 * simdgroups, kAll = 0x7fffffff;
  using Queries = Stage<rows, true>;
  using Keys = Stage<keys, true>;
  using Values = Stage<size, false>;
  static constexpr int query_bytes = size / kInner * Queries::bytes, key_bytes = size / kInner * Keys::bytes;
  static constexpr int stage_bytes = key_bytes + keys / kInner * Values::bytes;
  // Two stages where a multiprocessor has room for several threadgroups.
  static constexpr int stages = simdgroups > 4 ? smaller(3, (225 * 1024 - query_bytes) / stage_bytes) : 2;
  static constexpr int kib = (query_bytes + stages * stage_bytes) / 1024 + 2;  // with the barriers
  static constexpr bool has_barriers = simdgroups > 4;
  static constexpr uint32_t kKeys = keys;
  using Numbers = HeldNumbers<2>;  // of the rows of a lane: lane / 4, and that row + 8

  Copies<T, int, Queries, true, threads> query_copies;
  Copies<T, int, Keys, true, threads> key_copies;
  Copies<T, int, Values, false, threads> value_copies;
  uint32_t memory, barriers;  // two for each stage
  int warpgroup, first, tiles;
  int stage = 0, parity = 0;
  bool is_asynchronous;
  HeldNumbers<keys / 2> scores;
  HeldNumbers<size / 2> sums;
  uint32_t weights[keys / 16][4] = {};  // of the products that go on

  METAL_FUNC UnitProducts(const Tensor& of_queries, const Tensor& of_keys, const Tensor& of_values, uint32_t simd)
      : query_copies(of_queries, kAll),
        key_copies(of_keys, kAll),
        value_copies(of_values, kAll),
        memory(pipeline_memory<kib>()),
        warpgroup(__shfl_sync(kEveryLane, int(simd) / 4, 0)),
        first(16 * int(simd)) {
    barriers = memory + query_bytes + stages * stage_bytes;
    is_asynchronous = query_copies.is_asynchronous && key_copies.is_asynchronous && value_copies.is_asynchronous;
#pragma unroll
    for (int i = 0; i < size / 2; ++i) sums[i] = 0.0f;
  }

  METAL_FUNC metal::uint2 place(int i) const {
    const int lane = tile_lane();
    const int row = first + lane / 4 + (i & 2) * 4, column = i / 4 * 8 + lane % 4 * 2 + (i & 1);
    return metal::uint2(uint32_t(column), uint32_t(row));
  }
  METAL_FUNC float of(const Numbers& numbers, int i) const { return numbers.elements[i / 2 % 2]; }

  METAL_FUNC void start(uint32_t begin, uint32_t end) {
    tiles = max(1, (int(end) - int(begin) + keys - 1) / keys);
    skip_keys(int(begin));
    value_copies.data += int64_t(value_copies.line_stride) * begin;
    value_copies.inner -= int(begin);
    if (has_barriers && index_in_block() == 0) {
#pragma unroll
      for (int i = 0; i < stages; ++i) {
        begin_barrier(filled(i), threads);
        begin_barrier(free(i), simdgroups);
      }
    }
    if (has_barriers) __syncthreads();
#pragma unroll 1
    for (int step = 0; step < size / kInner; ++step) query_copies.copy(memory + step * Queries::bytes, step);
    copy_keys(place_of(0));
    arrive_filled(0);
    copy(1, 0);
    if constexpr (has_barriers)
      wait_for_barrier(filled(0), 0);
    else
      wait_for_copies<1>();
    share();
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    multiply_keys(place_of(0));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    wait_for_products();
    scores.fence();
  }
  METAL_FUNC void multiply(uint32_t) {}

  METAL_FUNC void largest(Numbers& numbers) const {
    float most[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};  // two chains for each row
#pragma unroll
    for (int i = 0; i < keys / 2; ++i) most[i % 4] = fmaxf(most[i % 4], scores.elements[i]);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      numbers[j] = fmaxf(most[2 * j], most[2 * j + 1]);
      numbers[j] = fmaxf(numbers[j], __shfl_xor_sync(kEveryLane, numbers[j], 1));
      numbers[j] = fmaxf(numbers[j], __shfl_xor_sync(kEveryLane, numbers[j], 2));
    }
  }
  METAL_FUNC void add_weights(Numbers& totals, const Numbers& factors) const {
    float sums[4] = {};
#pragma unroll
    for (int i = 0; i < keys / 2; ++i) sums[i % 4] += scores.elements[i];
#pragma unroll
    for (int j = 0; j < 2; ++j) totals[j] = fmaf(totals[j], factors.elements[j], sums[2 * j] + sums[2 * j + 1]);
  }
  METAL_FUNC void finish_totals(Numbers& totals) const {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      totals[j] += __shfl_xor_sync(kEveryLane, totals[j], 1);
      totals[j] += __shfl_xor_sync(kEveryLane, totals[j], 2);
    }
  }
  METAL_FUNC void scale(const Numbers& factors) {
    if (!__any_sync(kEveryLane, factors.elements[0] != 1.0f || factors.elements[1] != 1.0f)) return;
#pragma unroll
    for (int i = 0; i < size / 2; ++i) sums[i] *= of(factors, i);
  }

  METAL_FUNC void add(uint32_t, const Numbers& factors) {
    int next = stage, next_parity = parity;
    advance(next, next_parity);
    // This comes first, since its branch keeps the compiler from beginning weights behind the products.
    if constexpr (has_barriers) wait_for_barrier(filled(next), next_parity);
    finish();  // the step before, whose stage and weights are free then
    if (has_barriers && tile_lane() == 0) arrive(free(stage));
    stage = next, parity = next_parity;
    // All lanes have the same number. The exchange tells the compiler so, which computes descriptors once for all then.
    const uint32_t here = __shfl_sync(kEveryLane, place_of(stage), 0);
#pragma unroll
    for (int i = 0; i < keys / 4; ++i) weights[i / 4][i % 4] = packed(T(), scores[2 * i], scores[2 * i + 1]);
    scale(factors);
    if constexpr (!has_barriers) wait_for_copies<0>();
    share();
    sums.fence();
    scores.fence();
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    multiply_keys(here);  // behind the last tile of what the stage happens to have, for nobody
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#pragma unroll
    for (int inner = 0; inner < keys; inner += 16)
      multiply_warpgroup<true>(
          Columns<size>(), T(), sums.elements, weights[inner / 16],
          Values::descriptor(here + key_bytes + inner / kInner * Values::bytes, 0, inner % kInner));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    if (--tiles > 0) {
      advance(next, next_parity);
      copy(next, next_parity);
    }
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
    scores.fence();
  }
  METAL_FUNC void finish() {
    wait_for_products();
    sums.fence();
    // The compiler takes registers of left operands for other things as soon as products have begun.
#pragma unroll
    for (int i = 0; i < keys / 4; ++i) asm volatile("" : "+r"(weights[i / 4][i % 4])::"memory");
  }

  template <bool rests>
  METAL_FUNC void store(const Tensor& to) {
    T results[size / 2];
#pragma unroll
    for (int i = 0; i < size / 2; ++i) results[i] = rests ? T(sums[i] - float(T(sums[i]))) : T(sums[i]);
    TileLayout<rows, size, simdgroups>::store(to, results);
  }

 private:
  METAL_FUNC uint32_t place_of(int stage) const { return memory + query_bytes + stage * stage_bytes; }
  // The barriers at which all threads arrive when their copies have filled a stage, and each simdgroup when it has read
  // the stage.
  METAL_FUNC uint32_t filled(int stage) const { return barriers + 16 * stage; }
  METAL_FUNC uint32_t free(int stage) const { return barriers + 16 * stage + 8; }
  static METAL_FUNC void advance(int& stage, int& parity) {
    stage = stage + 1 == stages ? 0 : stage + 1;
    parity ^= stage == 0;
  }
  // What the copies brought is seen by the tensor cores.
  METAL_FUNC void share() const {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    if (!has_barriers) __syncthreads();
  }
  METAL_FUNC void arrive_filled(int stage) const {
    if constexpr (!has_barriers) {
      asm volatile("cp.async.commit_group;" ::: "memory");
    } else if (is_asynchronous) {
      arrive_after_copies(filled(stage));
    } else {
      asm volatile("cp.async.wait_all;" ::: "memory");
      arrive(filled(stage));
    }
  }
  METAL_FUNC void skip_keys(int count) {
    key_copies.data += int64_t(key_copies.line_stride) * count;
    key_copies.outer -= count;
  }
  METAL_FUNC void copy_keys(uint32_t to) {
#pragma unroll 1
    for (int step = 0; step < size / kInner; ++step) key_copies.copy(to + step * Keys::bytes, step);
    skip_keys(keys);
  }
  // A step's keys, which may be none, and its values.
  METAL_FUNC void copy(int stage, int parity) {
    if constexpr (has_barriers) wait_for_barrier(free(stage), parity ^ 1);
    if (tiles > 1) copy_keys(place_of(stage));
#pragma unroll 1
    for (int step = 0; step < keys / kInner; ++step)
      value_copies.copy(place_of(stage) + key_bytes + step * Values::bytes, step);
    value_copies.data += int64_t(value_copies.line_stride) * keys;
    value_copies.inner -= keys;
    arrive_filled(stage);
  }
  METAL_FUNC void multiply_keys(uint32_t from) {
#pragma unroll
    for (int inner = 0; inner < size; inner += 16) {
      const uint64_t left =
          Queries::descriptor(memory + inner / kInner * Queries::bytes, 64 * warpgroup, inner % kInner);
      const uint64_t right = Keys::descriptor(from + inner / kInner * Keys::bytes, 0, inner % kInner);
      if (inner == 0)
        multiply_warpgroup<false, false, false>(Columns<keys>(), T(), scores.elements, left, right);
      else
        multiply_warpgroup<false, false>(Columns<keys>(), T(), scores.elements, left, right);
    }
  }
};

}  // namespace msl

template <class T, uint32_t size, uint32_t simdgroups, class Tensor>
METAL_FUNC auto metalcore_unit_products(Tensor of_queries, Tensor of_keys, Tensor of_values, float*, uint32_t simd,
                                        int) {
  return msl::UnitProducts<T, int(size), int(simdgroups), Tensor>(of_queries, of_keys, of_values, simd);
}

#endif
