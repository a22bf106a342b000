// metalcore_unit_state() for Hopper GPUs, which kernels that walk along the chunks of a delta rule call
// (kernels/sequence/delta_units.h). Two warpgroups multiply (wgmma) tiles in shared memory, while the next chunk's are
// brought there.
//
// Floats are sums of three bfloats: a tile of floats with 32 columns has the first and the second ones beside each
// other in lines of 128 bytes, and the third ones in half of another tile. Products of parts that a float's last bit
// does not show are left out, and sums of large and of small ones are added as float32 adds, since tensor cores round
// towards zero.
#pragma once

#include "target/unit_products.h"

#if __CUDA_ARCH_FEAT_SM90_ALL

namespace msl {

// Sums of products of parts.
struct PartSums {
  HeldNumbers<32> large, middle;  // of the first two parts of right operands
  HeldNumbers<16> small;

  METAL_FUNC void begin() {
    fence();
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  }
  template <class Meanwhile>
  METAL_FUNC void end(const Meanwhile& meanwhile) {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    meanwhile();
    wait_for_products();
    fence();
  }
  METAL_FUNC void fence() {
    large.fence();
    middle.fence();
    small.fence();
  }
};

// A template, so that only programs that walk along chunks ask for its memory.
template <class Memory>
struct UnitState {
  static constexpr int kNumbers = 16, kTile = kInner * kLineBytes;
  using Along = Stage<kInner, true>;
  using Across = Stage<kInner, false>;
  // Tiles: of the matrix, of the two tiles of positions, and of the chunks' rows; then the stages.
  static constexpr int kState = 0, kLowState = 2, kPositions = 3, kLowPositions = 5, kRows = 6, kStages = 7;
  static constexpr int kKeys = 0, kQueries = 2, kInverse = 4, kScores = 7, kStageTiles = 10;
  static constexpr int kib = (kStages + 2 * kStageTiles) * kTile / 1024 + 1;

  uint32_t memory, here, before, rows_here;  // the stages of this chunk and of the one before, and this one's rows
  int thread, half, stage = 1;
  HeldNumbers<kNumbers> state, products;

  METAL_FUNC UnitState(uint32_t thread_index)
      : memory(pipeline_memory<kib>()),
        thread(int(thread_index)),
        half(__shfl_sync(kEveryLane, int(thread_index) / 128, 0)) {
    // Copies leave out what is zero always.
    for (int i = thread; i < kTile * (kStages + 2 * kStageTiles) / kPackBytes; i += 256)
      asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(memory + i * kPackBytes), "r"(0) : "memory");
    __syncthreads();
  }

  // The descriptor of 16 terms of a tile, to whose place one number is added that is known at compile time.
  template <class Operand>
  static METAL_FUNC uint64_t descriptor(uint32_t tile, int outer, int inner) {
    const uint64_t of_first = Operand::descriptor(0, outer, inner);
    return of_first >> 32 << 32 | uint32_t(uint32_t(of_first) + (tile >> 4));
  }

