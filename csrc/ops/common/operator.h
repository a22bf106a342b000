// The operators metalcore::<name>, for the devices of every backend, and calls of operators in Python. One of ours is
// registered at namespace scope, beside the function that does its work:
//   METALCORE_KERNELS(m) { m.impl<&metalcore::silu>("silu"); }
// A call whose kernels the GPU refuses goes to metalcore_by_torch::<name>, which Python has
// (metalcore/_core/refused.py).
#pragma once

#include "../../gpu/backend.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cstddef>
#include <exception>
#include <string>
#include <tuple>
#include <utility>

namespace metalcore {

// ---------------------------------------------------------------- operators whose kernels are in Python

// Calls an operator ("namespace::name") with the arguments on the stack. Its results take their place. If it left an
// exception, that is returned; the results are then of no use, and the caller frees them.
std::exception_ptr call_python_operator(const std::string& name, StableIValue* stack);

// PyTorch's C interface loses the type of an exception and prints it. So a kernel in Python that was called through it
// leaves its exception here, returns anything, and the caller throws the exception for it.
void leave_exception(std::exception_ptr exception);

template <typename T>
StableIValue on_stack(const T& argument) {
  return torch::stable::detail::from(argument);
}

template <typename Result>
struct PythonResults {
  static constexpr size_t size = 1;
  static Result take(StableIValue* stack) { return torch::stable::detail::to<Result>(stack[0]); }
};
template <>
struct PythonResults<void> {
  static constexpr size_t size = 0;
  static void take(StableIValue*) {}
};
template <typename... Parts>
struct PythonResults<std::tuple<Parts...>> {
  static constexpr size_t size = sizeof...(Parts);
  static std::tuple<Parts...> take(StableIValue* stack) {
    return [&]<size_t... I>(std::index_sequence<I...>) {
      return std::tuple<Parts...>{torch::stable::detail::to<Parts>(stack[I])...};
    }(std::index_sequence_for<Parts...>());
  }
};

template <typename Result>
struct PythonOperator {
  template <typename... Arguments>
  static Result call(const std::string& name, const Arguments&... arguments) {
    using Results = PythonResults<Result>;
    constexpr size_t size = sizeof...(Arguments) > Results::size ? sizeof...(Arguments) : Results::size;
    StableIValue stack[size] = {on_stack(arguments)...};
    const std::exception_ptr left = call_python_operator(name, stack);
    if (!left) return Results::take(stack);
    static_cast<void>(Results::take(stack));
    std::rethrow_exception(left);
  }
};

// ---------------------------------------------------------------- operators whose kernels are in C++

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

// The same for CPU tensors, on which the simulator's backend runs the kernels. Where there is none, as on macOS, Python
// has the kernel for them.
#if defined(__linux__) && !defined(METALCORE_WITHOUT_SIMULATOR)
#define METALCORE_KERNELS_ON_CPU(m)                                                                                    \
  static void register_kernels_on_cpu(metalcore::OperatorLibrary);                                                     \
  STABLE_TORCH_LIBRARY_IMPL(metalcore, CPU, library) { register_kernels_on_cpu(metalcore::OperatorLibrary(library)); } \
  static void register_kernels_on_cpu(metalcore::OperatorLibrary m)
#else
#define METALCORE_KERNELS_ON_CPU(m) [[maybe_unused]] static void register_kernels_on_cpu(metalcore::OperatorLibrary m)
#endif

}  // namespace metalcore
