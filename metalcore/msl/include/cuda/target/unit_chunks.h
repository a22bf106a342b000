// metalcore_unit_chunks() for Hopper GPUs, which the kernel of a delta rule's gradients calls
// (kernels/sequence/delta_unit_chunks.h). Two warpgroups multiply (wgmma) tiles of 64 by 64 elements in shared memory.
// Floats are sums of three bfloats, as in unit_state.h, in a tile each.
#pragma once

#include "target/unit_state.h"

#if __CUDA_ARCH_FEAT_SM90_ALL

namespace msl {

struct alignas(16) Four {
  float x, y, z, w;
};

struct UnitChunks {
  static constexpr int kTile = UnitState::kTile;
  using Along = Stage<kInner, true>;
  using Across = Stage<kInner, false>;
  // Tiles: of the matrix, or of scores and queries, of errors, of gradients of results or of values, and of keys.
  static constexpr int kMatrix = 0, kScores = 0, kQueries = 6, kErrors = 12, kGrads = 18, kKeys = 24, kTiles = 26;
  static constexpr int kib = kTiles * kTile / 1024 + 1;

  uint32_t memory;
  int thread, half;
  HeldNumbers<32> products;
  HeldNumbers<16> scores;

  METAL_FUNC UnitChunks(uint32_t thread_index)
      : memory(pipeline_memory<kib>()),
        thread(int(thread_index)),
        half(__shfl_sync(kEveryLane, int(thread_index) / 128, 0)) {}

  METAL_FUNC void wait() const {
    wait_for_copies<0>();
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
  }
  template <class T>
  METAL_FUNC void bring_keys(const T* from, int64_t stride, uint32_t count) const {
    copy_rows(kKeys, from, stride, int(count));
  }
  template <class T>
  METAL_FUNC void bring_queries(const T* from, int64_t stride, uint32_t count) const {
    copy_rows(kQueries, from, stride, int(count));
  }
  template <class T>
  METAL_FUNC void bring_result_grads(const T* from, int64_t stride, uint32_t count) const {
    copy_rows(kGrads, from, stride, int(count));
  }
  METAL_FUNC void bring_errors(const float* from, int64_t stride, uint32_t count) const {
    put_rows<64>(kErrors, from, stride, int(count));
  }
  METAL_FUNC void bring_value_grads(const float* from, int64_t stride, uint32_t count) const {
    put_rows<64>(kGrads, from, stride, int(count));
  }
  METAL_FUNC void bring_matrix(const float* from) const { put_rows<128>(kMatrix, from, 128, 128); }

  METAL_FUNC void read_by_errors() { read<3>(kErrors); }
  METAL_FUNC void read_by_result_grads() { read<1>(kGrads); }
  METAL_FUNC void read_by_value_grads() { read<3>(kGrads); }
  METAL_FUNC void score_result_grads() { score<1>(); }
  METAL_FUNC void score_value_grads() { score<3>(); }

  METAL_FUNC void put_scores(uint32_t index) const {
#pragma unroll
    for (int pair = 0; pair < 8; ++pair) {
      const int line = thread / 32 % 4 * 16 + thread % 32 / 4 + pair % 2 * 8, pack = 4 * half + pair / 2;
      const uint32_t to = tile(kScores + 3 * int(index)) + place(line, pack) + uint32_t(thread % 4 * 4);
      const Floats v(scores.elements[2 * pair], scores.elements[2 * pair + 1]), rest = without_first_bits(v);
      put_word(to, upper_halves(v));
      put_word(to + kTile, upper_halves(rest));
      put_word(to + 2 * kTile, upper_halves(without_first_bits(rest)));
    }
  }
  template <bool kTransposed>
  METAL_FUNC void weigh_keys(uint32_t index) {
    weigh<kTransposed>(int(index), kKeys);
  }
  template <bool kTransposed>
  METAL_FUNC void weigh_queries(uint32_t index) {
    weigh<kTransposed>(int(index), kQueries);
  }

 private:
  template <int columns>
  struct Sums {
    HeldNumbers<columns / 2> large, small;

    METAL_FUNC void begin() {
      large.fence();
      small.fence();
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    }
    METAL_FUNC void end() {
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      wait_for_products();
      large.fence();
      small.fence();
    }
  };