  template <class Chunk>
  METAL_FUNC void ask(const Chunk& chunk) const {
    if (half == 0) return;
    const uint32_t to = stage_tile(1 - stage, 0);
    copy_rows(to + kKeys * kTile, chunk.keys, chunk.key_stride, int(chunk.count));
    if (chunk.queries) copy_rows(to + kQueries * kTile, chunk.queries, chunk.query_stride, int(chunk.count));
    copy_parts(to + kInverse * kTile, chunk.inverse);
    if (chunk.rows) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = thread % 128 / 4 + 32 * i, pack = thread % 4;
        copy(tile(kRows) + place(row, (1 - stage) * 4 + pack),
             chunk.rows + row * chunk.row_stride + pack * kPackElements, row < int(chunk.count));
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  template <class Chunk>
  METAL_FUNC void ask_scores(const Chunk& chunk) const {
    if (half == 0) return;
    copy_parts(stage_tile(1 - stage, kScores), chunk.scores);
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  // The scores may be on their way still, unless they are wanted.
  template <bool kWithScores>
  METAL_FUNC void begin_chunk() {
    wait_for_copies<kWithScores ? 0 : 1>();
    wait();
    stage = 1 - stage;
    here = stage_tile(stage, 0);
    before = stage_tile(1 - stage, 0);
    rows_here = tile(kRows) + uint32_t(stage * 64);
  }
  // The first half's products, which alone read the tile of errors, have ended.
  METAL_FUNC void wait_for_solutions() const {
    if (half == 0) asm volatile("bar.sync 1, 128;" ::: "memory");
  }
  METAL_FUNC void wait() const {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
  }

  METAL_FUNC void put_state() const { put(tile(kState + half), tile(kLowState), 4 * half, state, 1.0f, 1.0f); }
  METAL_FUNC void put(uint32_t of, float first_factor = 1.0f, float second_factor = 1.0f) const {
    put(tile(kPositions + int(of)), tile(kLowPositions), 4 * int(of), products, first_factor, second_factor);
  }

  template <class Meanwhile>
  METAL_FUNC void read(bool of_queries, const Meanwhile& meanwhile) {
    const uint32_t rows = here + (of_queries ? kQueries : kKeys) * kTile;
    PartSums sums;
    sums.begin();
#pragma unroll
    for (int step = 0; step < 8; ++step) {
      const uint64_t left = descriptor<Along>(rows + step / 4 * kTile, 0, step % 4 * 16);
      add<64, false>(step == 0, sums.large.elements, left,
                     descriptor<Across>(tile(kState + step / 4), 0, step % 4 * 16));
      add<32, false>(step == 0, sums.small.elements, left,
                     descriptor<Across>(tile(kLowState), step / 4 * 32, step % 4 * 16));
    }
    sums.end(meanwhile);
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) products[i] = sums.large[i] + (sums.large[kNumbers + i] + sums.small[i]);
  }
  template <bool kTransposed>
  METAL_FUNC void solve(uint32_t of) {
    multiply<kTransposed>(here + kInverse * kTile, int(of));
  }
  METAL_FUNC void weigh(uint32_t of, bool of_before) {
    multiply<false>((of_before ? before : here) + kScores * kTile, int(of));
  }
  METAL_FUNC void spread() {
    const uint32_t parts = here + kScores * kTile;
    PartSums sums;
    sums.begin();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const uint64_t right = descriptor<Across>(rows_here, 0, 16 * step);
#pragma unroll
      for (int part = 0; part < 3; ++part) {
        float* const of_part = part == 0 ? sums.large.elements : part == 1 ? sums.middle.elements : sums.small.elements;
        add<32, true>(step == 0, of_part, descriptor<Across>(parts + part * kTile, 0, 16 * step), right);
      }
    }
    sums.end([] {});
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) products[i] += sums.large[i] + (sums.middle[i] + sums.small[i]);
  }
  template <bool kBoth, class Meanwhile>
  METAL_FUNC void learn(float factor, const Meanwhile& meanwhile) {
    PartSums sums;
    sums.begin();
#pragma unroll
    for (int both = 0; both < (kBoth ? 2 : 1); ++both) {
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        const uint32_t rows = here + uint32_t((both ? kQueries : kKeys) + half) * kTile;
        const uint64_t left = descriptor<Across>(rows, 0, 16 * step);
        add<64, true>(both == 0 && step == 0, sums.large.elements, left,
                      descriptor<Across>(tile(kPositions + both), 0, 16 * step));
        add<32, true>(both == 0 && step == 0, sums.small.elements, left,
                      descriptor<Across>(tile(kLowPositions), 32 * both, 16 * step));
      }
    }
    sums.end(meanwhile);
