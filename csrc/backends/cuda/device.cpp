#include "device.h"

#include <atomic>
#include <mutex>
#include <stdexcept>
#include <string>

namespace metalcore::cuda {
namespace {

// What can launch a kernel that begins while those before it run, outside of graphs and in them.
constexpr int kOldestOverlappingArch = 90;
constexpr int kOldestOverlappingDriver = 12040;

// A Device is never destroyed: kernels may be launched while the process ends.
std::atomic<const Device*> devices[kMaximumDevices];

int attribute(const Driver& driver, DeviceAttribute which, DeviceNumber device) {
  int value = 0;
  check(driver.device_attribute(&value, which, device), "asking for a GPU's properties");
  return value;
}

const Device* make(const Driver& driver, int index) {
  DeviceNumber number = 0;
  Context context = nullptr;
  check(driver.device(&number, index), "finding the GPU");
  const int arch = 10 * attribute(driver, DeviceAttribute::kCapabilityMajor, number) +
                   attribute(driver, DeviceAttribute::kCapabilityMinor, number);
  const int shared = attribute(driver, DeviceAttribute::kMaxSharedMemoryPerBlock, number);
  int version = 0;
  check(driver.driver_version(&version), "asking for the NVIDIA driver's version");
  const bool may_overlap = arch >= kOldestOverlappingArch && version >= kOldestOverlappingDriver;
  check(driver.retain_primary_context(&context, number), "making a CUDA context");
  return new Device{index, arch, static_cast<uint32_t>(shared), may_overlap, context};
}

}  // namespace

const Device& device(int index) {
  const Driver& initialized = driver();
  if (index < 0 || index >= kMaximumDevices)
    throw std::runtime_error("metalcore: there is no GPU with the number " + std::to_string(index));
  if (const Device* known = devices[index].load(std::memory_order_acquire)) return *known;
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  if (!devices[index].load(std::memory_order_relaxed))
    devices[index].store(make(initialized, index), std::memory_order_release);
  return *devices[index].load(std::memory_order_relaxed);
}

uint32_t multiprocessors() {
  try {
    Context context = nullptr;
    if (open_driver().current_context(&context) != kSuccess) return 0;
    DeviceNumber number = 0;
    check(driver().device(&number, 0), "finding the GPU");
    return static_cast<uint32_t>(attribute(driver(), DeviceAttribute::kMultiprocessors, number));
  } catch (const std::runtime_error&) {  // there is no driver, or this process cannot use it
    return 0;
  }
}

CurrentContext::CurrentContext(const Device& device) {
  Context current = nullptr;
  check(driver().current_context(&current), "asking for the current CUDA context");
  if (current == device.context) return;
  check(driver().push_context(device.context), "entering a CUDA context");
  pushed_ = true;
}

CurrentContext::~CurrentContext() {
  Context popped;
  if (pushed_) open_driver().pop_context(&popped);
}

}  // namespace metalcore::cuda
