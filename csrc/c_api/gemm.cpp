// Products of matrices for C.
#include "call.h"

#include "../ops/gemm/gemm.h"

#include <torch/csrc/stable/ops.h>

#include <optional>

namespace metalcore::c_api {
namespace {

// A matrix of rows by columns whose rows lie `row` elements apart, or as `transposed`, whose columns do.
template <typename T>
Tensor matrix(Call& call, const char* name, const T* data, Size rows, Size columns, Size row, bool transposed) {
  if (!transposed) return call.input(name, data, {rows, columns}, row);
  return torch::stable::transpose(call.input(name, data, {columns, rows}, row), 0, 1);
}

template <typename T>
struct GemmArguments {
  const T *a, *b, *bias;
  T* out;
  int m, n, k, transpose_a, transpose_b, lda, ldb;
};

template <typename T>
void gemm(Call& call, const GemmArguments<T>& g) {
  const Size m{"m", g.m}, n{"n", g.n}, k{"k", g.k};
  const Tensor a = matrix(call, "a", g.a, m, k, {"lda", g.lda}, g.transpose_a != 0);
  const Tensor b = matrix(call, "b", g.b, k, n, {"ldb", g.ldb}, g.transpose_b != 0);
  const MaybeTensor bias = g.bias ? MaybeTensor(call.input("bias", g.bias, {n})) : std::nullopt;
  matmul_into(call.output("out", g.out, {m, n}), a, b, bias, std::nullopt, 0, 1, 0);
}

template <typename T>
void grouped_gemm(Call& call, const T* a_, const T* b_, const int32_t* ends_, T* out, int rows_, int n_, int k_,
                  int groups_, int transpose_b) {
  const Size rows{"rows", rows_}, n{"n", n_}, k{"k", k_}, groups{"groups", groups_};
  const Tensor a = call.input("a", a_, {rows, k});
  const Tensor b = transpose_b ? torch::stable::transpose(call.input("b", b_, {groups, n, k}), 1, 2)
                               : call.input("b", b_, {groups, k, n});
  const Tensor ends = call.input("ends", ends_, {groups});
  if (call.on_host()) call.require_ascending("ends", ends, rows.value);
  grouped_gemm_into(call.output("out", out, {rows, n}), a, b, ends);
}

}  // namespace
}  // namespace metalcore::c_api

using namespace metalcore::c_api;

int metalcore_gemm_float(const float* a, const float* b, const float* bias, float* out, int m, int n, int k,
                         int transpose_a, int transpose_b, int lda, int ldb) {
  return call(__func__,
              [&](Call& call) { gemm<float>(call, {a, b, bias, out, m, n, k, transpose_a, transpose_b, lda, ldb}); });
}

int metalcore_gemm_bfloat16(const metalcore_bfloat16* a, const metalcore_bfloat16* b, const metalcore_bfloat16* bias,
                            metalcore_bfloat16* out, int m, int n, int k, int transpose_a, int transpose_b, int lda,
                            int ldb) {
  return call(__func__, [&](Call& call) {
    gemm<metalcore_bfloat16>(call, {a, b, bias, out, m, n, k, transpose_a, transpose_b, lda, ldb});
  });
}

int metalcore_grouped_gemm_float(const float* a, const float* b, const int32_t* ends, float* out, int rows, int n,
                                 int k, int groups, int transpose_b) {
  return call(__func__, [&](Call& call) { grouped_gemm(call, a, b, ends, out, rows, n, k, groups, transpose_b); });
}

int metalcore_grouped_gemm_bfloat16(const metalcore_bfloat16* a, const metalcore_bfloat16* b, const int32_t* ends,
                                    metalcore_bfloat16* out, int rows, int n, int k, int groups, int transpose_b) {
  return call(__func__, [&](Call& call) { grouped_gemm(call, a, b, ends, out, rows, n, k, groups, transpose_b); });
}
