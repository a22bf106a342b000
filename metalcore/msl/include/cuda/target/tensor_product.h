// Products of matrices of half or bfloat in memory on CUDA: a pipeline of copies to shared memory, of which
// tensor cores read. On Hopper warpgroups multiply (wgmma), on other GPUs from compute capability 8.0 on simdgroups.
//
// A stage of the pipeline has kInner terms of both operands, in lines of 128 bytes along the dimension whose elements
// are neighbours in memory. A line has 8 packs of 16 bytes. The number of a pack is combined with that of its line by
// exclusive or, so that neither copies nor reads of 8 lines meet in a bank; this is wgmma's 128-byte swizzle.
#pragma once

#include "metal/cooperative_tensor.h"
#include "target/tensor_instructions.h"

namespace msl {

constexpr int kInner = 64, kLineBytes = 128, kPackElements = 8, kPackBytes = 16;
struct alignas(kPackBytes) Pack {
  uint32_t words[4];
};

METAL_FUNC constexpr int smaller(int a, int b) { return a < b ? a : b; }
// The largest divisor that is not above `most`.
METAL_FUNC constexpr int divisor(int number, int most) {
  int found = smaller(number, most);
  while (found > 1 && number % found) --found;
  return found;
}

// The warp's lane, from numbers that the compiler knows: assembly that reads it would come again for each element.
METAL_FUNC int tile_lane() { return int(index_in_block() & 31u); }

// Rows and columns of a product by simdgroups. They have strips of 16 rows in turn, or else also parts of the columns.
// A lane has its elements as tensor cores give them.
template <int rows_, int columns_, int simdgroups_>
struct TileLayout {
  static constexpr int rows = rows_, columns = columns_, simdgroups = simdgroups_, rank = 2;
  static constexpr Operand operand = Operand::destination;
  static constexpr int strips = (rows + 15) / 16, blocks = (columns + 7) / 8;
  static constexpr int down = divisor(simdgroups, strips), across = simdgroups / down;
  static constexpr int own_strips = (strips + down - 1) / down, own_blocks = (blocks + across - 1) / across;
  static constexpr int capacity = own_strips * own_blocks * 4;

  static METAL_FUNC int first_strip() { return int(index_of_simdgroup()) % simdgroups % down; }
  static METAL_FUNC int first_block() { return int(index_of_simdgroup()) % simdgroups / down * own_blocks; }
  static METAL_FUNC ElementPlace place(int i) {
    const int strip = first_strip() + i / (4 * own_blocks) * down, block = first_block() + i / 4 % own_blocks;
    const int lane = tile_lane();
    const int row = strip * 16 + lane / 4 + (i & 2) * 4, column = block * 8 + lane % 4 * 2 + (i & 1);
    return {row, column, row < rows && column < columns};
  }

  // Writes the elements that the tensor has. All lanes call it.
  template <class Tensor, class T>
  static METAL_FUNC void store(const Tensor& to, const T (&elements)[capacity]) {
    const int row_end = smaller(rows, int(to.get_extent(1))), end = smaller(columns, int(to.get_extent(0)));
    if constexpr (sizeof(T) == 2 && own_blocks % 4 == 0) {
      const ptrdiff_t step = to.get_stride(0), line = to.get_stride(1);
      const int lane = tile_lane(), row = first_strip() * 16 + lane / 4, column = first_block() * 8 + lane % 4 * 8;
      T* const corner = to.get_data_handle() + row * line + column * step;
      const bool packs = step == 1 && line % kPackElements == 0 && uintptr_t(to.get_data_handle()) % kPackBytes == 0;
#pragma unroll
      for (int i = 0; i < capacity; i += 4 * own_blocks)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int down_by = i / (4 * own_blocks) * down * 16 + half * 8;
          const bool is_row = row + down_by < row_end;
          T* const at = corner + down_by * line;
#pragma unroll
          for (int block = 0; block < own_blocks; block += 4) {
            const Pack pack = whole_rows(elements + i + 2 * half + 4 * block);
            const int exist = is_row ? end - column - 8 * block : 0;
            if (packs && exist >= kPackElements) {
              *reinterpret_cast<Pack*>(at + 8 * block) = pack;
            } else {
#pragma unroll
              for (int e = 0; e < kPackElements; ++e)
                if (e < exist) at[(8 * block + e) * step] = bit_cast<T>(uint16_t(pack.words[e / 2] >> e % 2 * 16));
            }
          }
        }
    } else {
#pragma unroll
      for (int i = 0; i < capacity; i += 4 * own_blocks)
#pragma unroll
        for (int half = 0; half < 4; half += 2) {
          const ElementPlace first = place(i + half);
          T* at = &element_at(to, first);
          if (first.row < row_end)
#pragma unroll
            for (int block = 0; block < own_blocks; ++block, at += 8 * ptrdiff_t(to.get_stride(0))) {
              const T* const from = elements + i + half + 4 * block;
              if constexpr (sizeof(T) == 4)
                if (to.get_stride(0) == 1 && first.column + 8 * block + 1 < end && uintptr_t(at) % 8 == 0) {
                  *reinterpret_cast<uint2*>(at) = {bit_cast<uint32_t>(from[0]), bit_cast<uint32_t>(from[1])};
                  continue;
                }
              if (first.column + 8 * block < end) at[0] = from[0];
              if (first.column + 8 * block + 1 < end) at[to.get_stride(0)] = from[1];
            }
        }
    }
  }

