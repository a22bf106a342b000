#include "jacobi.h"

#include "../../../kernels/linalg/spectral.h"

#include "../../gpu/cost.h"

#include <algorithm>
#include <limits>

namespace metalcore {

JacobiBlockedPlan plan_jacobi_blocked(int64_t columns, int64_t rows, int64_t batch, bool accumulate,
                                      const Tensor& like) {
  const JacobiTuning& tuning = jacobi_tuning(like);
  const uint32_t gram_rows = round_up<uint32_t>(grid_side(rows), 4);
  const bool wide = columns >= tuning.wide_columns;
  const uint32_t block = wide ? JACOBI_WIDE : JACOBI_BLOCK;
  const uint32_t blocks = round_up<uint32_t>(grid_side(ceil_div<int64_t>(columns, block)), 2);
  JacobiBlockedPlan plan{.padded = blocks * block,
                         .gram_rows = gram_rows,
                         .length = gram_rows + (accumulate ? round_up<uint32_t>(grid_side(columns), 4) : 0),
                         .pairs = blocks / 2,
                         .rounds = blocks - 1,
                         .sweeps = tuning.sweeps,
                         .splits = 1,
                         .wide = wide};
  const int64_t threadgroups = plan.pairs * std::max<int64_t>(batch, 1);
  const int64_t chunks = ceil_div<int64_t>(rows, JACOBI_CHUNK);
  const uint32_t fill = gpu::parallelism(like).fill_threadgroups;
  if (threadgroups < fill) plan.splits = grid_side(std::min<int64_t>(chunks, fill / threadgroups));
  return plan;
}

namespace {

struct Work {
  JacobiBlockedPlan plan;
  JacobiParams params;
  Tensor x, exponents, off, present, parts;
  Tensor norms, lengths, found;  // norms of columns, norms of V's columns, and values in the columns' order
  // Wide blocks: for each pair the Gram matrix, the product of all rotations, those of a round, and what it found.
  Tensor gram, product, rotation, state;
};

Work work_for(const Tensor& a, int64_t batch, int64_t columns, int64_t rows, bool accumulate) {
  const JacobiBlockedPlan plan = plan_jacobi_blocked(columns, rows, batch, accumulate, a);
  const float epsilon = std::numeric_limits<float>::epsilon();
  const JacobiParams params{.matrices = grid_side(batch),
                            .columns = grid_side(columns),
                            .rows = grid_side(rows),
                            .padded = plan.padded,
                            .gram_rows = plan.gram_rows,
                            .length = plan.length,
                            .sweeps = plan.sweeps,
                            .splits = plan.splits,
                            .tolerance = 3.0f * epsilon};
  const Tensor norms = new_tensor({batch, plan.padded}, ScalarType::Float, a);
  const int64_t pairs = batch * plan.pairs, wide_pairs = plan.wide ? pairs : 0;
  const int64_t gram = plan.wide ? JACOBI_WIDE_PAIR * JACOBI_WIDE_PAIR : JACOBI_PAIR * JACOBI_PAIR;
  const int64_t parts = plan.splits > 1 || plan.wide ? pairs * plan.splits * gram : 0;
  const Tensor wide_gram = new_tensor({wide_pairs * gram}, ScalarType::Float, a);
  return {plan,
          params,
          new_tensor({batch, plan.padded, plan.length}, ScalarType::Float, a),
          new_tensor({batch}, ScalarType::Int, a),
          new_tensor({batch, plan.sweeps}, ScalarType::Int, a),
          new_tensor({batch}, ScalarType::Int, a),
          new_tensor({parts}, ScalarType::Float, a),
          norms,
          new_like(norms),
          new_like(norms),
          wide_gram,
          new_like(wide_gram),
          new_tensor({wide_pairs * JACOBI_WIDE_SLOTS * JACOBI_PAIR * JACOBI_PAIR}, ScalarType::Float, a),
          new_tensor({wide_pairs}, ScalarType::Int, a)};
}

// For a matrix: products of all pairs' columns, their 31 rounds of rotations, and the columns times the rotations.
double gram_flops(const JacobiBlockedPlan& plan) {
  return 2.0 * JACOBI_PAIR * JACOBI_PAIR * plan.gram_rows * plan.pairs;
}
double rotate_flops(const JacobiBlockedPlan& plan) {
  return (2.0 * JACOBI_PAIR * JACOBI_PAIR * plan.length + 31 * 16 * 32 * 28.0) * plan.pairs;
}

void record_round(gpu::Recording& recording, const Work& w, const JacobiRoundParams& given) {
  JacobiRoundParams params = given;
  const double matrix_bytes = 4.0 * w.plan.padded * w.plan.length, gram = gram_flops(w.plan);
  const double rotate = rotate_flops(w.plan);
  const int64_t matrix = int64_t{w.plan.padded} * w.plan.length;
  gpu::in_pieces(recording, w.params.matrices, {gram + rotate, 3 * matrix_bytes}, [&](const gpu::Piece& piece) {
    params.jacobi.matrices = grid_side(piece.count);
    const gpu::Size groups{grid_side(piece.count * w.plan.pairs * w.plan.splits)}, threads{JACOBI_THREADS};
    const auto count = static_cast<double>(piece.count);
    const auto bind = [&](const char* kernel) -> gpu::Recording& {
      recording.kernel(kernel).buffer(0, piece.of(w.x, matrix)).buffer(1, piece.of(w.off, w.plan.sweeps));
      return recording.bytes(2, params);
    };
    if (w.plan.splits == 1) {
      bind("jacobi_round").work(piece.work.flops, piece.work.bytes);
      recording.dispatch_threadgroups(groups, threads);
      return;
    }
    const int64_t parts = int64_t{w.plan.pairs} * w.plan.splits * JACOBI_PAIR * JACOBI_PAIR;
    bind("jacobi_gram").buffer(3, piece.of(w.parts, parts)).work(count * gram, count * matrix_bytes);
    recording.dispatch_threadgroups(groups, threads);
    bind("jacobi_rotate").buffer(3, piece.of(w.parts, parts)).work(count * rotate, count * 2 * matrix_bytes);
    recording.dispatch_threadgroups(groups, threads);
  });
}

// A round of wide blocks.
void record_wide_round(gpu::Recording& recording, const Work& w, const JacobiRoundParams& outer) {
  const JacobiBlockedPlan& plan = w.plan;
  JacobiWideParams params{outer, 0, ceil_div<uint32_t>(plan.length, JACOBI_WIDE_TILE)};
  const int64_t gram = int64_t{JACOBI_WIDE_PAIR} * JACOBI_WIDE_PAIR, matrix = int64_t{plan.padded} * plan.length;
  const int64_t rotations = int64_t{JACOBI_WIDE_SLOTS} * JACOBI_PAIR * JACOBI_PAIR;
  const double each = 2.0 * JACOBI_WIDE_PAIR * JACOBI_WIDE_PAIR * plan.pairs;  // of flops, for each row
  const gpu::Work work{each * plan.length, 8.0 * plan.padded * plan.length};
  gpu::in_pieces(recording, w.params.matrices, work, [&](const gpu::Piece& piece) {
    params.outer.jacobi.matrices = grid_side(piece.count);
    const auto count = static_cast<double>(piece.count);
    const int64_t pairs = piece.count * plan.pairs;
    const auto of_pairs = [&](const Tensor& tensor, int64_t elements) {
      return piece.of(tensor, plan.pairs * elements);
    };
    const gpu::BufferView x = piece.of(w.x, matrix), off = piece.of(w.off, plan.sweeps);
    const gpu::BufferView grams = of_pairs(w.gram, gram), products = of_pairs(w.product, gram);
    const gpu::BufferView rotation = of_pairs(w.rotation, rotations), state = of_pairs(w.state, 1);
    const gpu::BufferView parts = of_pairs(w.parts, gram * plan.splits);
    const auto dispatch = [&](int64_t threadgroups) {
      recording.dispatch_threadgroups({grid_side(threadgroups)}, {JACOBI_THREADS});
    };
    recording.kernel("jacobi_wide_gram").buffer(0, x).buffer(1, off).buffer(2, parts).buffer(3, state);
    recording.bytes(4, params).work(count * each * plan.gram_rows, count * 4 * plan.padded * plan.gram_rows);
    dispatch(pairs * plan.splits);
    recording.kernel("jacobi_wide_sum").buffer(0, parts).buffer(1, off).buffer(2, grams).buffer(3, products);
    recording.buffer(4, state).bytes(5, params);
    dispatch(pairs * JACOBI_WIDE_SLOTS * JACOBI_WIDE_SLOTS);
    for (params.inner = 0; params.inner < JACOBI_WIDE_ROUNDS; ++params.inner) {
      recording.kernel("jacobi_wide_turn").buffer(0, grams).buffer(1, off).buffer(2, rotation).buffer(3, state);
      recording.bytes(4, params);
      dispatch(pairs * JACOBI_WIDE_SLOTS);
      recording.kernel("jacobi_wide_update").buffer(0, grams).buffer(1, off).buffer(2, products).buffer(3, rotation);
      recording.buffer(4, state).bytes(5, params);
      dispatch(pairs * 2 * JACOBI_WIDE_SLOTS * JACOBI_WIDE_SLOTS);
    }
    recording.kernel("jacobi_wide_apply").buffer(0, x).buffer(1, off).buffer(2, products).buffer(3, state);
    recording.bytes(4, params).work(count * work.flops, count * work.bytes);
    dispatch(pairs * params.tiles);
  });
}

void record_rounds(gpu::Recording& recording, const Tensor& a, const Work& w) {
  recording.kernel("jacobi_scale").buffer(0, a).buffer(1, w.exponents).buffer(2, w.off);
  recording.bytes(3, w.params).dispatch_threadgroups({w.params.matrices}, {gpu::kMaxThreads});
  recording.kernel("jacobi_load").buffer(0, a).buffer(1, w.exponents).buffer(2, w.x);
  recording.bytes(3, w.params).dispatch_threadgroups({grid_side(int64_t{w.params.matrices} * w.params.padded)}, {128});
  for (uint32_t sweep = 0; sweep < w.plan.sweeps; ++sweep)
    for (uint32_t round = 0; round < w.plan.rounds; ++round)
      (w.plan.wide ? record_wide_round : record_round)(recording, w, {w.params, sweep, round});
}

void record_results(gpu::Recording& recording, const Work& w, const JacobiResultParams& params, const Tensor& order,
                    const Tensor& scales, const Tensor& values, const MaybeTensor& u, const MaybeTensor& v) {
  const gpu::Size padded_columns{grid_side(int64_t{w.params.matrices} * w.params.padded)};
  const gpu::Size unpadded_columns{grid_side(int64_t{w.params.matrices} * w.params.columns)};
  recording.kernel("jacobi_values").buffer(0, w.x).buffer(1, w.norms).buffer(2, w.found);
  recording.buffer(3, w.lengths).bytes(4, params).dispatch_threadgroups(padded_columns, {gpu::kSimdWidth});
  recording.kernel("jacobi_store").buffer(0, w.x).buffer(1, w.exponents).buffer(2, w.norms).buffer(3, w.found);
  recording.buffer(4, values).buffer(5, u).buffer(6, v);
  recording.buffer(7, w.present).buffer(8, order).buffer(9, w.lengths).bytes(10, params).buffer(11, scales);
  recording.dispatch_threadgroups(unpadded_columns, {JACOBI_THREADS});
}

}  // namespace

void svd_jacobi_blocked(const Tensor& x, int64_t batch, bool compute_uv, const Tensor& order, const Tensor& scales,
                        const Tensor& values, const Tensor& u, const Tensor& v) {
  const int64_t n = x.size(-2), m = x.size(-1);
  const Work w = work_for(x, batch, n, m, compute_uv);
  const JacobiResultParams params{.jacobi = w.params, .accumulated = compute_uv};
  gpu::record(x, [&](gpu::Recording& recording) {
    record_rounds(recording, x, w);
    record_results(recording, w, params, order, scales, values, given_if(compute_uv, u), given_if(compute_uv, v));
    if (!compute_uv) return;
    SvdParams complete{};
    complete.left = {n * m, 1, m};
    complete.matrices = w.params.matrices, complete.rows = w.params.rows, complete.columns = w.params.columns;
    recording.kernel("svd_complete").buffer(0, u).buffer(1, w.present).bytes(2, complete);
    recording.dispatch_threadgroups({w.params.matrices}, {256});
  });
}

}  // namespace metalcore
