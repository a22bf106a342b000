// What makes vectors of tokens, and tokens of logits, for C: embedding, rope, topk, renorm, sample.
#include "../../kernels/sampling/sampling.h"
#include "../ops/embeddings/embedding.h"
#include "../ops/rotary/rope.h"
#include "../ops/sampling/sampling.h"
#include "call.h"

#include <cmath>
#include <optional>

namespace metalcore::c_api {
namespace {

template <typename T>
struct RopeArguments {
  const T *q, *k;
  const float *cosine, *sine;
  const int64_t* positions;
  T *q_out, *k_out;
  int tokens, q_heads, k_heads, head_size, pairs, table_rows, interleaved;
};

template <typename T>
void rope(Call& call, const RopeArguments<T>& a) {
  call.require_positive({"head_size", a.head_size});
  call.require_positive({"pairs", a.pairs});
  call.require(2 * int64_t{a.pairs} <= a.head_size, "pairs", "must be at most half of head_size");
  const bool in_place = a.q && a.q_out == a.q;
  call.require((a.k && a.k_out == a.k) == in_place || a.k_heads == 0, "k_out",
               "must be k where q_out is q, and only there");
  const Size one{"1", 1}, tokens{"tokens", a.tokens}, size{"head_size", a.head_size};
  const Size q_heads{"q_heads", a.q_heads}, k_heads{"k_heads", a.k_heads};
  const Size rows{"table_rows", a.table_rows}, pairs{"pairs", a.pairs};
  const Tensor cosine = call.input("cosine", a.cosine, {rows, pairs}), sine = call.input("sine", a.sine, {rows, pairs});
  const Tensor positions = call.input("positions", a.positions, {one, one, tokens});
  const bool has_k = a.k_heads != 0;
  const Rotation rotation{2, 2 * int64_t{a.pairs}, a.interleaved != 0, 0, 0, false};
  if (in_place) {
    const Tensor q = call.updated("q", a.q_out, {one, tokens, q_heads, size});
    const MaybeTensor k = has_k ? MaybeTensor(call.updated("k", a.k_out, {one, tokens, k_heads, size})) : std::nullopt;
    return rotate("rope_", q, k, q, k, cosine, sine, positions, rotation, true);
  }
  const Tensor q = call.input("q", a.q, {one, tokens, q_heads, size});
  const MaybeTensor k = has_k ? MaybeTensor(call.input("k", a.k, {one, tokens, k_heads, size})) : std::nullopt;
  const Tensor q_out = call.output("q_out", a.q_out, {one, tokens, q_heads, size});
  const MaybeTensor k_out =
      has_k ? MaybeTensor(call.output("k_out", a.k_out, {one, tokens, k_heads, size})) : std::nullopt;
  rotate("rope", q, k, q_out, k_out, cosine, sine, positions, rotation, false);
}

template <typename T>
void embedding(Call& call, const T* table, const int32_t* indices, T* out, int table_rows, int width, int count) {
  const Tensor rows = call.input("table", table, {{"table_rows", table_rows}, {"width", width}});
  const Tensor wanted = call.input("indices", indices, {{"count", count}});
  const Tensor result = call.output("out", out, {{"count", count}, {"width", width}});
  embedding_into(result, rows, wanted);
}

}  // namespace
}  // namespace metalcore::c_api

using namespace metalcore::c_api;

int metalcore_rope_float(const float* q, const float* k, const float* cosine, const float* sine,
                         const int64_t* positions, float* q_out, float* k_out, int tokens, int q_heads, int k_heads,
                         int head_size, int pairs, int table_rows, int interleaved) {
  return call(__func__, [&](Call& call) {
    rope<float>(call, {q, k, cosine, sine, positions, q_out, k_out, tokens, q_heads, k_heads, head_size, pairs,
                       table_rows, interleaved});
  });
}

int metalcore_rope_bfloat16(const metalcore_bfloat16* q, const metalcore_bfloat16* k, const float* cosine,
                            const float* sine, const int64_t* positions, metalcore_bfloat16* q_out,
                            metalcore_bfloat16* k_out, int tokens, int q_heads, int k_heads, int head_size, int pairs,
                            int table_rows, int interleaved) {
  return call(__func__, [&](Call& call) {
    rope<metalcore_bfloat16>(call, {q, k, cosine, sine, positions, q_out, k_out, tokens, q_heads, k_heads, head_size,
                                    pairs, table_rows, interleaved});
  });
}

int metalcore_embedding_float(const float* table, const int32_t* indices, float* out, int table_rows, int width,
                              int count) {
  return call(__func__, [&](Call& call) { embedding(call, table, indices, out, table_rows, width, count); });
}

int metalcore_embedding_bfloat16(const metalcore_bfloat16* table, const int32_t* indices, metalcore_bfloat16* out,
                                 int table_rows, int width, int count) {
  return call(__func__, [&](Call& call) { embedding(call, table, indices, out, table_rows, width, count); });
}

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
