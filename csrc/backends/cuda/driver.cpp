#include "driver.h"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <mutex>
#include <stdexcept>
#include <string>

namespace metalcore::cuda {
namespace {

constexpr const char* kLibrary = "libcuda.so.1";
constexpr int kOldest = 12010;  // the first CUDA with parameter blocks of more than 4 KiB
constexpr const char* kNeeded = "; CUDA 12.1 and so driver 530 or newer is needed";

template <typename F>
void find(void* library, const char* name, F*& function, bool optional = false) {
  function = reinterpret_cast<F*>(dlsym(library, name));
  if (!function && !optional)
    throw std::runtime_error(std::string("metalcore: the NVIDIA driver on this machine has no ") + name + kNeeded);
}

Driver open() {
  void* library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    const char* reason = dlerror();
    throw std::runtime_error(std::string("metalcore: there is no NVIDIA driver: ") + (reason ? reason : kLibrary));
  }
  Driver d = {};
  find(library, "cuInit", d.init);
  find(library, "cuDriverGetVersion", d.driver_version);
  find(library, "cuGetErrorName", d.error_name);
  find(library, "cuGetErrorString", d.error_string);
  find(library, "cuDeviceGetCount", d.device_count);
  find(library, "cuDeviceGet", d.device);
  find(library, "cuDeviceGetName", d.device_name);
  find(library, "cuDeviceTotalMem_v2", d.device_memory);
  find(library, "cuDeviceGetAttribute", d.device_attribute);
  find(library, "cuDevicePrimaryCtxRetain", d.retain_primary_context);
  find(library, "cuCtxGetCurrent", d.current_context);
  find(library, "cuCtxPushCurrent_v2", d.push_context);
  find(library, "cuCtxPopCurrent_v2", d.pop_context);
  find(library, "cuThreadExchangeStreamCaptureMode", d.exchange_capture_mode);
  find(library, "cuLibraryLoadData", d.load_binary);
  find(library, "cuLibraryGetKernel", d.binary_kernel);
  find(library, "cuKernelGetFunction", d.kernel_function);
  find(library, "cuFuncGetAttribute", d.function_attribute);
  find(library, "cuFuncSetAttribute", d.set_function_attribute);
  find(library, "cuLaunchKernelEx", d.launch);
  find(library, "cuMemAlloc_v2", d.allocate);
  find(library, "cuMemFree_v2", d.free);
  find(library, "cuMemsetD8Async", d.fill_bytes);
  find(library, "cuMemsetD32Async", d.fill_words);
  find(library, "cuMemcpyHtoD_v2", d.copy_to_device);
  find(library, "cuStreamSynchronize", d.wait_for_stream);
  find(library, "cuFuncLoad", d.load_function, true);
  find(library, "cuFuncGetParamInfo", d.parameter_info, true);
  return d;
}

std::atomic<bool> initialized = false, forked = false;

void initialize(const Driver& opened) {
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  if (initialized.load(std::memory_order_relaxed)) return;
  check(opened.init(0), "initializing the NVIDIA driver");
  int version = 0;
  check(opened.driver_version(&version), "asking for the NVIDIA driver's version");
  if (version < kOldest)
    throw std::runtime_error("metalcore: the NVIDIA driver on this machine is one for CUDA " +
                             std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10) + kNeeded);
  static const int registered = pthread_atfork(nullptr, nullptr, [] { forked = initialized.load(); });
  (void)registered;
  initialized.store(true, std::memory_order_release);
}

}  // namespace

const Driver& open_driver() {
  static const Driver opened = open();
  return opened;
}

const Driver& driver() {
  const Driver& opened = open_driver();
  if (__builtin_expect(!initialized.load(std::memory_order_acquire), false)) initialize(opened);
  if (__builtin_expect(forked.load(std::memory_order_relaxed), false))
    throw std::runtime_error(
        "metalcore: CUDA cannot be used in a process that was forked from one which had used it; start it with the "
        "multiprocessing method 'spawn' or 'forkserver'");
  return opened;
}

std::string error_text(Status status) {
  const Driver& opened = open_driver();
  const char *name = nullptr, *text = nullptr;
  opened.error_name(status, &name);
  opened.error_string(status, &text);
  return (name ? name : "CUDA error " + std::to_string(status)) + (text ? std::string(": ") + text : "");
}

void fail(const std::string& what, Status status) {
  throw std::runtime_error("metalcore: " + what + " failed: " + error_text(status));
}

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

// Every GPU from compute capability 9.0 on runs clusters of eight. Those of sixteen need as many cores in one of a
// GPU's parts, which the largest Hopper GPUs have.
uint32_t most_together(int arch, int cores) {
  constexpr int kOldestArch = 90, kLargeCores = 132;
  if (arch < kOldestArch) return 1;
  return arch == kOldestArch && cores >= kLargeCores ? kMostTogether : 8;
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
  const int cores = attribute(driver, DeviceAttribute::kMultiprocessors, number);
  return new Device{index, arch, static_cast<uint32_t>(shared), may_overlap, most_together(arch, cores), context};
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

namespace {

uint32_t attribute_of_first(DeviceAttribute which) {
  try {
    Context context = nullptr;
    if (open_driver().current_context(&context) != kSuccess) return 0;
    DeviceNumber number = 0;
    check(driver().device(&number, 0), "finding the GPU");
    return static_cast<uint32_t>(attribute(driver(), which, number));
  } catch (const std::runtime_error&) {  // there is no driver, or this process cannot use it
    return 0;
  }
}

}  // namespace

uint32_t multiprocessors() { return attribute_of_first(DeviceAttribute::kMultiprocessors); }
uint32_t capability_major() { return attribute_of_first(DeviceAttribute::kCapabilityMajor); }

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
