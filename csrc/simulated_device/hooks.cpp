#include "hooks.h"

#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/MPSHooksInterface.h>

#include <mutex>
#include <new>
#include <unordered_map>

#include "allocator.h"
#include "generator.h"
#include "queue.h"

namespace metalcore::simulated_device {
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

}  // namespace metalcore::simulated_device