 private:
  // Elements of 2 bytes of a row in 4 blocks: a lane has `from[4 j]` and `from[4 j + 1]` of block j. The 4 lanes of the
  // row exchange them, so that each has a whole row of a block.
  template <class T>
  static METAL_FUNC Pack whole_rows(const T* from) {
    Pack pack;
#pragma unroll
    for (int j = 0; j < 4; ++j)
      pack.words[j] = bit_cast<uint16_t>(from[4 * j]) | uint32_t(bit_cast<uint16_t>(from[4 * j + 1])) << 16;
    const int lane = tile_lane() & 3;
#pragma unroll
    for (int bit = 1; bit < 4; bit *= 2)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (!(j & bit)) {
          uint32_t &low = pack.words[j], &high = pack.words[j | bit];
          const uint32_t found = __shfl_xor_sync(kEveryLane, lane & bit ? low : high, bit);
          (lane & bit ? low : high) = found;
        }
    return pack;
  }
};
template <int rows, int columns, int simdgroups>
constexpr bool stores_itself<TileLayout<rows, columns, simdgroups>> = true;

template <int rows, int columns, int simdgroups>
using DestinationLayout = std::conditional_t<(simdgroups > 1), TileLayout<rows, columns, simdgroups>,
                                             MatrixLayout<rows, columns, simdgroups, Operand::destination>>;

// Where a stage has an operand's elements. `outer` counts rows of a left operand and columns of a right one.
template <int outer_length, bool inner_is_packed>
struct Stage {
  static constexpr int outer = (outer_length + 15) / 16 * 16;
  static constexpr int lines = inner_is_packed ? outer : (outer + 63) / 64 * kInner;
  static constexpr int packs = inner_is_packed || outer >= 64 ? 8 : outer / kPackElements;  // of a line, in use
  static constexpr int bytes = lines * kLineBytes;

  static METAL_FUNC uint32_t offset(int outer, int inner) {
    const int line = inner_is_packed ? outer : outer / 64 * kInner + inner;
    const int pack = (inner_is_packed ? inner : outer % 64) / kPackElements;
    return uint32_t(line * kLineBytes + ((pack ^ line) & 7) * kPackBytes);
  }
  // The descriptor of 16 terms for wgmma: the beginning, the distances of 64 outer elements that are packed and of 8
  // lines, and the swizzle. An address has 18 bits there: those above are the number of a threadgroup among those that
  // run together.
  static METAL_FUNC uint64_t descriptor(uint32_t stage, int outer, int inner) {
    const int bytes =
        inner_is_packed ? outer * kLineBytes + inner * 2 : (outer / 64 * kInner + inner) * kLineBytes + outer % 64 * 2;
    constexpr uint64_t distances = uint64_t(inner_is_packed ? 1 : kInner * kLineBytes >> 4) << 16 |
                                   uint64_t(8 * kLineBytes >> 4) << 32 | uint64_t(1) << 62;
    return distances | ((stage & 0x3ffff) + uint32_t(bytes)) >> 4;
  }
};

METAL_FUNC uint32_t shared_address(const void* address) { return uint32_t(__cvta_generic_to_shared(address)); }

// Copies an operand, step by step. A thread has the pack `pack` of lines `first`, `first` + threads / 8 ….
template <class T, class Index, class Stage, bool inner_is_packed, int threads>
struct Copies {
  static constexpr int between = threads / 8;
  const T* data;
  Index line_stride, pack_stride;
  int outer, inner;  // the lengths
  int first, pack;
  bool packs;            // whether packs can be read as they are
  bool is_asynchronous;  // whether they can be copied while products go on: from device memory

