#include "replacement.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace metalcore {

namespace {

std::vector<ReplacedOperator*>& all() {
  static std::vector<ReplacedOperator*> operators;
  return operators;
}

thread_local std::exception_ptr left_exception;

int32_t device_type(const Tensor& tensor) {
  int32_t type = 0;
  aoti_torch_get_device_type(tensor.get(), &type);
  return type;
}

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
  of.ran_[device_type(first)].fetch_add(1, std::memory_order_relaxed);
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
  const ScalarType dtype = tensor.scalar_type();
  return (dtype == ScalarType::Float || dtype == ScalarType::Half || dtype == ScalarType::BFloat16) &&
         layout == aoti_torch_layout_strided();
}

bool are_alike(const Tensor& a, const Tensor& b) {
  const auto x = a.sizes(), y = b.sizes();
  return is_float(a) && is_float(b) && a.scalar_type() == b.scalar_type() && device_type(a) == device_type(b) &&
         a.get_device_index() == b.get_device_index() && x.size() == y.size() &&
         std::equal(x.begin(), x.end(), y.begin());
}

}  // namespace metalcore
