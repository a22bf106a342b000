// The QR factorization, for the ops that are made of it.
#pragma once

#include "../common.h"

#include <string>
#include <tuple>

namespace metalcore {

// The operator metalcore::qr: (Q, R) of float32 matrices, modes "reduced", "complete" and "r".
std::tuple<Tensor, Tensor> qr(const Tensor& a, const std::string& mode);

}  // namespace metalcore
