// PyTorch's own ops, from C++.
#pragma once

#include "common.h"

#include <array>
#include <cstddef>
#include <utility>

namespace metalcore {

// Calls PyTorch's own op of this name. An op that returns two tensors is called like this:
// call_torch<2>("aten::linalg_qr", "", a, std::string("reduced")). The arguments must have the types of the schema:
// bool, int64_t, double, std::string, Tensor, or std::optional of one.
template <size_t RESULTS, typename... Arguments>
std::array<Tensor, RESULTS> call_torch(const char* name, const char* overload, const Arguments&... arguments) {
  std::array<StableIValue, (sizeof...(Arguments) > RESULTS ? sizeof...(Arguments) : RESULTS)> stack{
      torch::stable::detail::from(arguments)...};
  check(torch_call_dispatcher(name, overload, stack.data(), TORCH_ABI_VERSION) == AOTI_TORCH_SUCCESS,
        "metalcore: ", name, " failed");
  return [&]<size_t... I>(std::index_sequence<I...>) {
    return std::array<Tensor, RESULTS>{torch::stable::detail::to<Tensor>(stack[I])...};
  }(std::make_index_sequence<RESULTS>());
}

}  // namespace metalcore
