// Kernels for operators of PyTorch's own, which enable_pytorch_overrides() puts in the place of PyTorch's while it is
// on. One stands beside the op that does the work, at namespace scope:
//   Replacement<&takes, &silu> silu_replacement("silu", "silu");  // aten::silu runs metalcore::silu
// `takes` and the op have the parameters of PyTorch's operator. What `takes` refuses goes to metalcore_replaced::silu,
// where Python puts the kernel that was there before (metalcore/overrides/_dispatcher.py).
#pragma once

#include "common.h"

#include <array>
#include <atomic>
#include <exception>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <tuple>

namespace metalcore {

class ReplacedOperator {
 public:
  using Kernel = void (*)(StableIValue*, uint64_t, uint64_t);
  ReplacedOperator(const char* name, const char* op, Kernel kernel);
  ReplacedOperator(const ReplacedOperator&) = delete;

  std::string_view name() const { return name_; }

  // Puts the kernel at a dispatch key ("MPS", "CUDA"), or takes it out again. One thread at a time may ask.
  void put(const std::string& key);
  void take_out(const std::string& key) { libraries_.erase(key); }

  // How often the op has run in the place of PyTorch's on a type of device, by PyTorch's number of it.
  int64_t ran(int32_t device_type) const { return ran_.at(device_type); }

 protected:
  // While it lives, a call is the op's: it is counted, and profilers show it under the op's name.
  class Run {
   public:
    Run(ReplacedOperator& of, const Tensor& first);
    ~Run() { aoti_record_function_end(shown_); }
    Run(const Run&) = delete;

   private:
    AtenRecordFunctionHandle shown_ = nullptr;
  };

  // Calls the kernel that was there before, with the operator's arguments on the stack. Its result takes their place.
  void call_replaced(StableIValue* stack) const;

 private:
  const char* const name_;
  const std::string shown_as_, replaced_;
  const Kernel kernel_;
  std::map<std::string, std::unique_ptr<torch::stable::detail::StableLibrary>> libraries_;  // by key
  std::array<std::atomic<int64_t>, 64> ran_ = {};                                           // by type of device
};

// By the operator's name; throws std::invalid_argument where there is none.
ReplacedOperator& replaced_operator(std::string_view name);

// PyTorch's C interface loses the type of an exception and prints it. So a kernel in Python that was called through it
// leaves its exception here, returns anything, and the caller throws the exception for it.
void leave_exception(std::exception_ptr exception);

template <auto takes, auto op>
class Replacement;

template <typename... Arguments, bool (*takes)(Arguments...), Tensor (*op)(Arguments...)>
class Replacement<takes, op> : public ReplacedOperator {
 public:
  Replacement(const char* name, const char* op_name) : ReplacedOperator(name, op_name, TORCH_BOX(&call)) {
    self_ = this;
  }

 private:
  static Tensor call(Arguments... arguments) {
    if (!takes(arguments...)) {
      StableIValue stack[] = {torch::stable::detail::from(arguments)...};
      self_->call_replaced(stack);
      return torch::stable::detail::to<Tensor>(stack[0]);
    }
    const Run run(*self_, std::get<0>(std::tie(arguments...)));
    return op(arguments...);
  }

  static inline Replacement* self_ = nullptr;
};

// What most kernels ask of tensors: strided floating-point ones of one dtype and shape, on one device.
bool is_float(const Tensor& tensor);
bool are_alike(const Tensor& a, const Tensor& b);

}  // namespace metalcore
