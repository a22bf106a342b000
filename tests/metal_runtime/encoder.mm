// A compute encoder: it records dispatches, each validated with what is bound, and runs them when it is ended.
#import "runtime.h"

#include "../../csrc/backends/simulator/launch.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <set>
#include <vector>

using namespace metalcore;
using metal_runtime::require;

namespace {

using Bytes = std::vector<char>;

struct Slot {
  enum { kNothing, kBuffer, kBytes } kind = kNothing;
  RuntimeBuffer* buffer = nil;
  size_t offset = 0;
  std::shared_ptr<Bytes> bytes;
};

struct Recorded {
  simulator::Launch launch;
  std::vector<std::shared_ptr<Bytes>> bytes;
  std::vector<std::unique_ptr<std::vector<simulator::Embedded>>> embedded;
};

struct State {
  bool open = true;
  RuntimePipeline* pipeline = nil;
  std::array<Slot, simulator::kMaximumBuffers> slots;
  std::array<uint32_t, simulator::kMaximumBuffers> threadgroup_lengths = {};
  std::set<RuntimeBuffer*> resident;
  std::vector<Recorded> recorded;
};

// The buffers whose addresses this thread has asked for: a kernel may get them as bytes.
thread_local std::set<RuntimeBuffer*> addressed;

std::string at_index(NSUInteger index) { return " at index " + std::to_string(index); }

// What Metal wants an offset to be a multiple of: the alignment of the kernel's type.
size_t alignment(const msl_abi::Argument& argument) {
  const size_t size = std::max(argument.element_size, 1u);
  return std::min<size_t>(size & -size, 16);
}

// The memory behind each address in an argument's bytes; the kernel reaches it without a binding, so it must be resident.
std::vector<simulator::Embedded> embedded_in(const Bytes& bytes, const State& state, const std::string& argument) {
  std::vector<simulator::Embedded> found;
  for (size_t at = 0; at + sizeof(char*) <= bytes.size(); at += sizeof(char*)) {
    char* address;
    std::memcpy(&address, bytes.data() + at, sizeof address);
    for (RuntimeBuffer* buffer : addressed)
      if (address >= buffer->address && address < buffer->address + std::max<size_t>(buffer->length, 1)) {
        require(state.resident.count(buffer), argument + " holds the address of a buffer without useResource");
        found.push_back({at, buffer->address, buffer->length});
      }
  }
  return found;
}

}  // namespace

@interface RuntimeEncoder : NSObject <MTLComputeCommandEncoder> {
 @public
  State* state;
}
@end

@implementation RuntimeEncoder
- (void)dealloc {
  delete state;
  [super dealloc];
}

- (id<MTLDevice>)device {
  return metal_runtime::device();
}

- (Slot&)slot:(NSUInteger)index {
  metal_runtime::require_on_queue();
  require(state->open, "an encoder is used after it was ended");
  require(index < simulator::kMaximumBuffers, "an argument" + at_index(index) + "; indices go up to 30");
  return state->slots[index];
}

- (void)setComputePipelineState:(id<MTLComputePipelineState>)pipeline {
  [self slot:0];
  require(pipeline != nil, "no pipeline state");
  state->pipeline = static_cast<RuntimePipeline*>(pipeline);
  // Metal keeps what is bound; that a kernel relies on what the one before had is a fault of ours.
  state->slots.fill({});
  state->threadgroup_lengths.fill(0);
}

- (void)setBytes:(const void*)bytes length:(NSUInteger)length atIndex:(NSUInteger)index {
  Slot& slot = [self slot:index];
  require(length > 0 && length <= 4096, std::to_string(length) + " bytes" + at_index(index) + "; from 1 to 4096 are allowed");
  const char* content = static_cast<const char*>(bytes);
  slot = {Slot::kBytes, nil, 0, std::make_shared<Bytes>(content, content + length)};
}

- (void)setBuffer:(id<MTLBuffer>)buffer offset:(NSUInteger)offset atIndex:(NSUInteger)index {
  Slot& slot = [self slot:index];
  RuntimeBuffer* bound = static_cast<RuntimeBuffer*>(buffer);
  require(!bound || offset <= bound->length, "offset " + std::to_string(offset) + at_index(index) + " lies outside its buffer");
  slot = {Slot::kBuffer, bound, offset, nullptr};
}

