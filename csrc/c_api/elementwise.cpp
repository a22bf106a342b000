// Sums and conversions for C.
#include "call.h"

#include "../ops/elementwise/add_cast.h"

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
