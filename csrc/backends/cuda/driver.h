// GPUs, and the part of NVIDIA's driver interface that this backend calls. libcuda.so.1 comes with the driver. It is
// opened on first use, so that the extension loads where there is no driver. The declarations replace those of cuda.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace metalcore::cuda {

using Status = int;        // CUresult
using DeviceNumber = int;  // CUdevice
using Context = struct ContextObject*;
using Stream = struct StreamObject*;
using Binary = struct BinaryObject*;      // CUlibrary
using Kernel = struct KernelObject*;      // CUkernel: of a binary, for every context
using Function = struct FunctionObject*;  // CUfunction: of one context

constexpr Status kSuccess = 0;
constexpr Status kOutOfMemory = 2;       // CUDA_ERROR_OUT_OF_MEMORY
constexpr Status kOutOfResources = 701;  // CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES

// CUfunction_attribute
enum class Attribute : int {
  kMaxThreadsPerBlock = 0,
  kStaticSharedMemory = 1,
  kLocalMemory = 3,
  kRegisters = 4,
  kMaxDynamicSharedMemory = 8,
  kLargeClusters = 14,  // of more than 8 threadgroups
};

// CUdevice_attribute
enum class DeviceAttribute : int {
  kMultiprocessors = 16,
  kCapabilityMajor = 75,
  kCapabilityMinor = 76,
  kMaxSharedMemoryPerBlock = 97,  // for functions that set kMaxDynamicSharedMemory
};

constexpr int kCaptureRelaxed = 2;  // CUstreamCaptureMode

// CUlaunchAttribute
struct LaunchAttribute {
  int id;
  alignas(8) int value;
  uint32_t rest_of_value[15];
};
constexpr int kClusterDimension = 4;  // three sizes
constexpr int kProgrammaticStreamSerialization = 6;

// CUlaunchConfig
struct LaunchConfig {
  unsigned grid[3], block[3];
  unsigned shared_bytes;
  Stream stream;
  const LaunchAttribute* attributes;
  unsigned attribute_count;
};

struct Driver {
  Status (*init)(unsigned flags);
  Status (*driver_version)(int* version);  // 1000 * major + 10 * minor of the newest CUDA that it supports
  Status (*error_name)(Status status, const char** name);
  Status (*error_string)(Status status, const char** text);
  Status (*device_count)(int* count);
  Status (*device)(DeviceNumber* device, int index);
  Status (*device_name)(char* name, int size, DeviceNumber device);
  Status (*device_memory)(size_t* bytes, DeviceNumber device);
  Status (*device_attribute)(int* value, DeviceAttribute attribute, DeviceNumber device);
  Status (*retain_primary_context)(Context* context, DeviceNumber device);
  Status (*current_context)(Context* context);
  Status (*push_context)(Context context);
  Status (*pop_context)(Context* context);
  Status (*exchange_capture_mode)(int* mode);
  Status (*load_binary)(Binary* binary, const void* code, void* jit_options, void** jit_values, unsigned jit_count,
                        void* options, void** values, unsigned count);
  Status (*binary_kernel)(Kernel* kernel, Binary binary, const char* name);
  Status (*kernel_function)(Function* function, Kernel kernel);
  Status (*function_attribute)(int* value, Attribute attribute, Function function);
  Status (*set_function_attribute)(Function function, Attribute attribute, int value);
  Status (*launch)(const LaunchConfig* config, Function function, void** parameters, void** extra);
  // PyTorch allocates the extension's memory; libmetalcore has its own.
  Status (*allocate)(void** memory, size_t bytes);
  Status (*free)(void* memory);
  Status (*fill_bytes)(void* memory, unsigned char value, size_t count, Stream stream);
  Status (*fill_words)(void* memory, unsigned value, size_t count, Stream stream);
  Status (*copy_to_device)(void* memory, const void* data, size_t bytes);
  Status (*wait_for_stream)(Stream stream);
  // Drivers before CUDA 12.4 lack these: they are null.
  Status (*load_function)(Function function);
  Status (*parameter_info)(Function function, size_t index, size_t* offset, size_t* size);
};

// Opens the driver, but does not initialize it. Throws std::runtime_error that says why there is none.
const Driver& open_driver();
// Opens and initializes the driver. Throws as well in a process forked from one that had initialized it: it cannot work
// there.
const Driver& driver();

std::string error_text(Status status);  // such as "CUDA_ERROR_OUT_OF_MEMORY: out of memory"

// Throws std::runtime_error "metalcore: <what> failed: <error_text>".
[[noreturn]] void fail(const std::string& what, Status status);
inline void check(Status status, const char* what) {
  if (__builtin_expect(status != kSuccess, false)) fail(what, status);
}

constexpr int kMaximumDevices = 64;
constexpr uint32_t kMostTogether = 16;  // threadgroups of a cluster, on any GPU

// A GPU as this backend uses it, in the GPU's primary context, which PyTorch uses too.
struct Device {
  int index;               // PyTorch's index among the devices that CUDA_VISIBLE_DEVICES admits
  int arch;                // 90 for compute capability 9.0
  uint32_t shared_memory;  // the most bytes that a threadgroup may have
  bool may_overlap;        // whether a kernel may begin while those before it run (see launches.cpp)
  uint32_t most_together;  // threadgroups of a cluster
  Context context;
};

// Makes the device and its context on the first call. Throws std::runtime_error.
const Device& device(int index);

// The multiprocessors of the first GPU, or 0 as long as nobody in this process has initialized the driver. It does not
// do that itself: a process that only asks for plans may fork, and its children could not use the driver then.
uint32_t multiprocessors();
// The major number of its compute capability, or 0 likewise.
uint32_t capability_major();

// While it lives, the device's context is the calling thread's.
class CurrentContext {
 public:
  explicit CurrentContext(const Device& device);
  ~CurrentContext();
  CurrentContext(const CurrentContext&) = delete;

 private:
  bool pushed_ = false;
};

// Returns PyTorch's current stream of the device for the calling thread; the default stream where PyTorch has no CUDA.
// In libmetalcore it is the stream of the context that runs.
Stream current_stream(const Device& device);

}  // namespace metalcore::cuda
