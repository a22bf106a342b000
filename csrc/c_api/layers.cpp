// The functions of layers for C, except attention and products: softmax, silu_and_mul, sums, conversions, rms_norm.
#include "../ops/activation/activation.h"
#include "../ops/elementwise/add_cast.h"
#include "../ops/normalization/norms.h"
#include "call.h"

#include <cmath>
#include <optional>
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

namespace metalcore::c_api {
namespace {

template <typename T>
void add(Call& call, const T* in, const T* residual, T* out, int count) {
  const Tensor x = call.input("in", in, {{"count", count}}), y = call.input("residual", residual, {{"count", count}});
  const bool in_place = out && (out == in || out == residual);
  add_into(in_place ? call.in_place("out", out, {{"count", count}}) : call.output("out", out, {{"count", count}}), x,
           y);
}

template <typename From, typename To>
void cast(Call& call, const From* in, To* out, int count) {
  const Tensor x = call.input("in", in, {{"count", count}});
  cast_into(call.output("out", out, {{"count", count}}), x);
}

}  // namespace
}  // namespace metalcore::c_api

using namespace metalcore::c_api;

int metalcore_add_float(const float* in, const float* residual, float* out, int count) {
  return call(__func__, [&](Call& call) { add(call, in, residual, out, count); });
}

int metalcore_add_bfloat16(const metalcore_bfloat16* in, const metalcore_bfloat16* residual, metalcore_bfloat16* out,
                           int count) {
  return call(__func__, [&](Call& call) { add(call, in, residual, out, count); });
}

int metalcore_cast_float_to_bfloat16(const float* in, metalcore_bfloat16* out, int count) {
  return call(__func__, [&](Call& call) { cast(call, in, out, count); });
}

int metalcore_cast_bfloat16_to_float(const metalcore_bfloat16* in, float* out, int count) {
  return call(__func__, [&](Call& call) { cast(call, in, out, count); });
}

namespace metalcore::c_api {
namespace {

template <typename T>
MaybeTensor weight_of(Call& call, const T* weight, int width) {
  return weight ? MaybeTensor(call.input("weight", weight, {{"width", width}})) : std::nullopt;
}

void check_eps(const Call& call, float eps) {
  call.require(eps >= 0 && std::isfinite(eps), "eps", "must be finite and not negative");
}

template <typename T>
void rms_norm(Call& call, const T* in, const T* weight, T* out, int rows, int width, float eps) {
  check_eps(call, eps);
  const Tensor x = call.input("in", in, {{"rows", rows}, {"width", width}});
  const MaybeTensor scale = weight_of(call, weight, width);
  const Tensor y = call.output("out", out, {{"rows", rows}, {"width", width}});
  rms_norm_into(y, x, scale, eps);
}

template <typename T>
void add_rms_norm(Call& call, const T* in, const T* residual, const T* weight, T* out, T* sum, int rows, int width,
                  float eps) {
  check_eps(call, eps);
  const Tensor x = call.input("in", in, {{"rows", rows}, {"width", width}});
  const Tensor added = call.input("residual", residual, {{"rows", rows}, {"width", width}});
  const MaybeTensor scale = weight_of(call, weight, width);
  const Tensor y = call.output("out", out, {{"rows", rows}, {"width", width}});
  const Tensor total = call.output("sum", sum, {{"rows", rows}, {"width", width}});
  add_rms_norm_into(y, total, x, added, scale, eps);
}

}  // namespace
}  // namespace metalcore::c_api

using namespace metalcore::c_api;

int metalcore_rms_norm_float(const float* in, const float* weight, float* out, int rows, int width, float eps) {
  return call(__func__, [&](Call& call) { rms_norm(call, in, weight, out, rows, width, eps); });
}

int metalcore_rms_norm_bfloat16(const metalcore_bfloat16* in, const metalcore_bfloat16* weight, metalcore_bfloat16* out,
                                int rows, int width, float eps) {
  return call(__func__, [&](Call& call) { rms_norm(call, in, weight, out, rows, width, eps); });
}

int metalcore_add_rms_norm_float(const float* in, const float* residual, const float* weight, float* out, float* sum,
                                 int rows, int width, float eps) {
  return call(__func__, [&](Call& call) { add_rms_norm(call, in, residual, weight, out, sum, rows, width, eps); });
}

int metalcore_add_rms_norm_bfloat16(const metalcore_bfloat16* in, const metalcore_bfloat16* residual,
                                    const metalcore_bfloat16* weight, metalcore_bfloat16* out, metalcore_bfloat16* sum,
                                    int rows, int width, float eps) {
  return call(__func__, [&](Call& call) { add_rms_norm(call, in, residual, weight, out, sum, rows, width, eps); });
}
