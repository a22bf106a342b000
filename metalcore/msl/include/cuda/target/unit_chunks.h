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

// A template, so that only programs that find these gradients ask for its memory.
template <class Memory>
struct UnitChunks {
  using State = UnitState<Memory>;
  static constexpr int kTile = State::kTile;
  using Along = Stage<kInner, true>;
  using Across = Stage<kInner, false>;
  // Tiles: of the matrix or of scores, of errors or of queries, of values' gradients, and of keys.
  static constexpr int kMatrix = 0, kScores = 0, kErrors = 12, kQueries = 12, kGrads = 18, kKeys = 24, kTiles = 26;
  static constexpr int kib = kTiles * kTile / 1024 + 1;

  uint32_t memory;
  int thread, half;
  HeldNumbers<32> products;
  HeldNumbers<16> scores;
  uint32_t result_grads[8][4];  // as wgmma has left operands in registers, of 16 columns each

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
  METAL_FUNC void bring_errors(const float* from, int64_t stride, uint32_t count) const {
    put_rows(tile(kErrors), thread, from, stride, 64, int(count), false);
  }
  METAL_FUNC void bring_value_grads(const float* from, int64_t stride, uint32_t count) const {
    put_rows(tile(kGrads), thread, from, stride, 64, int(count), false);
  }
  METAL_FUNC void bring_matrix(const float* from) const { put_rows(tile(kMatrix), thread, from, 128, 128, 128, false); }
  METAL_FUNC float exchange_matrix(const float* from) const {
    return put_rows(tile(kMatrix), thread, from, 128, 128, 128, true);
  }
  template <class T>
  METAL_FUNC void hold_result_grads(const T* from, int64_t stride, uint32_t count) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = thread / 32 % 4 * 16 + thread % 32 / 4 + 8 * i;
      const uint32_t* const pairs = reinterpret_cast<const uint32_t*>(from + row * stride) + thread % 4;
#pragma unroll
      for (int step = 0; step < 8; ++step) {
#pragma unroll
        for (int right = 0; right < 2; ++right)
          result_grads[step][i + 2 * right] = row < int(count) ? pairs[8 * step + 4 * right] : 0;
      }
    }
  }

  METAL_FUNC void read_by_errors() { read(kErrors); }
  METAL_FUNC void read_by_value_grads() { read(kGrads); }
  METAL_FUNC void read_by_result_grads() {
    Sums<64> sums;
    multiply_result_grads<64>(sums, kMatrix + 6 * half, 0);
#pragma unroll
    for (int i = 0; i < 32; ++i) products[i] = sums.large[i] + sums.small[i];
  }
  METAL_FUNC void score_value_grads() {
    Sums<32> sums;
    multiply_rows<32>(sums, kGrads, kErrors, 32 * half);
#pragma unroll
    for (int i = 0; i < 16; ++i) scores[i] = sums.large[i] + sums.small[i];
  }
  METAL_FUNC void score_result_grads() {
    Sums<32> sums;
    multiply_result_grads<32>(sums, kErrors, 32 * half);
#pragma unroll
    for (int i = 0; i < 16; ++i) scores[i] = sums.large[i] + sums.small[i];
  }
  METAL_FUNC void score_queries() { score_by_keys(kQueries); }
  METAL_FUNC void score_keys() { score_by_keys(kKeys); }

  METAL_FUNC metal::float2 key_pair(uint32_t pair) const { return pair_of(kKeys, int(pair)); }
  METAL_FUNC metal::float2 query_pair(uint32_t pair) const { return pair_of(kQueries, int(pair)); }

  template <class Factors>
  METAL_FUNC void put_scores(uint32_t index, Factors by_column, Factors by_row) const {
    const int row = thread / 32 % 4 * 16 + thread % 32 / 4, column = 32 * half + thread % 4 * 2;
    const uint32_t to = tile(kScores + 6 * int(index)) + uint32_t(thread % 4 * 4);
#pragma unroll
    for (int pair = 0; pair < 8; ++pair) {
      const int line = row + pair % 2 * 8, first = column + pair / 2 * 8;
      const Floats v(scores.elements[2 * pair], scores.elements[2 * pair + 1]);
      const uint32_t at = to + place(line, first / 8);
      put_pair(at, Floats(v.x * by_column[first], v.y * by_column[first + 1]));
      put_pair(at + 3 * kTile, Floats(v.x * by_row[line], v.y * by_row[line]));
    }
  }
  METAL_FUNC void weigh_keys(uint32_t index) {
    Sums<64> sums;
    sums.begin();
    weigh<false>(sums, int(index), kKeys);
    sums.end();
#pragma unroll
    for (int i = 0; i < 32; ++i) products[i] += sums.large[i] + sums.small[i];
  }
  METAL_FUNC void weigh_back() {
    Sums<64> sums;
    sums.begin();
    weigh<true>(sums, 0, kQueries);
    weigh<true>(sums, 1, kKeys);
    sums.end();
#pragma unroll
    for (int i = 0; i < 32; ++i) products[i] = sums.large[i] + sums.small[i];
  }

 private:
  template <int columns>
  struct Sums {
    HeldNumbers<columns / 2> large, small;

    METAL_FUNC void begin() {
#pragma unroll
      for (int i = 0; i < columns / 2; ++i) large[i] = small[i] = 0.0f;
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
  METAL_FUNC metal::float2 pair_of(int of, int pair) const {
    const int line = thread / 32 % 4 * 16 + thread % 32 / 4 + pair % 2 * 8;
    uint32_t word;
    asm volatile("ld.shared.b32 %0, [%1];"
                 : "=r"(word)
                 : "r"(tile(of + half) + place(line, pair / 2) + uint32_t(thread % 4 * 4)));
    return metal::float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
  }
  static METAL_FUNC void put_pair(uint32_t to, Floats v) {
    put_word(to, upper_halves(v));
    v = without_first_bits(v);
    put_word(to + kTile, upper_halves(v));
    put_word(to + 2 * kTile, upper_halves(without_first_bits(v)));
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
  // Rows of 128 floats, into six tiles for 64 rows: the parts of the first 64 columns, and those of the others. The
  // result is the sum of their products with the numbers whose place they take, or 0. One function serves all of them,
  // since a kernel of this length waits for its instructions.
  static __device__ __noinline__ float put_rows(uint32_t to, int thread, const float* from, int64_t stride, int rows,
                                                int count, bool multiplies) {
    const int warp = thread / 32, lane = thread % 32;
    float sum = 0.0f;
    from += warp * stride + 4 * lane;
    to += lane / 16 * 3 * kTile + lane % 2 * 8;
#pragma unroll 1
    for (int first = warp; first < rows; first += 64, to += 6 * kTile) {
      Four found[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        found[i] = {};
        if (first + 8 * i < count) found[i] = *reinterpret_cast<const Four*>(from);
        from += 8 * stride;
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const uint32_t at = to + place(warp + 8 * i, lane % 16 / 2);
        if (multiplies) sum += product_with(at, found[i]);
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
    return sum;
  }
  // With the four floats whose parts are at a place.
  static METAL_FUNC float product_with(uint32_t at, const Four& numbers) {
    float sums[4] = {};
#pragma unroll
    for (int part = 2; part >= 0; --part) {
      uint32_t low, high;
      asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(low), "=r"(high) : "r"(at + part * kTile) : "memory");
      sums[0] += __uint_as_float(low << 16);
      sums[1] += __uint_as_float(low & 0xffff0000u);
      sums[2] += __uint_as_float(high << 16);
      sums[3] += __uint_as_float(high & 0xffff0000u);
    }
    return fmaf(sums[0], numbers.x, sums[1] * numbers.y) + fmaf(sums[2], numbers.z, sums[3] * numbers.w);
  }

  template <int columns, bool kLeftAcross, bool kRightAcross>
  static METAL_FUNC void add(float* sums, uint64_t left, uint64_t right) {
    multiply_warpgroup<kLeftAcross, kRightAcross>(Columns<columns>(), metal::bfloat(), sums, left, right);
  }
  // The products of rows along 128 columns, of which tiles have 64.
  template <int columns>
  METAL_FUNC void multiply_rows(Sums<columns>& sums, int left, int right, int first) const {
    sums.begin();
#pragma unroll 1
    for (int step = 0; step < 8; ++step) {
      const int panel = step / 4 * 3, inner = step % 4 * 16;
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        const uint64_t rows = State::template descriptor<Along>(tile(left + panel + i), 0, inner);
#pragma unroll
        for (int j = 0; i + j < 3; ++j) {
          const uint64_t others = State::template descriptor<Along>(tile(right + panel + j), first, inner);
          add<columns, false, false>(i + j ? sums.small.elements : sums.large.elements, rows, others);
        }
      }
    }
    sums.end();
  }
  template <int columns>
  METAL_FUNC void multiply_result_grads(Sums<columns>& sums, int right, int first) {
    sums.begin();
#pragma unroll
    for (int step = 0; step < 8; ++step) {
#pragma unroll
      for (int part = 0; part < 3; ++part)
        multiply_warpgroup<false>(
            Columns<columns>(), metal::bfloat(), part ? sums.small.elements : sums.large.elements, result_grads[step],
            State::template descriptor<Along>(tile(right + step / 4 * 3 + part), first, step % 4 * 16));
    }
    sums.end();
    // The compiler takes registers of left operands for other things as soon as products have begun.
#pragma unroll
    for (int i = 0; i < 32; ++i) asm volatile("" : "+r"(result_grads[i / 4][i % 4])::"memory");
  }
  METAL_FUNC void score_by_keys(int rows) {
    Sums<32> sums;
    sums.begin();
#pragma unroll
    for (int step = 0; step < 8; ++step)
      add<32, false, false>(sums.large.elements,
                            State::template descriptor<Along>(tile(rows + step / 4), 0, step % 4 * 16),
                            State::template descriptor<Along>(tile(kKeys + step / 4), 32 * half, step % 4 * 16));
    sums.end();
#pragma unroll
    for (int i = 0; i < 16; ++i) scores[i] = sums.large[i];
  }
  METAL_FUNC void read(int rows) {
    Sums<64> sums;
    multiply_rows<64>(sums, rows, kMatrix + 6 * half, 0);
#pragma unroll
    for (int i = 0; i < 32; ++i) products[i] = sums.large[i] + sums.small[i];
  }
  template <bool kTransposed>
  METAL_FUNC void weigh(Sums<64>& sums, int index, int rows) const {
#pragma unroll 1
    for (int step = 0; step < 4; ++step) {
      const uint64_t right = State::template descriptor<Across>(tile(rows + half), 0, 16 * step);
#pragma unroll
      for (int part = 0; part < 3; ++part) {
        const uint32_t at = tile(kScores + 6 * index + 3 * kTransposed + part);
        const uint64_t left =
            State::template descriptor<std::conditional_t<kTransposed, Across, Along>>(at, 0, 16 * step);
        add<64, kTransposed, true>(part ? sums.small.elements : sums.large.elements, left, right);
      }
    }
  }
};

}  // namespace msl

template <class Memory, class Rows>
METAL_FUNC msl::UnitChunks<Memory> metalcore_unit_chunks(Memory, Rows, uint32_t thread_index, int) {
#ifdef MSL_NUMBERED_LANES
  static_assert(sizeof(Memory) == 0,
                "a warpgroup's product lies in the warp's lanes, which this program numbers otherwise");
#endif
  return msl::UnitChunks<Memory>(thread_index);
}

#endif
