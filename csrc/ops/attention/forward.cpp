// attention(q, k, v, …) returns softmax(scale q kᵀ + mask) v, and the logarithms of the softmax's sums; if it is to be
// differentiable also these sums with more bits, and for 16-bit results what rounding took from them.
// plain_attention(q, k, v, causal, scale) returns the first of these alone.
#include "../../gpu/backend.h"
#include "call.h"
#include "decode.h"

#include <tuple>

namespace metalcore {
namespace {

using attention::Call;

// Few queries and many keys, or heads of sizes that only these kernels have.
bool decodes(const Call& call) {
  const AttentionParams& p = call.params;
  const bool possible = p.dropped == 0 && attention::decode_has_sizes(p.head_size, p.value_size);
  return possible && (call.size == 0 || attention::decode_is_better(call.longest_q, p.group, call.longest_k));
}

attention::DecodeCall decode_call(const Call& call, const Tensor& out, const Tensor& lse, double scale,
                                  double softcap) {
  const AttentionParams& p = call.params;
  const bool variable = p.variable;
  const attention::Dims dims = variable ? attention::Dims{-1, 1, 2} : attention::kHeadsFirst;
  return {
      .q = call.q,
      .k = call.k,
      .v = call.v,
      .out = out,
      .lse = lse,
      .query_dims = dims,
      .key_dims = dims,
      .mask = call.mask,
      .sinks = call.sinks,
      .mask_strides = p.mask,
      .q_indptr = call.cu_seq_q,
      .k_indptr = call.cu_seq_k,
      .batch = call.batches,
      .queries = call.q.size(2),
      .keys = p.k_length,
      .left = p.band.left,
      .right = p.band.right,
      .lower_right = p.band.lower_right != 0,
      .scale = scale,
      .softcap = softcap,
  };
}

std::string why(const Call& call, int64_t rows, bool narrow, uint32_t size) {
  const bool cuda = gpu::Recorder::current()->backend().device_type() == "cuda";
  return std::to_string(rows) + (" queries for a threadgroup" + attention::kind_text(call, narrow)) + ", " +
         attention::size_text(call, size) +
         (cuda ? "; the override leaves PyTorch's function as it is, since PyTorch's kernels are faster on cuda" : "");
}

// Fills the results. There are sums if the call is to be differentiable.
void compute(const Call& call, const Tensor& out, const Tensor& lse, const MaybeTensor& sums, const MaybeTensor& rests,
             double scale, double softcap) {
  if (out.numel() == 0 || call.batches == 0) return;
  if (!sums && decodes(call)) return attention::decode("attention", decode_call(call, out, lse, scale, softcap));
  attention::check_size("attention", call);
  const uint32_t unit_size = attention::unit_size(call), size = unit_size ? unit_size : call.size;
  const bool narrow = !unit_size && attention::attention_tuning(out).narrow_forward;
  const int64_t bytes = out.element_size();
  const int64_t rows = unit_size ? ATTENTION_UNIT_FORWARD_ROWS(unit_size)
                       : narrow  ? ATTENTION_NARROW_ROWS(size, bytes)
                                 : ATTENTION_ROWS(size);
  const int64_t blocks = ceil_div(call.longest_q, rows);
  gpu::note_plan("attention",
                 unit_size ? "unit_flash"
                 : narrow  ? "narrow_flash"
                           : "flash",
                 [&] { return why(call, rows, narrow, size); });
  AttentionParams params = call.params;
  params.out = attention::strides_of(out, params.variable);
  if (rests) params.rests = attention::strides_of(*rests, params.variable);
  params.has_rests = sums.has_value();
  params.blocks = grid_side(blocks);
  const double flops = 2.0 * rows * call.longest_k * (params.head_size + params.value_size);
  const auto threads = static_cast<uint32_t>(unit_size ? ATTENTION_UNIT_FORWARD_THREADS(unit_size)
                                             : narrow  ? 32 * (rows / 8)
                                                       : 32 * ATTENTION_SIMDS);
  const std::string kind = unit_size ? attention::unit_kind_of(call) : attention::kind_of(call, narrow);
  gpu::record(out, [&](gpu::Recording& recording) {
    attention::record_blocks(recording, params, blocks * call.heads * call.batches, flops, 12, threads, [&] {
      recording.kernel("attention_forward_", kind, std::to_string(size), "_", suffix(out.scalar_type()));
      recording.buffer(0, call.q).buffer(1, call.k).buffer(2, call.v).buffer(3, call.mask);
      recording.buffer(4, call.sinks);
      if (!unit_size) recording.buffer(7, call.seed);
      recording.buffer(5, call.cu_seq_q).buffer(6, call.cu_seq_k).buffer(8, out);
      recording.buffer(9, lse).buffer(10, sums).buffer(11, rests);
    });
  });
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_forward(
    const Tensor& q, const Tensor& k, const Tensor& v, const MaybeTensor& mask, const MaybeTensor& sinks,
    const MaybeTensor& cu_seq_q, const MaybeTensor& cu_seq_k, const MaybeTensor& seed, int64_t max_q, int64_t max_k,
    int64_t left, int64_t right, bool lower_right, double scale, double softcap, double dropout, bool differentiable) {
  const Call call = attention::call_of("attention", {q, k, v, mask, sinks, cu_seq_q, cu_seq_k, seed, max_q, max_k, left,
                                                     right, lower_right, scale, softcap, dropout});
  const Tensor out = attention::new_like_heads(q, v.size(3));
  const int64_t shape[3] = {q.size(0), q.size(1), q.size(2)};
  Tensor lse = new_tensor(Sizes(shape, 3), ScalarType::Float, q);
  const int64_t pairs[4] = {2, q.size(0), q.size(1), q.size(2)}, none[1] = {0};
  Tensor sums = new_tensor(differentiable ? Sizes(pairs, 4) : Sizes(none, 1), ScalarType::Float, q);
  const bool has_rests = differentiable && q.element_size() == 2;
  Tensor rests = has_rests ? attention::new_like_heads(q, v.size(3)) : new_tensor(Sizes(none, 1), q.scalar_type(), q);
  if (call.params.variable) {  // rows of no sequence
    torch::stable::zero_(const_cast<Tensor&>(out));
    torch::stable::fill_(lse, -INFINITY);
    if (has_rests) torch::stable::zero_(rests);
  }
  compute(call, out, lse, given_if(differentiable, sums), given_if(has_rests, rests), scale, softcap);
  return {out, lse, sums, rests};
}

// For calls without options that nobody differentiates: each argument and each result costs a small call time.
Tensor plain_attention(const Tensor& q, const Tensor& k, const Tensor& v, bool causal, double scale) {
  const MaybeTensor none;
  const Call call = attention::call_of(
      "plain_attention", {q, k, v, none, none, none, none, none, 0, 0, -1, causal ? 0 : -1, false, scale, 0.0, 0.0});
  const Tensor out = attention::new_like_heads(q, v.size(3));
  compute(call, out, new_tensor({{q.size(0), q.size(1), q.size(2)}}, ScalarType::Float, q), none, none, scale, 0.0);
  return out;
}

}  // namespace
}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) {
  m.def(
      "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? sinks, Tensor? cu_seq_q, Tensor? cu_seq_k, "
      "Tensor? seed, int max_q, int max_k, int left, int right, bool lower_right, float scale, float softcap, "
      "float dropout, bool differentiable) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def("plain_attention(Tensor q, Tensor k, Tensor v, bool causal, float scale) -> Tensor");
}

METALCORE_KERNELS(m) {
  m.impl<&metalcore::attention_forward>("attention");
  m.impl<&metalcore::plain_attention>("plain_attention");
}
