#include "hooks.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/MPSHooksInterface.h>
#include <ATen/ops/ones.h>
#include <c10/core/DeviceCapability.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>

#include <chrono>
#include <mutex>
#include <new>
#include <unordered_map>

#include "allocator.h"
#include "queue.h"

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

double now_milliseconds() {
  using Milliseconds = std::chrono::duration<double, std::milli>;
  return Milliseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

namespace {

// Kernels have finished when a call returns. So there is one stream, it is always idle, and an event is a point in
// time.
class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return c10::kMPS; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.is_mps() && device.index() <= 0, "Expected device mps:0, but got ", device);
  }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void synchronizeDevice(c10::DeviceIndex) const override { finish_queue(/*all=*/true); }

  c10::Stream getStream(c10::Device) const override { return stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const override { return stream(); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { finish_queue(/*all=*/false); }

  void record(void** event, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new double;
    *static_cast<double*>(*event) = now_milliseconds();
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  double elapsedTime(void* start, void* end, c10::DeviceIndex) const override {
    TORCH_CHECK(start && end, "Both events must be recorded before calculating elapsed time");
    return *static_cast<double*>(end) - *static_cast<double*>(start);
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<double*>(event); }

  c10::DeviceCapability getDeviceCapability(c10::Device) const override {
    c10::DeviceCapability capability;
    uint64_t bits = 0;
    for (const int index :
         {c10::kIndex_Byte, c10::kIndex_Char, c10::kIndex_Short, c10::kIndex_Int, c10::kIndex_Long, c10::kIndex_UInt16,
          c10::kIndex_UInt32, c10::kIndex_UInt64, c10::kIndex_Bool, c10::kIndex_Half, c10::kIndex_BFloat16,
          c10::kIndex_Float, c10::kIndex_ComplexHalf, c10::kIndex_ComplexFloat}) {
      bits |= uint64_t{1} << index;
    }
    capability.capability_data.capability_bits = bits;
    return capability;
  }

 private:
  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
};

}  // namespace

void install_guard() { c10::impl::DeviceGuardImplRegistrar(c10::kMPS, new Guard); }

namespace {

// The times that torch.mps.Event records under each id.
class Events {
 public:
  uint32_t acquire() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return ++last_;
  }
  void release(uint32_t id) {
    const std::lock_guard<std::mutex> lock(mutex_);
    times_.erase(id);
  }
  void record(uint32_t id) {
    const std::lock_guard<std::mutex> lock(mutex_);
    times_[id] = now_milliseconds();
  }
  double elapsed(uint32_t start, uint32_t end) {
    const std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(times_.count(start) && times_.count(end), "Both events must be recorded before elapsed_time()");
    return times_[end] - times_[start];
  }

 private:
  std::mutex mutex_;
  std::unordered_map<uint32_t, double> times_;
  uint32_t last_ = 0;
};

Events& events() {
  static auto* instance = new Events;  // it is never destroyed: Python releases events late
  return *instance;
}

// Methods without `override` are virtual in some of the supported versions of PyTorch only.
struct Hooks final : at::MPSHooksInterface {
  void init() const override {}
  bool hasMPS() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool isOnMacOSorNewer(unsigned major, unsigned) const override { return major <= 15; }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return new_generator(); }

  at::Allocator* getMPSDeviceAllocator() const override { return device_allocator(); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Device getDeviceFromPtr(void*) const override { return kDevice; }
  void emptyCache() const override {}
  size_t getCurrentAllocatedMemory() const override { return allocated_bytes(); }
  size_t getDriverAllocatedMemory() const override { return allocated_bytes(); }
  size_t getRecommendedMaxMemory() const override { return physical_memory(); }
  size_t getMaxBufferLength() const { return physical_memory(); }
  void setMemoryFraction(double fraction) const override { set_memory_fraction(fraction); }

  void deviceSynchronize() const override { finish_queue(/*all=*/true); }
  void commitStream() const override { finish_queue(/*all=*/false); }
  void* getCommandBuffer() const override { return nullptr; }
  void* getDispatchQueue() const override { return nullptr; }
  void profilerStartTrace(const std::string&, bool) const override {}
  void profilerStopTrace() const override {}

  uint32_t acquireEvent(bool) const override { return events().acquire(); }
  void releaseEvent(uint32_t id) const override { events().release(id); }
  void recordEvent(uint32_t id) const override { events().record(id); }
  void waitForEvent(uint32_t) const override {}
  void synchronizeEvent(uint32_t) const override {}
  bool queryEvent(uint32_t) const override { return true; }
  double elapsedTimeOfEvents(uint32_t start, uint32_t end) const override { return events().elapsed(start, end); }

  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
};

// PyTorch creates its hooks once and keeps a reference to them for good, so the object itself has to change its class.
// This is sound because hooks have no members: the object holds only the pointer to its virtual functions.
template <typename Replacement, typename Interface>
void replace_hooks(const Interface& hooks) {
  static_assert(sizeof(Replacement) == sizeof(void*) && sizeof(Interface) == sizeof(void*));
  new (const_cast<Interface*>(&hooks)) Replacement;
}

}  // namespace

void install_hooks() { replace_hooks<Hooks>(at::detail::getMPSHooks()); }

void hide_cuda() {
  const auto& hooks = at::detail::getCUDAHooks();
  if (hooks.isBuilt()) replace_hooks<at::CUDAHooksInterface>(hooks);
}

namespace {

using torch::autograd::Engine;
using torch::autograd::impl::gradient_edge;

// Names protected members of the engine.
struct EngineState : Engine {
  static bool started(const Engine& engine) { return (engine.*&EngineState::thread_pool_shared_) != nullptr; }
  static bool has_device_thread(const Engine& engine) { return !(engine.*&EngineState::device_ready_queues_).empty(); }
};

}  // namespace

bool autograd_started_without_device() {
  const auto& engine = Engine::get_default_engine();
  return EngineState::started(engine) && !EngineState::has_device_thread(engine);
}

void drain_autograd() {
  auto& engine = Engine::get_default_engine();
  if (!EngineState::has_device_thread(engine)) return;
  // The thread takes up a graph only when it has dropped the one before. No Python object belongs to this graph.
  const at::AutoGradMode enable_grad(true);
  const auto x = at::ones({}, kDevice).set_requires_grad(true);
  const auto y = x.clone();
  engine.execute({gradient_edge(y)}, {at::ones({}, kDevice)}, /*keep_graph=*/false, /*create_graph=*/false,
                 /*accumulate_grad=*/false, {gradient_edge(x)});
}

}  // namespace metalcore::simulated_device
