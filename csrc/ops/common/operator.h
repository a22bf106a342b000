// The operators metalcore::<name>, for the devices of every backend. One is registered at namespace scope, beside the
// function that does its work:
//   METALCORE_KERNELS(m) { m.impl<&metalcore::silu>("silu"); }
// A call whose kernels the GPU refuses goes to metalcore_by_torch::<name>, which Python has
// (metalcore/_core/refused.py).
#pragma once

#include "../../gpu/backend.h"
#include "python_operator.h"

#include <torch/csrc/stable/library.h>

#include <string>

namespace metalcore {

template <auto op>
class Operator;

template <typename Result, typename... Arguments, Result (*op)(Arguments...)>
class Operator<op> {
 public:
  static Result call(Arguments... arguments) {
    try {
      return op(arguments...);
    } catch (const gpu::KernelRefused&) {
    }
    return PythonOperator<Result>::call(std::string("metalcore_by_torch::") + name, arguments...);
  }

  static inline const char* name = nullptr;
};

class OperatorLibrary {
 public:
  explicit OperatorLibrary(torch::stable::detail::StableLibrary& library) : library_(library) {}

  template <auto op>
  void impl(const char* name) {
    Operator<op>::name = name;
    library_.impl(name, TORCH_BOX(&Operator<op>::call));
  }

 private:
  torch::stable::detail::StableLibrary& library_;
};

#define METALCORE_KERNELS(m)                                                                                     \
  static void register_kernels(metalcore::OperatorLibrary);                                                      \
  STABLE_TORCH_LIBRARY_IMPL(metalcore, MPS, library) { register_kernels(metalcore::OperatorLibrary(library)); }  \
  STABLE_TORCH_LIBRARY_IMPL(metalcore, CUDA, library) { register_kernels(metalcore::OperatorLibrary(library)); } \
  static void register_kernels(metalcore::OperatorLibrary m)

}  // namespace metalcore
