#include "generator.h"

#include <ATen/CPUGeneratorImpl.h>

#include "allocator.h"

namespace metalcore::simulated_device {
namespace {

class GeneratorImpl final : public c10::GeneratorImpl {
 public:
  explicit GeneratorImpl(at::Generator cpu)
      : c10::GeneratorImpl(kDevice, c10::DispatchKeySet(c10::DispatchKey::MPS)), cpu_(std::move(cpu)) {}

  const at::Generator& cpu() const { return cpu_; }

  void set_current_seed(uint64_t seed) override { cpu_.set_current_seed(seed); }
  uint64_t current_seed() const override { return cpu_.current_seed(); }
  uint64_t seed() override { return cpu_.seed(); }
  void set_offset(uint64_t) override { refuse_offset(); }
  uint64_t get_offset() const override { refuse_offset(); }
  void set_state(const c10::TensorImpl& state) override { cpu_.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu_.unsafeGetGeneratorImpl()->get_state(); }
  GeneratorImpl* clone_impl() const override { return new GeneratorImpl(cpu_.clone()); }

 private:
  [[noreturn]] static void refuse_offset() {
    TORCH_CHECK(false, "The simulated MPS generator has no offset: it is a Mersenne Twister, as on the CPU");
  }
  at::Generator cpu_;
};

}  // namespace

const at::Generator& default_generator() {
  // It is never destroyed: tensors may outlive static objects.
  static const auto* generator = new at::Generator(new_generator());
  return *generator;
}

at::Generator new_generator() { return at::make_generator<GeneratorImpl>(at::detail::createCPUGenerator()); }

const at::Generator& cpu_generator(const at::Generator& generator) {
  TORCH_CHECK(generator.device().is_mps(), "Expected a 'mps' device type for generator but found '",
              generator.device().type(), "'");
  return static_cast<GeneratorImpl*>(generator.unsafeGetGeneratorImpl())->cpu();
}

}  // namespace metalcore::simulated_device
