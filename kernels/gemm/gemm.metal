// Products of matrices, in tiles: batches with broadcast operands, and groups of rows or of terms (for mixtures of
// experts). A threadgroup loads the next step's tiles of a and b into registers while it multiplies those in
// threadgroup memory, of which there are two of each, so that a step has one barrier.
#include "gemm/epilogue.h"
#include "gemm/tile.h"

// The rows, the terms and the matrices that a threadgroup works with.
struct Job {
  uint begin_row, end_row;
  uint begin_term, end_term;
  uint member;  // of the batch
  bool exists;
};

// Tiles of rows are counted group by group: none has rows of two groups. Behind the last group come the rows that no
// group has, whose results are zero. Ends that are no ends count as the nearest place that is possible.
inline Job job_of(constant GemmParams& p, device const int* ends, uint tile) {
  Job job = {0, p.rows, 0, p.terms, tile / p.row_tiles, true};
  if (p.grouped == GEMM_GROUPED_ROWS) {
    uint begin = 0, group = 0, first = tile;
    for (; group <= p.groups; ++group) {
      const uint end = group < p.groups ? clamp(uint(max(ends[group], 0)), begin, p.rows) : p.rows;
      const uint tiles = (end - begin + GEMM_ROWS - 1) / GEMM_ROWS;
      if (first < tiles) return {begin + first * GEMM_ROWS, end, 0, p.terms, group, group < p.groups};
      first -= tiles;
      begin = end;
    }
    return {p.rows, p.rows, 0, 0, 0, false};
  }
  job.begin_row = tile % p.row_tiles * GEMM_ROWS;
  if (p.grouped == GEMM_GROUPED_TERMS) {
    uint begin = 0;
    for (uint group = 0; group < job.member; ++group) begin = clamp(uint(max(ends[group], 0)), begin, p.terms);
    job.begin_term = begin;
    job.end_term = clamp(uint(max(ends[job.member], 0)), begin, p.terms);
  }
  return job;
}

template <typename T>
[[kernel]] [[max_total_threads_per_threadgroup(GEMM_THREADS)]] void gemm(
    device const T* a [[buffer(0)]], device const T* b [[buffer(1)]], device const T* bias [[buffer(2)]],
    device const T* residual [[buffer(3)]], device const int* ends [[buffer(4)]], device T* result [[buffer(5)]],
    constant GemmParams& p [[buffer(6)]], uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  constexpr uint kStep = GEMM_STEP_BYTES / sizeof(T);
  using Left = Tiles<T, GEMM_ROWS, kStep, true>;
  using Right = Tiles<T, kStep, GEMM_COLUMNS, false>;
  constexpr uint kTiles = 2 * (Left::kSize + Right::kSize);
  threadgroup alignas(16) float all_sums[kTiles * sizeof(T) / sizeof(float)];  // once tiles are not needed
  threadgroup T* const left_tiles = reinterpret_cast<threadgroup T*>(all_sums);
  threadgroup T* const right_tiles = left_tiles + 2 * Left::kSize;
  static_assert(GEMM_ROWS * GEMM_COLUMNS * sizeof(float) <= kTiles * sizeof(T), "the sums fit");

  const Job job = job_of(p, ends, p.first + group.y);
  if (job.begin_row >= job.end_row) return;
  // Groups of rows are no members of a's and of the result's batch: their rows lie behind one another.
  const uint column = group.x * GEMM_COLUMNS;
  Left left({a + batch_offset(p, p.a, job.member), p.a.row, p.a.column, p.a_packs != 0},
            {job.begin_row, job.begin_term, job.end_row, job.end_term}, thread_index);
  Right right({b + batch_offset(p, p.b, job.exists ? job.member : 0), p.b.row, p.b.column, p.b_packs != 0},
              {job.begin_term, column, job.end_term, p.columns}, thread_index);

  Sums sums(simdgroup);
  const uint terms = job.exists ? job.end_term - job.begin_term : 0, steps = (terms + kStep - 1) / kStep;
  Held<T> next_left, next_right;
  for (uint step = 0; step <= steps; ++step) {
    // Step 0 loads tiles only, and the last one multiplies only.
    if (step < steps) {
      next_left = left.load();
      next_right = right.load();
    }
    if (step > 0)
      sums.add<Left, Right>(left_tiles + (step - 1) % 2 * Left::kSize, right_tiles + (step - 1) % 2 * Right::kSize);
    if (step < steps) {
      left.store(left_tiles + step % 2 * Left::kSize, next_left, step, thread_index);
      right.store(right_tiles + step % 2 * Right::kSize, next_right, step, thread_index);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  sums.store(all_sums, GEMM_COLUMNS);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const Epilogue<T> epilogue = {bias, residual + batch_offset(p, p.residual, job.member),
                                result + batch_offset(p, p.result, job.member)};
  const uint to_column = column + thread_index % GEMM_COLUMNS;
  if (to_column >= p.columns) return;
  const uint rows = metal::min(uint(GEMM_ROWS), job.end_row - job.begin_row);
  threadgroup const float* sum = all_sums + thread_index;
  for (uint row = thread_index / GEMM_COLUMNS; row < rows; row += GEMM_THREADS / GEMM_COLUMNS, sum += GEMM_THREADS)
    epilogue.store(p, job.begin_row + row, to_column, *sum);
}

#define INSTANTIATE(T) template [[host_name("gemm_" #T)]] [[kernel]] decltype(gemm<T>) gemm<T>;
INSTANTIATE(float)
INSTANTIATE(half)
INSTANTIATE(bfloat)
