// softmax and silu_and_mul for C.
#include "call.h"

#include "../ops/activation/gated.h"
#include "../ops/activation/softmax.h"

#include <cmath>
#include <string>

namespace metalcore::c_api {
namespace {

template <typename T>
void softmax(Call& call, const T* in, T* out, int batch, int vocab, float temperature) {
  call.require(temperature > 0 && std::isfinite(1 / temperature), "temperature", "must be positive and finite");
  const Tensor x = call.input("in", in, {{"batch", batch}, {"vocab", vocab}});
  const Tensor y = call.output("out", out, {{"batch", batch}, {"vocab", vocab}});
  softmax_into(y, x, 1.0 / static_cast<double>(temperature));
}

template <typename T>
void silu_and_mul(Call& call, const T* in, T* out, int rows, int width) {
  const Tensor x = call.input("in", in, {{"rows", rows}, {"width", 2 * int64_t{width}}});
  const Tensor y = call.output("out", out, {{"rows", rows}, {"width", width}});
  static const std::string activation = "silu";
  gated_packed_into(y, x, activation);
}

}  // namespace
}  // namespace metalcore::c_api

using namespace metalcore::c_api;

int metalcore_softmax_float(const float* in, float* out, int batch, int vocab, float temperature) {
  return call(__func__, [&](Call& call) { softmax(call, in, out, batch, vocab, temperature); });
}

int metalcore_softmax_bfloat16(const metalcore_bfloat16* in, metalcore_bfloat16* out, int batch, int vocab,
                               float temperature) {
  return call(__func__, [&](Call& call) { softmax(call, in, out, batch, vocab, temperature); });
}

int metalcore_silu_and_mul_float(const float* in, float* out, int rows, int width) {
  return call(__func__, [&](Call& call) { silu_and_mul(call, in, out, rows, width); });
}

int metalcore_silu_and_mul_bfloat16(const metalcore_bfloat16* in, metalcore_bfloat16* out, int rows, int width) {
  return call(__func__, [&](Call& call) { silu_and_mul(call, in, out, rows, width); });
}
