// Selection from rows of logits, and sampling, for C.
#include "../ops/sampling/sampling.h"
#include "call.h"

#include "../../kernels/sampling/top_k.h"

#include <cmath>

namespace metalcore::c_api {
namespace {

template <typename T>
void topk(Call& call, const T* in, T* values, int64_t* indices, int batch, int vocab, int k) {
  call.require(k >= 0 && k <= vocab && k <= TOP_K_LONG_MOST, "k", "must be from 0 to vocab, and at most ",
               TOP_K_LONG_MOST);
  const Tensor x = call.input("in", in, {{"batch", batch}, {"vocab", vocab}});
  const Tensor largest = call.output("values", values, {{"batch", batch}, {"k", k}});
  const Tensor places = call.output("indices", indices, {{"batch", batch}, {"k", k}});
  topk_into(largest, places, x, true);
}

template <typename T>
void top_k_mask(Call& call, const T* in, T* out, int batch, int vocab, int k) {
  constexpr int kMost = 1 << 24;  // the kernel reads it as float32
  call.require(k > 0 && k <= kMost, "k", "must be from 1 to ", kMost);
  const Tensor x = call.input("in", in, {{"batch", batch}, {"vocab", vocab}});
  const Tensor y = call.output("out", out, {{"batch", batch}, {"vocab", vocab}});
  renorm_into(y, x, call.filled({{"batch", batch}}, static_cast<float>(k)), RENORM_MASK_TOP_K);
}

template <typename T>
void sample(Call& call, const T* logits, const float* uniform, int64_t* out, int batch, int vocab, float temperature,
            int top_k, float top_p) {
  call.require(temperature >= 0 && std::isfinite(temperature), "temperature", "must be finite and not negative");
  call.require(top_k >= 0, "top_k", "must not be negative");
  call.require(top_p > 0 && top_p <= 1, "top_p", "must be above 0 and at most 1");
  const Tensor x = call.input("logits", logits, {{"batch", batch}, {"vocab", vocab}});
  const Tensor numbers = call.input("uniform", uniform, {{"batch", batch}});
  const Tensor classes = call.output("out", out, {{"batch", batch}});
  if (batch == 0) return;
  call.require_positive({"vocab", vocab});
  sample_into(classes, x, numbers, temperature, top_k, top_p, 0);
}

}  // namespace
}  // namespace metalcore::c_api

using namespace metalcore::c_api;

int metalcore_topk_float(const float* in, float* values, int64_t* indices, int batch, int vocab, int k) {
  return call(__func__, [&](Call& call) { topk(call, in, values, indices, batch, vocab, k); });
}

int metalcore_topk_bfloat16(const metalcore_bfloat16* in, metalcore_bfloat16* values, int64_t* indices, int batch,
                            int vocab, int k) {
  return call(__func__, [&](Call& call) { topk(call, in, values, indices, batch, vocab, k); });
}

int metalcore_top_k_mask_logits_float(const float* in, float* out, int batch, int vocab, int k) {
  return call(__func__, [&](Call& call) { top_k_mask(call, in, out, batch, vocab, k); });
}

int metalcore_top_k_mask_logits_bfloat16(const metalcore_bfloat16* in, metalcore_bfloat16* out, int batch, int vocab,
                                         int k) {
  return call(__func__, [&](Call& call) { top_k_mask(call, in, out, batch, vocab, k); });
}

int metalcore_sample_float(const float* logits, const float* uniform, int64_t* out, int batch, int vocab,
                           float temperature, int top_k, float top_p) {
  return call(__func__,
              [&](Call& call) { sample(call, logits, uniform, out, batch, vocab, temperature, top_k, top_p); });
}

int metalcore_sample_bfloat16(const metalcore_bfloat16* logits, const float* uniform, int64_t* out, int batch,
                              int vocab, float temperature, int top_k, float top_p) {
  return call(__func__,
              [&](Call& call) { sample(call, logits, uniform, out, batch, vocab, temperature, top_k, top_p); });
}