  template <class Tensor>
  METAL_FUNC Copies(const Tensor& tensor, int inner)
      : data(tensor.get_data_handle()),
        line_stride(tensor.get_stride(1)),
        pack_stride(tensor.get_stride(0)),
        outer(int(tensor.get_extent(inner_is_packed ? 1 : 0))),
        inner(min(inner, int(tensor.get_extent(inner_is_packed ? 0 : 1)))),
        first(int(index_in_block()) / 8),
        pack(int(index_in_block()) % 8),
        packs(pack_stride == 1 && uintptr_t(data) % kPackBytes == 0 && line_stride % kPackElements == 0),
        is_asynchronous(packs && __isGlobal(data)) {}

  METAL_FUNC void copy(uint32_t stage, int step) const {
    if (Stage::packs < 8 && pack >= Stage::packs) return;
    const bool whole = (step + 1) * kInner <= inner &&
                       outer >= (inner_is_packed ? Stage::lines : Stage::packs * 8 * (Stage::lines / kInner));
    if (!is_asynchronous) {
#pragma unroll 1
      for (int i = 0; i < (Stage::lines + between - 1) / between; ++i) copy_elements(stage, step, i);
    } else if (whole) {
#pragma unroll
      for (int i = 0; i < (Stage::lines + between - 1) / between; ++i) copy_pack(stage, step, i, kPackBytes);
    } else if (inner_is_packed && (step + 1) * kInner <= inner) {
#pragma unroll
      for (int i = 0; i < (Stage::lines + between - 1) / between; ++i)
        copy_pack(stage, step, i, line(step, i) < outer ? kPackBytes : 0);
    } else {
#pragma unroll
      for (int i = 0; i < (Stage::lines + between - 1) / between; ++i) copy_pack(stage, step, i, 2 * count(step, i));
    }
  }

 private:
  // The i-th line of this thread, in memory and in the stage, and the first element of its pack.
  METAL_FUNC int line(int step, int i) const {
    return inner_is_packed ? first + i * between : step * kInner + first + i * between % kInner;
  }
  METAL_FUNC int element(int step, int i) const {
    return pack * kPackElements + (inner_is_packed ? step * kInner : i * between / kInner * 64);
  }
  METAL_FUNC uint32_t place(uint32_t stage, int i) const {
    return stage + uint32_t((first + i * between) * kLineBytes + ((pack ^ (first + i * between)) & 7) * kPackBytes);
  }
  METAL_FUNC bool is_beyond(int i) const { return Stage::lines % between && first + i * between >= Stage::lines; }
  // How many elements of the pack exist.
  METAL_FUNC int count(int step, int i) const {
    const int remaining = (inner_is_packed ? inner : outer) - element(step, i);
    return line(step, i) < (inner_is_packed ? outer : inner) ? max(0, min(remaining, kPackElements)) : 0;
  }
  METAL_FUNC void copy_pack(uint32_t stage, int step, int i, int bytes) const {
    if (is_beyond(i)) return;
    const T* const from = data + int64_t(line_stride) * line(step, i) + element(step, i);
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(place(stage, i)), "l"(from), "r"(bytes)
                 : "memory");
  }
  METAL_FUNC void copy_elements(uint32_t stage, int step, int i) const {
    if (is_beyond(i)) return;
    const int exist = count(step, i);
    const T* const from = data + int64_t(line_stride) * line(step, i) + int64_t(pack_stride) * element(step, i);
    Pack read = {};
    if (packs && exist == kPackElements) {
      read = *reinterpret_cast<const Pack*>(from);
    } else {
#pragma unroll
      for (int e = 0; e < kPackElements; ++e)
        if (e < exist) read.words[e / 2] |= uint32_t(bit_cast<uint16_t>(from[int64_t(pack_stride) * e])) << e % 2 * 16;
    }
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(place(stage, i)), "r"(read.words[0]),
                 "r"(read.words[1]), "r"(read.words[2]), "r"(read.words[3])
                 : "memory");
  }
};

// The pipeline's memory ----------------------------------------------------------------------------------------------

// A kernel that has this variable is launched with so many KiB of dynamic shared memory for its pipelines, behind that
// of its arguments (csrc/backends/cuda/kernels.cpp finds the name in its code).
template <int kib>
__device__ unsigned char metalcore_pipeline_kib;

