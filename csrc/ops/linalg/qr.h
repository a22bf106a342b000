// The QR factorization, for the ops that use it.
#pragma once

#include "../common/common.h"

#include <string>
#include <tuple>

namespace metalcore {

// The operator metalcore::qr returns (Q, R) of float32 matrices. The modes are "reduced", "complete" and "r".
std::tuple<Tensor, Tensor> qr(const Tensor& a, const std::string& mode);

}  // namespace metalcore
