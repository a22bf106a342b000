#include "operator.h"

#include <stdexcept>

namespace metalcore {

namespace {

thread_local std::exception_ptr left_exception;

}  // namespace

std::exception_ptr call_python_operator(const std::string& name, StableIValue* stack) {
  const AOTITorchError status = torch_call_dispatcher(name.c_str(), "", stack, TORCH_ABI_VERSION);
  std::exception_ptr left = std::exchange(left_exception, nullptr);
  if (status == AOTI_TORCH_SUCCESS) return left;
  if (left) std::rethrow_exception(left);
  throw std::runtime_error("metalcore: " + name + " failed");
}

void leave_exception(std::exception_ptr exception) { left_exception = std::move(exception); }

}  // namespace metalcore