template <int kib>
METAL_FUNC uint32_t pipeline_memory() {
  asm volatile("" ::"l"(&metalcore_pipeline_kib<kib>));
  extern __shared__ uint4 dynamic_threadgroup_memory[];
  uint32_t bytes;
  asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
  return (shared_address(dynamic_threadgroup_memory) + bytes - kib * 1024 + 1023) & ~1023u;
}

// The most memory of a pipeline. Hopper has 227 KiB for threadgroups, and room for two that have 96.
template <int simdgroups>
constexpr int kMostPipelineBytes = (simdgroups > 4 && __CUDA_ARCH__ == 900 ? 192 : 96) * 1024;

// The product of an m by k and a k by n matrix; k is 0 where only their extents tell it.
template <class T, int m, int n, int k, bool swaps_left, bool swaps_right, int simdgroups>
struct TileProduct {
  using Layout = TileLayout<m, n, simdgroups>;
  using Left = Stage<m, !swaps_left>;
  using Right = Stage<n, swaps_right>;
  static constexpr int threads = 32 * simdgroups;
  static constexpr int stage_bytes = Left::bytes + Right::bytes;
  static constexpr int fitting = kMostPipelineBytes<simdgroups> / stage_bytes;
  // Products of few columns wait for memory, so that more of their copies are under way. The rest of a core's memory is
  // its cache.
  static constexpr bool has_many = simdgroups > 4 && n <= 64 && stage_bytes <= 24 * 1024;
  static constexpr int most_stages = has_many ? smaller(8, 144 * 1024 / stage_bytes) : 5;
  static constexpr int needed = k ? (k + kInner - 1) / kInner : most_stages;
  static constexpr int stages = smaller(smaller(fitting, needed), most_stages);
  // Whether a warpgroup has whole parts of 64 rows.
  static constexpr bool by_warpgroups = kHasWarpgroups && simdgroups % 4 == 0 && m % 64 == 0 && n % 8 == 0 &&
                                        Layout::down % 4 == 0 && Layout::strips % Layout::down == 0 &&
                                        Layout::blocks % Layout::across == 0;
  // Whether a step's products begin while those of the step before go on, whose stage is free one step later then.
  static constexpr bool overlaps = by_warpgroups && stages >= 4;
  // Steps that copies are ahead: all where each step has a stage of its own.
  static constexpr int ahead = k && needed <= stages ? stages : stages - 1 - overlaps;
  static constexpr int kib = (stages * stage_bytes + 1023) / 1024 + 1;
  static constexpr bool is_possible = __CUDA_ARCH__ >= 800 && is_among<T, metal::half, metal::bfloat> &&
                                      simdgroups > 0 && (simdgroups & (simdgroups - 1)) == 0 &&
                                      Layout::capacity <= 256 && fitting >= 2;

  // Whether the scope is the whole threadgroup.
  static METAL_FUNC bool can_add() { return blockDim.x * blockDim.y * blockDim.z == threads; }

  // Adds the product to this lane's elements. All threads of the threadgroup call it.
  template <class LeftTensor, class RightTensor>
  static METAL_FUNC void add(const LeftTensor& left, const RightTensor& right, int length,
                             float (&sums)[Layout::capacity]) {
    const Copies<T, typename LeftTensor::index_type, Left, !swaps_left, threads> lefts(left, length);
    const Copies<T, typename RightTensor::index_type, Right, swaps_right, threads> rights(right, length);
    add_steps(lefts, rights, (min(lefts.inner, rights.inner) + kInner - 1) / kInner, sums);
  }
  // The same for what copies the operands, from step 0 on.
  template <class Lefts, class Rights>
  static METAL_FUNC void add_steps(Lefts& lefts, Rights& rights, int steps, float (&sums)[Layout::capacity]) {
    const uint32_t memory = pipeline_memory<kib>();
    __syncthreads();  // another product may have the memory
    uint32_t reads = memory, writes = memory;
#pragma unroll 1
    for (int step = -ahead; step < steps; ++step) {
      if (step >= 0) {
        wait_for_copies<ahead - 1>();
        if constexpr (by_warpgroups) {
          wait_for_products<overlaps>();
          asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        }
        __syncthreads();
        multiply(reads, reads + Left::bytes, sums);
        reads = next(reads, memory);
      }
      if (step + ahead < steps) {
        lefts.copy(writes, step + ahead);
        rights.copy(writes + Left::bytes, step + ahead);
        writes = next(writes, memory);
      }
      asm volatile("cp.async.commit_group;" ::: "memory");
    }
    if constexpr (by_warpgroups) wait_for_products();
  }

