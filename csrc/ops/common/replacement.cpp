#include "replacement.h"

#include <utility>
#include <vector>

namespace metalcore {

namespace {

std::vector<ReplacedOperator*>& all() {
  static std::vector<ReplacedOperator*> operators;
  return operators;
}

thread_local bool refused = false;

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

ReplacedOperator::Run::Run(ReplacedOperator& of, const Tensor& first) : ran_(of.ran_[gpu::device_type_of(first)]) {
  ran_.fetch_add(1, std::memory_order_relaxed);
  aoti_record_function_start(of.shown_as_.c_str(), nullptr, nullptr, 0, &shown_);
}

void ReplacedOperator::Run::take_back() {
  ran_.fetch_sub(1, std::memory_order_relaxed);
  refused = true;
}

bool left_as_refused() { return std::exchange(refused, false); }

ReplacedOperator& replaced_operator(std::string_view name) {
  for (ReplacedOperator* found : all())
    if (found->name() == name) return *found;
  throw std::invalid_argument("metalcore: there is no kernel for aten::" + std::string(name));
}

bool is_float(const Tensor& tensor) {
  int32_t layout = -1;
  aoti_torch_get_layout(tensor.get(), &layout);
  return is_float_dtype(tensor.scalar_type()) && layout == aoti_torch_layout_strided();
}

bool are_alike(const Tensor& a, const Tensor& b) {
  return is_float(a) && is_float(b) && a.scalar_type() == b.scalar_type() && same_device(a, b) && same_sizes(a, b);
}

MaybeTensor given(const MaybeTensor& argument) { return argument && argument->defined() ? argument : std::nullopt; }

}  // namespace metalcore
