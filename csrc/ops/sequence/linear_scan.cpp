// Linear attention with a gate for each head, by chunks: the part of gated_delta_rule without corrections. Threadgroups
// walk along segments of sequences, so that long ones take no longer than many.
#include "linear_scan.h"

#include "../../gpu/tuning.h"
#include "../common/rows.h"
#include "../normalization/norms.h"

#include <algorithm>

namespace metalcore {
namespace {

// Segments of a sequence. What a segment adds to the state is found first, so that one more costs another walk along
// all, and there are only as many as a GPU needs to be busy.
int64_t segments_of(const Call& call, int64_t groups) {
  const int64_t chunks = ceil_div<int64_t>(call.params.length, DELTA_CHUNK);
  const int64_t wanted = 3 * int64_t{gpu::parallelism(call.q).fill_threadgroups};
  if (groups >= wanted / 2) return 1;
  return std::clamp<int64_t>(wanted / groups, 1, ceil_div<int64_t>(chunks, 8));
}

// Threadgroups that share the heads of a head of q and k, of which each leaves sums.
int64_t shares_of(const Call& call) {
  const DeltaRuleParams& p = call.params;
  const int64_t groups = call.chunks * p.heads, repeats = p.value_heads / p.heads;
  const int64_t wanted = 4 * int64_t{gpu::parallelism(call.q).fill_threadgroups};
  return std::clamp<int64_t>(ceil_div<int64_t>(wanted, groups), 1, std::min<int64_t>(repeats, 16));
}

}  // namespace

bool is_wide(const Tensor& x) {
  bool all = aligned16(x, 0, x.size(3));
  for (int64_t d = 0; d < 3; ++d) all = all && (x.size(d) == 1 || aligned16(x, x.stride(d), 0));
  return all;
}

bool scans(const Call& call) {
  const DeltaRuleParams& p = call.params;
  return !p.corrects && !p.by_channel && !p.normalized && p.keys <= DELTA_SCAN_KEYS && p.length >= DELTA_CHUNK;
}

LinearScan::LinearScan(const Call& call, bool for_derivative)
    : call_(call), params_(call.params), blocks_(ceil_div<int64_t>(call.params.values, DELTA_SCAN_VALUES)) {
  params_.wide = params_.wide && is_wide(call.v);
  const int64_t walks = blocks_ * params_.value_heads * params_.sequences;
  params_.segments = grid_side(segments_of(call, walks));
  params_.shares = grid_side(for_derivative ? shares_of(call) : 1);
  const auto scratch = [&](int64_t size) { return new_tensor({size}, ScalarType::Float, call.q); };
  const int64_t score = int64_t{DELTA_CHUNK} * DELTA_CHUNK, state = int64_t{DELTA_SCAN_KEYS} * DELTA_SCAN_VALUES;
  scores_ = scratch(call.chunks * params_.heads * score);
  factors_ = scratch(call.chunks * params_.value_heads * 3 * DELTA_CHUNK);
  const int64_t segments = params_.segments > 1 ? params_.segments : 0;
  added_ = scratch(walks * segments * state);
  decays_ = scratch(int64_t{params_.sequences} * segments * params_.value_heads);
  if (!for_derivative) return;
  const int64_t positions = int64_t{params_.batch} * params_.length * params_.value_heads;
  const int64_t places = call.chunks * params_.value_heads * blocks_;
  reads_ = scratch(blocks_ * positions);
  carries_ = scratch(blocks_ * positions);
  const int64_t steps = places * (DELTA_CHUNK / DELTA_SCAN_STEP);
  overlaps_ = scratch(steps * (DELTA_THREADS / 32));
  states_ = scratch(steps * state);
  state_grads_ = scratch(places * state);
  pairs_ = scratch(call.chunks * params_.heads * params_.shares * score);
  parts_ = scratch(params_.shares > 1 ? params_.shares * call.q.numel() : 0);
  if (call.ends && params_.shares > 1) torch::stable::zero_(*parts_);  // what positions have that belong to no sequence
}

void LinearScan::record_prepare(gpu::Recording& recording) const {
  recording.kernel("linear_scan_prepare_", suffix(call_.q.scalar_type()));
  recording.buffer(0, call_.q).buffer(1, call_.k).buffer(2, call_.g).buffer(3, call_.beta).buffer(4, call_.ends);
  recording.buffer(5, scores_).buffer(6, factors_).bytes(7, params_);
  recording.dispatch_threadgroups({grid_side(call_.chunks * params_.heads)}, {DELTA_THREADS});
}

void LinearScan::record_walk(gpu::Recording& recording, const Tensor& values, const Walk& walk) const {
  recording.kernel("linear_scan_walk_", walk.name, suffix(call_.q.scalar_type()));
  recording.buffer(0, walk.back ? call_.k : call_.q).buffer(1, walk.back ? call_.q : call_.k).buffer(2, values);
  recording.buffer(3, walk.others).buffer(4, call_.ends).buffer(5, scores_).buffer(6, factors_).buffer(7, walk.state);
  recording.buffer(8, call_.skip).buffer(9, added_).buffer(10, decays_).buffer(11, walk.out);
  recording.buffer(12, walk.final_state).buffer(13, walk.dots).buffer(14, walk.kept).buffer(15, walk.states);
  recording.buffer(16, overlaps_).bytes(17, params_);
  const int64_t groups = blocks_ * params_.value_heads * params_.segments * params_.sequences;
  recording.dispatch_threadgroups({grid_side(groups)}, {DELTA_THREADS});
}

void LinearScan::record(gpu::Recording& recording, const Tensor& out, const Tensor& final_state) const {
  record_prepare(recording);
  if (params_.segments > 1) record_walk(recording, call_.v, {.name = "added_"});
  record_walk(recording, call_.v, {.name = "results_", .state = call_.state, .out = out, .final_state = final_state});
}

void LinearScan::record_backward(gpu::Recording& recording, const Tensor& grad, const MaybeTensor& grad_state,
                                 const Gradients& found) const {
  const char* type = suffix(call_.q.scalar_type());
  record_prepare(recording);
  if (params_.segments > 1) record_walk(recording, call_.v, {.name = "added_"});
  record_walk(recording, call_.v,
              {.name = "derivative_", .others = grad, .state = call_.state, .dots = reads_, .kept = states_});
  if (params_.segments > 1) record_walk(recording, grad, {.name = "back_added_", .back = true});
  record_walk(recording, grad,
              {.name = "back_derivative_",
               .back = true,
               .others = call_.v,
               .state = grad_state,
               .out = found.v,
               .final_state = found.state,
               .dots = carries_,
               .kept = state_grads_,
               .states = states_});

  const int64_t places = call_.chunks * params_.heads;
  recording.kernel("linear_scan_pairs_", type);
  recording.buffer(0, grad).buffer(1, call_.v).buffer(2, call_.ends).buffer(3, scores_).buffer(4, factors_);
  recording.buffer(5, reads_).buffer(6, carries_).buffer(7, overlaps_).buffer(8, pairs_).buffer(9, found.g);
  recording.buffer(10, found.weights).bytes(11, params_);
  recording.dispatch_threadgroups({grid_side(places * params_.shares)}, {DELTA_THREADS});

  const uint32_t groups = grid_side(places * ceil_div<int64_t>(params_.keys, 64) * params_.shares);
  for (const bool of_keys : {false, true}) {
    recording.kernel(of_keys ? "linear_scan_keys_" : "linear_scan_queries_", type);
    recording.buffer(0, of_keys ? call_.v : grad).buffer(1, of_keys ? call_.q : call_.k).buffer(2, call_.ends);
    recording.buffer(3, factors_).buffer(4, of_keys ? state_grads_ : states_).buffer(5, pairs_);
    const Tensor& out = of_keys ? found.k : found.q;
    recording.buffer(6, out).buffer(7, parts_).bytes(8, params_);
    recording.dispatch_threadgroups({groups}, {DELTA_THREADS});
    if (params_.shares > 1) record_column_sums(recording, *parts_, params_.shares, out);
  }
}

SkipGradient::SkipGradient(const Call& call, const Tensor& grad) : call_(call), params_(call.params) {
  params_.wide = is_wide(call.v) && is_wide(grad);
  const int64_t groups = ceil_div<int64_t>(params_.values, DELTA_SCAN_VALUES) * params_.value_heads;
  const int64_t wanted = 4 * int64_t{gpu::parallelism(call.q).fill_threadgroups};
  params_.shares = grid_side(std::clamp<int64_t>(wanted / groups, 1, ceil_div<int64_t>(params_.length, DELTA_CHUNK)));
  parts_ = new_tensor({params_.shares, params_.value_heads, params_.values}, ScalarType::Float, call.q);
}

void SkipGradient::record(gpu::Recording& recording, const Tensor& grad, const Tensor& found) const {
  const int64_t groups = ceil_div<int64_t>(params_.values, DELTA_SCAN_VALUES) * params_.value_heads * params_.shares;
  recording.kernel("linear_scan_skip_", suffix(call_.q.scalar_type()));
  recording.buffer(0, grad).buffer(1, call_.v).buffer(2, parts_).bytes(3, params_);
  recording.dispatch_threadgroups({grid_side(groups)}, {DELTA_THREADS});
  recording.kernel("linear_scan_skip_sums");
  recording.buffer(0, parts_).buffer(1, found).bytes(2, params_);
  recording.dispatch_threads({params_.value_heads * params_.values}, {DELTA_THREADS});
}

}  // namespace metalcore