  // Adds the product of a stage of each operand. On Hopper it goes on behind the call.
  static METAL_FUNC void multiply(uint32_t left, uint32_t right, float (&sums)[Layout::capacity]) {
    if constexpr (by_warpgroups) {
#if __CUDA_ARCH_FEAT_SM90_ALL
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int inner = 0; inner < inner_length; inner += 16)
#pragma unroll
        for (int strip = 0; strip < Layout::own_strips; ++strip) multiply_columns<0>(left, right, sums, strip, inner);
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
    } else {
#pragma unroll
      for (int inner = 0; inner < inner_length; inner += 16) multiply_by_simdgroup(left, right, sums, inner);
    }
  }

 private:
  static METAL_FUNC uint32_t next(uint32_t stage, uint32_t memory) {
    return stage + stage_bytes == memory + stages * stage_bytes ? memory : stage + stage_bytes;
  }

  static constexpr int inner_length = k && k < kInner ? (k + 15) / 16 * 16 : kInner;

  // The columns from the one of block `block` of this warpgroup on, in parts that wgmma has.
  template <int block>
  static METAL_FUNC void multiply_columns(uint32_t left, uint32_t right, float (&sums)[Layout::capacity], int strip,
                                          int inner) {
    constexpr int remaining = Layout::own_blocks - block;
    if constexpr (remaining > 0) {
      constexpr int part = remaining >= 32   ? 32
                           : remaining >= 16 ? 16
                           : remaining >= 8  ? 8
                           : remaining >= 4  ? 4
                           : remaining >= 2  ? 2
                                             : 1;
      const int row = (Layout::first_strip() / 4 * 4 + strip * Layout::down) * 16;
      const int column = (Layout::first_block() + block) * 8;
      multiply_warpgroup<swaps_left, !swaps_right>(
          Columns<8 * part>(), T(), sums + (strip * Layout::own_blocks + block) * 4, Left::descriptor(left, row, inner),
          Right::descriptor(right, column, inner));
      multiply_columns<block + part>(left, right, sums, strip, inner);
    }
  }

  static METAL_FUNC void multiply_by_simdgroup(uint32_t left_stage, uint32_t right_stage,
                                               float (&sums)[Layout::capacity], int inner) {
    // Lanes 0 to 7 have the rows of the first 8 by 8 matrix, and so on.
    const int lane = int(warp_lane()), low = lane & 7, middle = lane & 8, high = lane >> 1 & 8;
    uint32_t left[Layout::own_strips][4];
#pragma unroll
    for (int i = 0; i < Layout::own_strips; ++i) {
      const int row = min(Layout::first_strip() + i * Layout::down, Layout::strips - 1) * 16;
      load_matrices<swaps_left>(left[i], left_stage + (swaps_left ? Left::offset(row + middle, inner + high + low)
                                                                  : Left::offset(row + middle + low, inner + high)));
    }
#pragma unroll
    for (int block = 0; block < Layout::own_blocks; block += 2) {
      const int column = min((Layout::first_block() + block) * 8 + high, Right::outer - 8);
      uint32_t right[4];
      load_matrices<!swaps_right>(right, right_stage + (swaps_right ? Right::offset(column + low, inner + middle)
                                                                    : Right::offset(column, inner + middle + low)));
#pragma unroll
      for (int i = 0; i < Layout::own_strips; ++i) {
        float* const sum = sums + (i * Layout::own_blocks + block) * 4;
        multiply_simdgroup(T(), sum, left[i], right[0], right[1]);
        if (block + 1 < Layout::own_blocks) multiply_simdgroup(T(), sum + 4, left[i], right[2], right[3]);
      }
    }
  }
};

}  // namespace msl

// In the place of the function in kernels/common/joined_tile.h: the memory of the products' pipeline, which has more.
template <uint32_t bytes>
METAL_FUNC float* metalcore_memory_of_sums(int) {
  extern __shared__ uint4 dynamic_threadgroup_memory[];
  return reinterpret_cast<float*>(dynamic_threadgroup_memory);
}

#include "target/held_products.h"
#include "target/unit_chunks.h"
#include "target/unit_gradients.h"
#include "target/unit_patches.h"
#include "target/unit_state.h"
#include "target/unit_unpacked.h"
#include "target/unit_walk.h"
