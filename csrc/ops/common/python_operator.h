// Calls of operators whose kernels are in Python, from kernels in C++.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cstddef>
#include <exception>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

namespace metalcore {

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

}  // namespace metalcore
