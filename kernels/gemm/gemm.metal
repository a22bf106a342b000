// Products of matrices, in tiles: batches with broadcast operands, and groups of rows or of terms (for mixtures of
// experts). A threadgroup loads the next step's tiles of a and b into registers while it multiplies those in
// threadgroup memory. There are two of each tile, so that a step has one barrier, or one of each large tile. Kernels
// that lack the registers load tiles between steps, while the core's other threadgroups multiply.
#include "gemm/epilogue.h"
#include "gemm/job.h"
#include "gemm/tile.h"

// A tile has kTile rows and columns, of which a simdgroup has 8 kDown rows and 32 columns. Where steps are so
// short that half of the threads have two packs each of an operand's tile, the other half loads the other operand.
template <typename T, uint kTile, uint kDown, uint kBuffers, uint kThreads, uint kStepBytes = GEMM_STEP_BYTES,
          bool kAhead = true, uint kReaders = 2>
[[kernel]] [[max_total_threads_per_threadgroup(kThreads)]] void gemm(
    device const T* a [[buffer(0)]], device const T* b [[buffer(1)]], device const T* bias [[buffer(2)]],
    device const T* residual [[buffer(3)]], device const int* ends [[buffer(4)]], device T* result [[buffer(5)]],
    constant GemmParams& p [[buffer(6)]], uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  constexpr uint kTerms = kStepBytes / sizeof(T), kBeside = kTile / 32, kBelow = kTile / (8 * kDown);
  static_assert(32 * kBeside * kBelow == kThreads, "a simdgroup has 8 kDown rows and 32 columns");
  constexpr bool kOnlyPacks = kTile == GEMM_LARGE;
  constexpr uint kLoaders = kTile * kTerms / (2 * kPackElements<T>);
  constexpr bool kApart = kLoaders < kThreads;  // whether a thread loads one operand
  static_assert(kLoaders == kThreads || 2 * kLoaders == kThreads, "all threads load");
  using Left = Tiles<T, kTile, kTerms, true, kLoaders, kOnlyPacks, kReaders>;
  using Right = Tiles<T, kTerms, kTile, false, kLoaders, kOnlyPacks, kReaders>;
  constexpr uint kTiles = kBuffers * (Left::kSize + Right::kSize);
  alignas(16) threadgroup float all_sums[kTiles * sizeof(T) / sizeof(float)];  // once tiles are not needed
  threadgroup T* const left_tiles = reinterpret_cast<threadgroup T*>(all_sums);
  threadgroup T* const right_tiles = left_tiles + kBuffers * Left::kSize;
  const bool loads_left = !kApart || simdgroup < kLoaders / 32, loads_right = !kApart || !loads_left;
  const uint loader = kApart ? thread_index % kLoaders : thread_index;

  const Job job = job_of<kTile>(p, ends, p.first + group.y);
  if (job.begin_row >= job.end_row) return;
  // Groups of rows are no members of a's and of the result's batch: their rows lie behind one another.
  const uint column = group.x * kTile;
  Left left({a + batch_offset(p, p.a, job.member), p.a.row, p.a.column, p.a_packs != 0},
            {job.begin_row, job.begin_term, job.end_row, job.end_term}, loader);
  Right right({b + batch_offset(p, p.b, job.exists ? job.member : 0), p.b.row, p.b.column, p.b_packs != 0},
              {job.begin_term, column, job.end_term, p.columns}, loader);

  Sums<kDown, 4, kBeside> sums(simdgroup);
  const uint terms = job.exists ? job.end_term - job.begin_term : 0, steps = (terms + kTerms - 1) / kTerms;
  constexpr uint kRight = kApart ? 0 : 1;
  Held<T> next[1 + kRight];
  for (uint step = 0; step <= steps; ++step) {
    // Step 0 loads tiles only, and the last one multiplies only.
    if (kAhead && step < steps) {
      if (loads_left) next[0] = left.load();
      if (loads_right) next[kRight] = right.load();
    }
    if (step > 0) {
      const uint buffer = (step - 1) % kBuffers;
      sums.template add<Left, Right>(left_tiles + buffer * Left::kSize, right_tiles + buffer * Right::kSize);
    }
    if constexpr (kBuffers == 1) threadgroup_barrier(mem_flags::mem_threadgroup);
    if (step < steps) {
      if (!kAhead && loads_left) next[0] = left.load();
      if (!kAhead && loads_right) next[kRight] = right.load();
      if (loads_left) left.store(left_tiles + step % kBuffers * Left::kSize, next[0], step, loader);
      if (loads_right) right.store(right_tiles + step % kBuffers * Right::kSize, next[kRight], step, loader);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  const Epilogue<T> epilogue = {bias, residual + batch_offset(p, p.residual, job.member),
                                result + batch_offset(p, p.result, job.member)};
  const uint to_column = column + thread_index % kTile;
  const uint rows = metal::min(kTile, job.end_row - job.begin_row);
  // So many of a simdgroup's rows of matrices that the sums fit.
  constexpr uint kRoom = kTiles * sizeof(T) / sizeof(float) < 4096 ? 1024 : 4096;
  constexpr uint kPart = kRoom / (8 * kBelow * kTile), kPartRows = 8 * kPart;
  static_assert(kRoom * sizeof(float) <= kTiles * sizeof(T) && kDown % kPart == 0, "the sums fit");
#pragma unroll
  for (uint first = 0; first < kDown; first += kPart) {
    if (first > 0) threadgroup_barrier(mem_flags::mem_threadgroup);
    sums.template store<kPart>(all_sums, kTile, first);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    threadgroup const float* sum = all_sums + thread_index;
    for (uint i = thread_index / kTile; i < kBelow * kPartRows; i += kThreads / kTile, sum += kThreads) {
      const uint row = i / kPartRows * (8 * kDown) + 8 * first + i % kPartRows;
      if (row < rows && to_column < p.columns) epilogue.store(p, job.begin_row + row, to_column, *sum);
    }
  }
}

#define INSTANTIATE(name, T, ...) \
  template [[host_name(name #T)]] [[kernel]] decltype(gemm<T, __VA_ARGS__>) gemm<T, __VA_ARGS__>;
INSTANTIATE("gemm_", float, GEMM_ROWS, 4, 2, GEMM_THREADS)
INSTANTIATE("gemm_", half, GEMM_ROWS, 4, 2, GEMM_THREADS)
INSTANTIATE("gemm_", bfloat, GEMM_ROWS, 4, 2, GEMM_THREADS)
INSTANTIATE("gemm_short_", float, GEMM_ROWS, 4, 1, GEMM_THREADS, GEMM_STEP_BYTES, false, 8)
INSTANTIATE("gemm_short_", half, GEMM_ROWS, 4, 1, GEMM_THREADS, GEMM_SHORT_STEP_BYTES, true, 8)
INSTANTIATE("gemm_short_", bfloat, GEMM_ROWS, 4, 1, GEMM_THREADS, GEMM_SHORT_STEP_BYTES, true, 8)
INSTANTIATE("gemm_large_", half, GEMM_LARGE, 8, 1, GEMM_LARGE_THREADS)
INSTANTIATE("gemm_large_", bfloat, GEMM_LARGE, 8, 1, GEMM_LARGE_THREADS)
