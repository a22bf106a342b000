#include "replacement.h"

#include <utility>
#include <vector>

namespace metalcore {

namespace {

std::vector<ReplacedOperator*>& all() {
  static std::vector<ReplacedOperator*> operators;
  return operators;
}

thread_local std::exception_ptr left_exception;

}  // namespace

ReplacedOperator::ReplacedOperator(const char* name, const char* op, Kernel kernel)
    : name_(name),
      shown_as_("metalcore::" + std::string(op)),
      replaced_("metalcore_replaced::" + std::string(name)),
      kernel_(kernel) {
  all().push_back(this);
}

void ReplacedOperator::put(const std::string& key) {
  using torch::stable::detail::StableLibrary;
  auto library = std::make_unique<StableLibrary>(StableLibrary::Kind::IMPL, "aten", key.c_str(), "metalcore", 0);
  library->impl(name_, kernel_);
  libraries_[key] = std::move(library);
}

void ReplacedOperator::call_replaced(StableIValue* stack) const {
  const AOTITorchError status = torch_call_dispatcher(replaced_.c_str(), "", stack, TORCH_ABI_VERSION);
  if (const std::exception_ptr left = std::exchange(left_exception, nullptr)) {
    if (status == AOTI_TORCH_SUCCESS) torch::stable::detail::to<Tensor>(stack[0]);  // frees it
    std::rethrow_exception(left);
  }
  check(status == AOTI_TORCH_SUCCESS, "metalcore: ", replaced_, " failed");
}

ReplacedOperator::Run::Run(ReplacedOperator& of, const Tensor& first) {
  of.ran_[gpu::device_type_of(first)].fetch_add(1, std::memory_order_relaxed);
  aoti_record_function_start(of.shown_as_.c_str(), nullptr, nullptr, 0, &shown_);
}

ReplacedOperator& replaced_operator(std::string_view name) {
  for (ReplacedOperator* found : all())
    if (found->name() == name) return *found;
  throw std::invalid_argument("metalcore: there is no kernel for aten::" + std::string(name));
}

void leave_exception(std::exception_ptr exception) { left_exception = std::move(exception); }

bool is_float(const Tensor& tensor) {
  int32_t layout = -1;
  aoti_torch_get_layout(tensor.get(), &layout);
  return is_float_dtype(tensor.scalar_type()) && layout == aoti_torch_layout_strided();
}

bool are_alike(const Tensor& a, const Tensor& b) {
  return is_float(a) && is_float(b) && a.scalar_type() == b.scalar_type() && same_device(a, b) && same_sizes(a, b);
}

}  // namespace metalcore
