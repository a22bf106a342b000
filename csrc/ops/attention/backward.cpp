// attention_backward(grad, grad_lse, q, k, v, …) returns the gradients of q, k and v, and for each query the sum over
// the keys of weights times their gradients. It takes two dispatches: the first has a block of queries in each
// threadgroup, and the second a block of keys, so that no sums are made in memory. Where threads have few registers,
// gradients of long keys and those of values take a dispatch each. Units that multiply tensors take calls of 16 bits.
#include "call.h"

#include <tuple>

namespace metalcore {
namespace {

using attention::Call;

// Numbers for each query, as lse is.
Tensor numbers(const char* name, const Tensor& tensor, const Tensor& q) {
  check_same_device("attention_backward", name, tensor, q);
  const int64_t shape[3] = {q.size(0), q.size(1), q.size(2)};
  check(tensor.scalar_type() == ScalarType::Float && tensor.dim() == 3 && tensor.size(0) == shape[0] &&
            tensor.size(1) == shape[1] && tensor.size(2) == shape[2],
        "metalcore::attention_backward: ", name, " must be float32 of shape ", shape_text(Sizes(shape, 3)));
  return as_contiguous(tensor);
}

// The head size of the kernels for units that take the call, or 0. Their tensors have strides of 32 bits.
uint32_t gradient_unit_size(const Call& call, const Tensor& out, const Tensor& d_out) {
  const uint32_t size = call.params.softcap > 0.0f ? 0 : attention::unit_size(call);
  return size <= ATTENTION_UNIT_MOST_GRADIENTS && std::max(out.stride(2), d_out.stride(2)) <= INT32_MAX ? size : 0;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& grad, const MaybeTensor& grad_lse, const Tensor& q, const Tensor& k, const Tensor& v,
    const Tensor& out, const Tensor& sums_, const Tensor& rests_, const MaybeTensor& mask, const MaybeTensor& sinks,
    const MaybeTensor& cu_seq_q, const MaybeTensor& cu_seq_k, const MaybeTensor& seed, int64_t max_q, int64_t max_k,
    int64_t left, int64_t right, bool lower_right, double scale, double softcap, double dropout) {
  const char* op = "attention_backward";
  const Call call = attention::call_of(op, {q, k, v, mask, sinks, cu_seq_q, cu_seq_k, seed, max_q, max_k, left, right,
                                            lower_right, scale, softcap, dropout});
  attention::check_size("attention_backward", call);
  for (const auto& [name, tensor] : {std::pair{"grad", &grad}, std::pair{"out", &out}}) {
    check_same_device(op, name, *tensor, q);
    check_same_dtype(op, name, *tensor, q);
    check(tensor->dim() == 4 && tensor->size(0) == q.size(0) && tensor->size(1) == q.size(1) &&
              tensor->size(2) == q.size(2) && tensor->size(3) == v.size(3),
          "metalcore::", op, ": ", name, " must have q's batch, heads and length and v's size");
  }
  const Tensor d_out = attention::with_dense_rows(grad), results = attention::with_dense_rows(out);
  check_same_device(op, "sums", sums_, q);
  check(sums_.scalar_type() == ScalarType::Float && sums_.numel() == 2 * call.params.numbers, "metalcore::", op,
        ": sums must be 2 float32 numbers for each query");
  const Tensor sums = as_contiguous(sums_);
  const MaybeTensor d_lse = grad_lse ? MaybeTensor(numbers("grad_lse", *grad_lse, q)) : std::nullopt;
  const bool has_rests = q.element_size() == 2;
  if (has_rests) {
    check_same_device(op, "rests", rests_, q);
    check_same_dtype(op, "rests", rests_, q);
    check_same_shape(op, "rests", rests_, out);
  }
  const MaybeTensor rests = has_rests ? MaybeTensor(attention::with_dense_rows(rests_)) : std::nullopt;
  Tensor dq = attention::new_like_heads(q, q.size(3)), dk = attention::new_like_heads(k, k.size(3)),
         dv = attention::new_like_heads(v, v.size(3)),
         delta = new_tensor({q.size(0), q.size(1), q.size(2)}, ScalarType::Float, q);
  const int64_t bytes = q.element_size(), size = call.size;
  const attention::AttentionTuning& tuning = attention::attention_tuning(q);
  const uint32_t unit_size = gradient_unit_size(call, results, d_out), kernel_size = unit_size ? unit_size : call.size;
  const bool narrow_dq = !unit_size && tuning.narrow_dq, narrow_dkv = !unit_size && tuning.narrow_dkv;
  const int64_t narrow_rows = ATTENTION_NARROW_BOTH_ROWS(size, bytes);
  const int64_t q_rows = unit_size   ? ATTENTION_UNIT_ROWS(unit_size)
                         : narrow_dq ? narrow_rows
                                     : ATTENTION_DQ_ROWS(size, bytes);
  const int64_t k_rows = unit_size    ? ATTENTION_UNIT_ROWS(unit_size)
                         : narrow_dkv ? narrow_rows
                                      : ATTENTION_DKV_ROWS(size, bytes);
  const bool split = narrow_dkv && size >= ATTENTION_NARROW_SPLIT;
  const char* variant = unit_size ? "unit_flash" : narrow_dq || narrow_dkv ? "narrow_flash" : "flash";
  gpu::note_plan(op, variant, [&] {
    return std::to_string(q_rows) + " queries" + attention::kind_text(call, narrow_dq) + ", then " +
           std::to_string(k_rows) + " keys" + attention::kind_text(call, narrow_dkv) + " for a threadgroup" +
           (split ? ", once for the gradient of keys and once for that of values, " : ", ") +
           attention::size_text(call, kernel_size);
  });
  const bool nothing = out.numel() == 0 || call.batches == 0;
  if (call.params.variable || nothing)  // rows of no sequence
    for (Tensor* tensor : {&dq, &dk, &dv, &delta}) torch::stable::zero_(*tensor);
  if (nothing) return {dq, dk, dv, delta};

  AttentionParams params = call.params;
  const bool variable = params.variable;
  params.out = attention::strides_of(results, variable);
  if (rests) params.rests = attention::strides_of(*rests, variable);
  params.d_out = attention::strides_of(d_out, variable);
  params.dq = attention::strides_of(dq, variable);
  params.dk = attention::strides_of(dk, variable);
  params.dv = attention::strides_of(dv, variable);
  params.has_lse_gradient = grad_lse.has_value();
  params.vectors = params.vectors && attention::has_vectors(results, v.size(3)) &&
                   (!rests || attention::has_vectors(*rests, v.size(3))) && attention::has_vectors(d_out, v.size(3));
  const auto blocks = [&](int64_t length, int64_t rows) {
    params.blocks = grid_side(ceil_div(length, rows));
    return ceil_div(length, rows) * call.batches;
  };
  const auto threads = [&](bool narrow, int64_t rows) {
    return static_cast<uint32_t>(unit_size ? ATTENTION_UNIT_THREADS(unit_size)
                                           : 32 * (narrow ? rows / 8 : ATTENTION_SIMDS));
  };
  // Products of queries and keys: three for the gradient of queries, and four for that of keys and values, which take
  // three and two by themselves.
  const double product = 2.0 * std::max(params.head_size, params.value_size);
  const auto name = [&](gpu::Recording& recording, const char* stem, bool narrow) {
    const std::string kind = unit_size ? attention::unit_kind_of(call) : attention::kind_of(call, narrow);
    recording.kernel(stem, kind, std::to_string(kernel_size), "_", suffix(q.scalar_type()));
    recording.buffer(0, call.q).buffer(1, call.k).buffer(2, call.v).buffer(3, call.mask);
    recording.buffer(4, call.cu_seq_q).buffer(5, call.cu_seq_k);
    if (!unit_size) recording.buffer(6, call.seed);
  };
  gpu::record(dq, [&](gpu::Recording& recording) {
    const int64_t q_groups = blocks(call.longest_q, q_rows) * call.heads;
    attention::record_blocks(recording, params, q_groups, 3 * product * q_rows * call.longest_k, 14,
                             threads(narrow_dq, q_rows), [&] {
                               name(recording, "attention_dq_", narrow_dq);
                               recording.buffer(7, results).buffer(8, sums).buffer(9, d_out).buffer(10, d_lse);
                               recording.buffer(11, dq).buffer(12, delta).buffer(13, rests);
                             });
    const int64_t k_groups = blocks(call.longest_k, k_rows) * call.k_heads;
    const auto keys = [&](const char* stem, double products) {
      const double flops = products * product * k_rows * call.longest_q * params.group;
      attention::record_blocks(recording, params, k_groups, flops, 12, threads(narrow_dkv, k_rows), [&] {
        name(recording, stem, narrow_dkv);
        recording.buffer(7, sums).buffer(8, delta).buffer(9, d_out).buffer(10, dk).buffer(11, dv);
      });
    };
    if (!split) return keys("attention_dkv_", 4);
    keys("attention_dk_", 3);
    keys("attention_dv_", 2);
  });
  return {dq, dk, dv, delta};
}

}  // namespace
}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) {
  m.def(
      "attention_backward(Tensor grad, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor sums, Tensor "
      "rests, "
      "Tensor? mask, Tensor? sinks, Tensor? cu_seq_q, Tensor? cu_seq_k, Tensor? seed, int max_q, int max_k, int left, "
      "int right, bool lower_right, float scale, float softcap, float dropout) -> (Tensor, Tensor, Tensor, Tensor)");
}

METALCORE_KERNELS(m) { m.impl<&metalcore::attention_backward>("attention_backward"); }
