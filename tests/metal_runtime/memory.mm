// Buffers, and PyTorch's allocator as far as it matters to commands in flight.
#import "runtime.h"

#import "../../csrc/backends/mps/pipelines.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <numeric>
#include <string_view>
#include <vector>

using namespace metalcore;

namespace {

struct Allocation {
  size_t bytes;
  int stream;
  int count = 0;  // storages may share memory that they adopted from the CPU
  RuntimeBuffer* buffer = nil;
};

std::mutex mutex;
std::map<void*, Allocation>& allocations = *new std::map<void*, Allocation>;
std::string fault;  // found by freed()
std::atomic<int> allocations_so_far = 0, look_ups = 0;

bool in_flight(const RuntimeBuffer* buffer) {
  return std::accumulate(buffer->uses.begin(), buffer->uses.end(), 0u) > 0;
}

}  // namespace

namespace metalcore::metal_runtime {

void allocated(void* address, size_t bytes) {
  // Where memory is short, PyTorch waits for the stream.
  require_off_queue("an allocation");
  if (!address) return;
  ++allocations_so_far;
  const std::lock_guard lock(mutex);
  Allocation& allocation = allocations[address];
  if (allocation.count++ == 0) allocation.bytes = bytes, allocation.stream = current_stream(), allocation.buffer = nil;
}

bool freed(void* address, void (*release)(void*), void* block) {
  const std::lock_guard lock(mutex);
  const auto at = allocations.find(address);
  if (at == allocations.end() || --at->second.count > 0) return false;
  RuntimeBuffer* buffer = at->second.buffer;
  allocations.erase(at);
  if (!buffer) return false;
  buffer->freed = true;
  for (int stream = 0; stream < kStreams; ++stream)
    if (stream != buffer->stream && buffer->uses[stream])
      fault = "memory of stream " + std::to_string(buffer->stream) + " is freed while a command in flight on stream " +
              std::to_string(stream) + " uses it";
  if (!in_flight(buffer)) return false;
  buffer->releases->push_back({release, block});
  return true;
}

void throw_found() {
  std::string text;
  {
    const std::lock_guard lock(mutex);
    text = std::exchange(fault, {});
  }
  require(text.empty(), text);
}

void* buffer_of(void* address, size_t length) {
  const std::lock_guard lock(mutex);
  const auto at = allocations.find(address);
  require(at != allocations.end(), "a buffer that PyTorch has not allocated");
  Allocation& allocation = at->second;
  require(length <= allocation.bytes, "a storage larger than its memory");
  if (!allocation.buffer) {
    allocation.buffer = [[RuntimeBuffer alloc] init];
    allocation.buffer->address = static_cast<char*>(address);
    allocation.buffer->stream = allocation.stream;
    allocation.buffer->releases = new std::vector<std::pair<void (*)(void*), void*>>;
  }
  allocation.buffer->length = length;
  return allocation.buffer;
}

void require_allocated(const RuntimeBuffer* buffer, const std::string& argument) {
  const std::lock_guard lock(mutex);
  require(!buffer->freed, argument + " is memory that was freed before the dispatch");
}

void begin_use(RuntimeBuffer* buffer, int stream) {
  const std::lock_guard lock(mutex);
  ++buffer->uses[stream];
}

void end_use(const std::vector<RuntimeBuffer*>& buffers, int stream) {
  std::vector<std::pair<void (*)(void*), void*>> releases;
  {
    const std::lock_guard lock(mutex);
    for (RuntimeBuffer* buffer : buffers) {
      --buffer->uses[stream];
      if (in_flight(buffer) || buffer->own) continue;
      releases.insert(releases.end(), buffer->releases->begin(), buffer->releases->end());
      buffer->releases->clear();
    }
  }
  for (const auto& [release, block] : releases) release(block);
}

}  // namespace metalcore::metal_runtime

// The linker sends the backend's look-ups of pipelines here.
#define PIPELINES(prefix) \
  prefix##_ZN9metalcore3mps9pipelinesEPU19objcproto9MTLDevice11objc_objectRKSt6vectorISt17basic_string_viewIcSt11char_traitsIcEESaIS7_EE
using Pipelines = std::vector<const mps::Pipeline*>;
using Kernels = std::vector<std::string_view>;
extern "C" Pipelines PIPELINES(__real_)(id<MTLDevice> device, const Kernels& kernels);
extern "C" Pipelines PIPELINES(__wrap_)(id<MTLDevice> device, const Kernels& kernels) {
  ++look_ups;
  return PIPELINES(__real_)(device, kernels);
}

// Tests call these.
extern "C" __attribute__((visibility("default"))) int metal_runtime_allocations() { return allocations_so_far; }
extern "C" __attribute__((visibility("default"))) int metal_runtime_look_ups() { return look_ups; }
