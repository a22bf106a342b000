// Products of matrices in memory that the caller has.
#pragma once

#include "../common/common.h"

#include <cstdint>
#include <optional>
#include <string>

namespace metalcore {

// Whether memory begins at a multiple of 16 bytes.
bool begins_aligned(const Tensor& tensor);

// One of kernels/gemm/gemm.h's, or 0. Its name is Python's, or "none".
uint32_t activation_number(const char* op, const std::string& name);

// result = activation(alpha a b + bias + beta residual), contiguous. `activation` is 0 or one of kernels/gemm/gemm.h's.
// The caller has checked that all go together, and the bias is contiguous.
void matmul_into(const Tensor& result, const Tensor& a, const Tensor& b, const MaybeTensor& bias,
                 const MaybeTensor& residual, uint32_t activation, double alpha, double beta);

// a (rows, terms) by the groups of b (groups, terms, columns), whose rows end at `ends` (int32, contiguous); or by b
// (terms, columns), where the groups' terms end there. The result is contiguous.
void grouped_gemm_into(const Tensor& result, const Tensor& a, const Tensor& b, const Tensor& ends);

}  // namespace metalcore
