// rms_norm and add_rms_norm for C.
#include "call.h"

#include "../ops/normalization/norms.h"

#include <cmath>
#include <optional>

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
