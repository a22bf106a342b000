// Kernels for operators of PyTorch's own, which enable_pytorch_overrides() puts in the place of PyTorch's while it is
// on. One stands beside the op that does the work, at namespace scope:
//   Replacement<&takes, &silu> silu_replacement("silu", "silu");  // aten::silu runs metalcore::silu
// `takes` and the op have the parameters of PyTorch's operator. What `takes` or the GPU refuses goes to
// metalcore_replaced::silu, where Python puts the kernel that was there before (metalcore/overrides/_dispatcher.py).
#pragma once

#include "common.h"
#include "operator.h"

#include <array>
#include <atomic>
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
    void take_back();  // the GPU refused it

   private:
    std::atomic<int64_t>& ran_;
    AtenRecordFunctionHandle shown_ = nullptr;
  };

  const std::string& replaced() const { return replaced_; }

 private:
  const char* const name_;
  const std::string shown_as_, replaced_;
  const Kernel kernel_;
  std::map<std::string, std::unique_ptr<torch::stable::detail::StableLibrary>> libraries_;  // by key
  std::array<std::atomic<int64_t>, 64> ran_ = {};                                           // by type of device
};

// By the operator's name; throws std::invalid_argument where there is none.
ReplacedOperator& replaced_operator(std::string_view name);

// Whether this thread's last call went to the kernel that was there before because the GPU refused ours. One may ask
// once.
bool left_as_refused();

template <auto takes, auto op>
class Replacement;

template <typename Result, typename... Arguments, bool (*takes)(Arguments...), Result (*op)(Arguments...)>
class Replacement<takes, op> : public ReplacedOperator {
 public:
  Replacement(const char* name, const char* op_name) : ReplacedOperator(name, op_name, TORCH_BOX(&call)) {
    self_ = this;
  }

 private:
  static Result call(Arguments... arguments) {
    if (takes(arguments...)) {
      Run run(*self_, std::get<0>(std::tie(arguments...)));
      try {
        return op(arguments...);
      } catch (const gpu::KernelRefused&) {
        run.take_back();
      }
    }
    return PythonOperator<Result>::call(self_->replaced(), arguments...);
  }

  static inline Replacement* self_ = nullptr;
};

// What most kernels ask of tensors: strided floating-point ones of one dtype and shape, on one device.
bool is_float(const Tensor& tensor);
bool are_alike(const Tensor& a, const Tensor& b);

// An argument that was left out comes from PyTorch's derivatives as an undefined tensor.
MaybeTensor given(const MaybeTensor& argument);

}  // namespace metalcore