#pragma unroll
    for (int i = 0; i < kNumbers; ++i)
      state[i] = fmaf(state[i], factor, sums.large[i] + (sums.large[kNumbers + i] + sums.small[i]));
  }

 private:
  METAL_FUNC uint32_t tile(int index) const { return memory + uint32_t(index * kTile); }
  METAL_FUNC uint32_t stage_tile(int of, int index) const { return tile(kStages + of * kStageTiles + index); }
  static METAL_FUNC uint32_t place(int line, int pack) {
    return uint32_t(line * kLineBytes + ((pack ^ line) & 7) * kPackBytes);
  }
  static METAL_FUNC void copy(uint32_t to, const void* from, bool exists) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(exists ? 16 : 0)
                 : "memory");
  }
  // Copies have a pack of each 16th line for a thread of the second half, at the same place of each.
  METAL_FUNC int first_line() const { return thread % 128 / 8; }
  METAL_FUNC uint32_t first_place(uint32_t to) const { return to + place(first_line(), thread % 8); }
  // Rows of 128 elements, into two tiles. Nothing is read of rows that do not exist.
  template <class T>
  METAL_FUNC void copy_rows(uint32_t to, const T* from, int64_t stride, int count) const {
    const T* row = from + first_line() * stride + thread % 8 * kPackElements;
    to = first_place(to);
#pragma unroll
    for (int line = 0; line < kInner; line += 16, row += 16 * stride) {
      const bool exists = first_line() + line < count;
      copy(to + line * kLineBytes, row, exists);
      copy(to + line * kLineBytes + kTile, row + kInner, exists);
    }
  }
  // The lower triangles of three matrices.
  template <class T>
  METAL_FUNC void copy_parts(uint32_t to, const T* from) const {
    const int pack = thread % 8;
    from += first_line() * kInner + pack * kPackElements;
    to = first_place(to);
#pragma unroll
    for (int line = 0; line < kInner; line += 16) {
      if (pack > (first_line() + line) / 8) continue;
#pragma unroll
      for (int part = 0; part < 3; ++part)
        copy(to + line * kLineBytes + part * kTile, from + (part * kInner + line) * kInner, true);
    }
  }

  // Writes numbers, times the factors of a thread's two rows, as parts: two columns of a row at a time.
  METAL_FUNC void put(uint32_t high, uint32_t low, int first_low, const HeldNumbers<kNumbers>& numbers,
                      float first_factor, float second_factor) const {
#pragma unroll
    for (int pair = 0; pair < kNumbers / 2; ++pair) {
      const int line = thread / 32 % 4 * 16 + thread % 32 / 4 + pair % 2 * 8, pack = pair / 2;
      const uint32_t at = uint32_t(thread % 4 * 4);
      const float factor = pair % 2 ? second_factor : first_factor;
      const Floats v(numbers.elements[2 * pair] * factor, numbers.elements[2 * pair + 1] * factor);
      const Floats rest = without_first_bits(v);
      put_word(high + place(line, pack) + at, upper_halves(v));
      put_word(high + place(line, 4 + pack) + at, upper_halves(rest));
      put_word(low + place(line, first_low + pack) + at, upper_halves(without_first_bits(rest)));
    }
  }
  static METAL_FUNC void put_word(uint32_t to, uint32_t word) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(word) : "memory");
  }

  template <int kColumns, bool kAcross>
  static METAL_FUNC void add(bool is_first, float* sums, uint64_t left, uint64_t right) {
    if (is_first)
      multiply_warpgroup<kAcross, true, false>(Columns<kColumns>(), metal::bfloat(), sums, left, right);
    else
      multiply_warpgroup<kAcross, true>(Columns<kColumns>(), metal::bfloat(), sums, left, right);
  }
  template <bool kTransposed>
  METAL_FUNC void multiply(uint32_t parts, int of) {
    PartSums sums;
    sums.begin();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      uint64_t left[3];
#pragma unroll
      for (int part = 0; part < 3; ++part)
        left[part] = kTransposed ? descriptor<Across>(parts + part * kTile, 0, 16 * step)
                                 : descriptor<Along>(parts + part * kTile, 0, 16 * step);
      const uint64_t high = descriptor<Across>(tile(kPositions + of), 0, 16 * step);
      const uint64_t low = descriptor<Across>(tile(kLowPositions), 32 * of, 16 * step);
      add<64, kTransposed>(step == 0, sums.large.elements, left[0], high);
      add<64, kTransposed>(step == 0, sums.middle.elements, left[1], high);
      add<32, kTransposed>(step == 0, sums.small.elements, left[0], low);
      add<32, kTransposed>(false, sums.small.elements, left[2], high);
    }
    sums.end([] {});
#pragma unroll
    for (int i = 0; i < kNumbers; ++i)
      products[i] =
          sums.large[i] + ((sums.large[kNumbers + i] + sums.middle[i]) + (sums.small[i] + sums.middle[kNumbers + i]));
  }
};

}  // namespace msl

template <class Memory>
METAL_FUNC msl::UnitState<Memory> metalcore_unit_state(Memory, uint32_t thread_index, int) {
#ifdef MSL_NUMBERED_LANES
  static_assert(sizeof(Memory) == 0, "a warpgroup's product is in the warp's lanes, and this program numbers others");
#endif
  return msl::UnitState<Memory>(thread_index);
}

#endif