- (void)setThreadgroupMemoryLength:(NSUInteger)length atIndex:(NSUInteger)index {
  [self slot:index];
  require(length % 16 == 0, std::to_string(length) + " bytes of threadgroup memory, which is no multiple of 16");
  state->threadgroup_lengths[index] = static_cast<uint32_t>(length);
}

- (void)useResource:(id<MTLResource>)resource usage:(MTLResourceUsage)usage {
  [self slot:0];
  require(usage & MTLResourceUsageRead && usage & MTLResourceUsageWrite, "a buffer that kernels write is used for reading only");
  state->resident.insert(static_cast<RuntimeBuffer*>(resource));
}

- (void)dispatchThreads:(MTLSize)threads threadsPerThreadgroup:(MTLSize)group {
  [self slot:0];
  require(state->pipeline, "a dispatch without a pipeline state");
  const msl_abi::Kernel& kernel = *state->pipeline->kernel;
  const std::string name = "kernel '" + *state->pipeline->name + "': ";
  require(threads.width && threads.height && threads.depth, name + "a dispatch of no threads");
  const NSUInteger size = group.width * group.height * group.depth;
  require(size > 0 && size <= state->pipeline.maxTotalThreadsPerThreadgroup,
          name + "a threadgroup of " + std::to_string(size) + " threads");

  Recorded recorded;
  simulator::Launch& launch = recorded.launch;
  launch.kernel = simulator::find_builtin(*state->pipeline->name, simulator::checking().on);
  launch.threads = {uint32_t(threads.width), uint32_t(threads.height), uint32_t(threads.depth)};
  launch.group = {uint32_t(group.width), uint32_t(group.height), uint32_t(group.depth)};
  launch.threadgroup_lengths = state->threadgroup_lengths;
  for (uint32_t i = 0; i < kernel.argument_count; ++i) {
    const msl_abi::Argument& argument = kernel.arguments[i];
    if (argument.kind != msl_abi::kBuffer) continue;
    const std::string which = name + "'" + argument.name + "'" + at_index(argument.index);
    const Slot& slot = state->slots[argument.index];
    simulator::Binding& binding = launch.buffers[argument.index];
    require(slot.kind != Slot::kNothing, which + " is not bound");
    if (slot.kind == Slot::kBytes) {
      recorded.bytes.push_back(slot.bytes);
      recorded.embedded.push_back(std::make_unique<std::vector<simulator::Embedded>>(embedded_in(*slot.bytes, *state, which)));
      binding = {simulator::Binding::kBytes, slot.bytes->data(), slot.bytes->size(), nullptr, recorded.embedded.back().get()};
    } else {
      require(slot.offset % alignment(argument) == 0, which + " has an offset of " + std::to_string(slot.offset) + " bytes, no multiple of " +
                                                          std::to_string(alignment(argument)));
      binding.kind = simulator::Binding::kBuffer;
      if (slot.buffer) binding.address = slot.buffer->address + slot.offset, binding.size = slot.buffer->length - slot.offset;
    }
  }
  state->recorded.push_back(std::move(recorded));
}

- (void)dispatchThreadgroups:(MTLSize)groups threadsPerThreadgroup:(MTLSize)group {
  [self dispatchThreads:MTLSizeMake(groups.width * group.width, groups.height * group.height, groups.depth * group.depth)
      threadsPerThreadgroup:group];
}
@end

namespace metalcore::metal_runtime {

void address_taken(id<MTLBuffer> buffer) { addressed.insert(static_cast<RuntimeBuffer*>(buffer)); }

id<MTLComputeCommandEncoder> open_encoder() {
  RuntimeEncoder* encoder = [[RuntimeEncoder alloc] init];
  encoder->state = new State;
  return encoder;
}

void end_encoder(id<MTLComputeCommandEncoder> ended) {
  State& state = *static_cast<RuntimeEncoder*>(ended)->state;
  state.open = false;
  addressed.clear();
  // The object stays, so that a use after the end is seen as such; its commands go.
  const std::vector<Recorded> commands = std::move(state.recorded);
  for (const Recorded& command : commands) simulator::execute(command.launch);
}

}  // namespace metalcore::metal_runtime