  METAL_FUNC uint32_t tile(int index) const { return memory + uint32_t(index * kTile); }
  static METAL_FUNC uint32_t place(int line, int pack) {
    return uint32_t(line * kLineBytes + ((pack ^ line) & 7) * kPackBytes);
  }
  static METAL_FUNC void put_word(uint32_t to, uint32_t word) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(word) : "memory");
  }
  // Rows of 128 bfloats, into two tiles.
  template <class T>
  METAL_FUNC void copy_rows(int to, const T* from, int64_t stride, int count) const {
    const int pack = thread % 8;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int line = thread / 8 + 32 * i;
      const T* const row = from + (line < count ? line : 0) * stride + pack * kPackElements;
#pragma unroll
      for (int panel = 0; panel < 2; ++panel)
        asm volatile(
            "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(tile(to + panel) + place(line, pack)),
            "l"(row + panel * kInner), "r"(line < count ? 16 : 0)
            : "memory");
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  // Rows of 128 floats, into six tiles for 64 rows: the parts of the first 64 columns, and those of the others.
  template <int rows>
  METAL_FUNC void put_rows(int to, const float* from, int64_t stride, int count) const {
    const int warp = thread / 32, lane = thread % 32;
#pragma unroll 1
    for (int first = warp; first < rows; first += 64) {
      Four found[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        found[i] = {};
        if (first + 8 * i < count)
          found[i] = *reinterpret_cast<const Four*>(from + (first + 8 * i) * stride + 4 * lane);
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int row = first + 8 * i, line = row % 64;
        const uint32_t at =
            tile(to + row / 64 * 6 + lane / 16 * 3) + place(line, lane % 16 / 2) + uint32_t(lane % 2 * 8);
        Floats low(found[i].x, found[i].y), high(found[i].z, found[i].w);
#pragma unroll
        for (int part = 0; part < 3; ++part) {
          asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(at + part * kTile), "r"(upper_halves(low)),
                       "r"(upper_halves(high))
                       : "memory");
          low = without_first_bits(low);
          high = without_first_bits(high);
        }
      }
    }
  }

  template <int columns, bool kLeftAcross, bool kRightAcross>
  static METAL_FUNC void add(bool is_first, float* sums, uint64_t left, uint64_t right) {
    if (is_first)
      multiply_warpgroup<kLeftAcross, kRightAcross, false>(Columns<columns>(), metal::bfloat(), sums, left, right);
    else
      multiply_warpgroup<kLeftAcross, kRightAcross>(Columns<columns>(), metal::bfloat(), sums, left, right);
  }
  // The products of rows along 128 columns, of which tiles have 64. `left` has so many parts.
  template <int columns, int parts>
  METAL_FUNC void multiply_rows(Sums<columns>& sums, int left, int right, int first) const {
    sums.begin();
#pragma unroll
    for (int step = 0; step < 8; ++step) {
      const int panel = step / 4, inner = step % 4 * 16;
#pragma unroll
      for (int i = 0; i < parts; ++i) {
        const uint64_t rows = Along::descriptor(tile(left + panel * parts + i), 0, inner);
#pragma unroll
        for (int j = 0; i + j < 3; ++j) {
          const uint64_t others = Along::descriptor(tile(right + panel * 3 + j), first, inner);
          add<columns, false, false>(step == 0 && (i == 0 && j <= 1), i + j ? sums.small.elements : sums.large.elements,
                                     rows, others);
        }
      }
    }
    sums.end();
  }
  template <int parts>
  METAL_FUNC void read(int rows) {
    Sums<64> sums;
    multiply_rows<64, parts>(sums, rows, kMatrix + 6 * half, 0);
#pragma unroll
    for (int i = 0; i < 32; ++i) products[i] = sums.large[i] + sums.small[i];
  }
  template <int parts>
  METAL_FUNC void score() {
    Sums<32> sums;
    multiply_rows<32, parts>(sums, kGrads, kErrors, 32 * half);
#pragma unroll
    for (int i = 0; i < 16; ++i) scores[i] = sums.large[i] + sums.small[i];
  }
  template <bool kTransposed>
  METAL_FUNC void weigh(int index, int rows) {
    Sums<64> sums;
    sums.begin();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const uint64_t right = Across::descriptor(tile(rows + half), 0, 16 * step);
#pragma unroll
      for (int part = 0; part < 3; ++part) {
        const uint32_t at = tile(kScores + 3 * index + part);
        const uint64_t left = kTransposed ? Across::descriptor(at, 0, 16 * step) : Along::descriptor(at, 0, 16 * step);
        add<64, kTransposed, true>(step == 0 && part <= 1, part ? sums.small.elements : sums.large.elements, left,
                                   right);
      }
    }
    sums.end();
#pragma unroll
    for (int i = 0; i < 32; ++i) products[i] += sums.large[i] + sums.small[i];
  }
};

}  // namespace msl

template <class Memory, class Rows>
METAL_FUNC msl::UnitChunks metalcore_unit_chunks(Memory, Rows, uint32_t thread_index, int) {
  return msl::UnitChunks(thread_index);
}

#endif
