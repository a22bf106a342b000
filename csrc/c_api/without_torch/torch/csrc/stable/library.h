// Takes the place of PyTorch's header of this path in libmetalcore, which has no operators: what ops register is
// compiled and never called.
#pragma once

#include <torch/csrc/stable/tensor.h>

namespace torch::stable::detail {

class StableLibrary {
 public:
  enum class Kind { DEF, IMPL, FRAGMENT };
  StableLibrary(Kind, const char*, const char*, const char*, uint32_t) {}
  void def(const char*) {}
  void impl(const char*, void (*)(StableIValue*, uint64_t, uint64_t)) {}
};

}  // namespace torch::stable::detail

#define TORCH_BOX(function) nullptr

#define METALCORE_JOINED_(a, b) a##b
#define METALCORE_JOINED(a, b) METALCORE_JOINED_(a, b)
#define STABLE_TORCH_LIBRARY_FRAGMENT(name, m)   \
  [[maybe_unused]] static void METALCORE_JOINED( \
      define_, __COUNTER__)([[maybe_unused]] torch::stable::detail::StableLibrary & m)
#define STABLE_TORCH_LIBRARY_IMPL(name, key, m) STABLE_TORCH_LIBRARY_FRAGMENT(name, m)
