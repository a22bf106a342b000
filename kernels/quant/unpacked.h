// The right operand of products by units that multiply tensors: packed weights, which threads unpack step by step, and
// its product with x.
//
// metalcore_multiply_unpacked() is called with a 0 as its last parameter: a compiler's headers may have a function that
// is the same except for an `int` (see common/matrices.h). That for NVIDIA's GPUs unpacks while units multiply.
#pragma once

#include <metal_tensor>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>

#include "common/pack.h"
#include "formats.h"
#include "quant.h"

// A step's terms of a row of weights are the work of two threads, which have two slices each where a slice's runs lie
// in different steps, and one elsewhere.
template <typename F, typename T>
struct UnpackedRows {
  typedef decltype(place((device const typename F::Word*)nullptr, 0)) Rows;
  static constexpr constant bool has_far_runs = 2 * F::apart > QUANT_UNIT_STEP;
  static constexpr constant uint kSlices = has_far_runs ? 2 : 1;
  struct Loaded {
    Packed packed[kSlices];
  };

  Rows rows;
  ulong row_bytes;
  uint first, weights, slices;  // the first row, and how many rows and slices there are

  METAL_FUNC uint slice(uint step, uint half_step, uint i) const {
    const uint index = has_far_runs ? step / 2 * 4 + 2 * half_step + i : 2 * step + half_step;
    return metal::min(index, slices - 1);  // x has zeros behind its end
  }
  METAL_FUNC Loaded load(uint row, uint half_step, uint step) const {
    const auto from = rows.plus(ulong(metal::min(first + row, weights - 1)) * row_bytes);
    Loaded loaded;
#pragma unroll
    for (uint i = 0; i < kSlices; ++i) loaded.packed[i] = SliceOf<F>(slice(step, half_step, i)).load(from);
    return loaded;
  }
  // Calls store(pack, elements) for the thread's packs of 8 terms.
  template <typename Store>
  METAL_FUNC void unpack(Loaded loaded, uint half_step, uint step, Store store) const {
    if constexpr (has_far_runs) {
#pragma unroll
      for (uint i = 0; i < 2; ++i) {
        const Slice numbers = SliceOf<F>(slice(step, half_step, i)).decode(loaded.packed[i]);
        if (step % 2 == 0)
          store_run<0>(numbers, 4 * half_step + 2 * i, store);
        else
          store_run<1>(numbers, 4 * half_step + 2 * i, store);
      }
    } else {
      const Slice numbers = SliceOf<F>(slice(step, half_step, 0)).decode(loaded.packed[0]);
      const uint pack = half_step * (F::apart == 16 ? 4 : 2);
      store_run<0>(numbers, pack, store);
      store_run<1>(numbers, pack + F::apart / 8, store);
    }
  }

 private:
  template <uint run, typename Store>
  static METAL_FUNC void store_run(Slice numbers, uint pack, Store store) {
#pragma unroll
    for (uint i = 0; i < 2; ++i) {
      const metal::float4 values[2] = {::weights<F>(numbers, 4 * run + 2 * i),
                                       ::weights<F>(numbers, 4 * run + 2 * i + 1)};
      store(pack + i, packed<T>(values));
    }
  }
};

// Adds the products of kRows rows of x and kColumns rows of weights.
template <uint kRows, uint kColumns, uint kSimds, typename T, typename X, typename Weights, typename Sums>
METAL_FUNC void metalcore_multiply_unpacked(X x, Weights weights, threadgroup T* tile, thread Sums& sums,
                                            uint thread_index, long) {
  using namespace mpp::tensor_ops;
  constexpr auto descriptor = matmul2d_descriptor(kRows, kColumns, QUANT_UNIT_STEP, false, true, false,
                                                  matmul2d_descriptor::mode::multiply_accumulate);
  constexpr matmul2d<descriptor, metal::execution_simdgroups<kSimds>> multiply;
  auto right = metal::tensor<threadgroup T, metal::extents<int, QUANT_UNIT_STEP, kColumns>, metal::tensor_inline>(
      tile, metal::extents<int, QUANT_UNIT_STEP, kColumns>());
  const uint steps = (weights.slices * QUANT_SLICE + QUANT_UNIT_STEP - 1) / QUANT_UNIT_STEP;
  for (uint step = 0; step < steps; ++step) {
    for (uint part = thread_index; part < 2 * kColumns; part += 32 * kSimds) {
      threadgroup Pack<T>* const row = reinterpret_cast<threadgroup Pack<T>*>(tile + part / 2 * QUANT_UNIT_STEP);
      weights.unpack(weights.load(part / 2, part % 2, step), part % 2, step,
                     [&](uint pack, Pack<T> elements) { row[pack] = elements; });
    }
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    auto left = x.slice(int(step * QUANT_UNIT_STEP), 0);
    multiply.run(left, right, sums);
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  }
}
