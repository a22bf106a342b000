// A compute encoder: it validates each dispatch with what is bound, and records it.
#import "commands.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <set>
#include <vector>

using namespace metalcore;
using metal_runtime::require;

namespace {

using metal_runtime::Bytes;
using metal_runtime::Command;

struct Slot {
  // Metal keeps bindings from one dispatch to the next, also those of PyTorch's ops: a stale one would be used.
  enum { kStale, kBuffer, kBytes } kind = kStale;
  RuntimeBuffer* buffer = nil;
  size_t offset = 0;
  std::shared_ptr<Bytes> bytes;
};

struct Bound {
  RuntimePipeline* pipeline = nil;
  std::array<Slot, simulator::kMaximumBuffers> slots;
  std::array<uint32_t, simulator::kMaximumBuffers> threadgroup_lengths = {};
  std::set<RuntimeBuffer*> resident;
  bool dispatched = false, barrier = false;  // in this block; no dispatch has come since the barrier
};

// The buffers whose addresses this thread has asked for: it may pass them to a kernel as bytes.
thread_local std::set<RuntimeBuffer*> addressed;

std::string at_index(NSUInteger index) { return " at index " + std::to_string(index); }

// Returns the alignment of the argument's type: Metal wants an offset to be a multiple of it.
size_t alignment(const msl_abi::Argument& argument) {
  const size_t size = std::max(argument.element_size, 1u);
  return std::min<size_t>(size & -size, 16);
}

// Returns the memory behind each address in an argument's bytes. It has no binding, so it must be resident.
std::vector<simulator::Embedded> embedded_in(const Bytes& bytes, const Bound& bound, const std::string& argument,
                                             Command& command) {
  std::vector<simulator::Embedded> found;
  for (size_t at = 0; at + sizeof(char*) <= bytes.size(); at += sizeof(char*)) {
    char* address;
    std::memcpy(&address, bytes.data() + at, sizeof address);
    for (RuntimeBuffer* buffer : addressed)
      if (address >= buffer->address && address < buffer->address + std::max<size_t>(buffer->length, 1)) {
        require(bound.resident.count(buffer), argument + " holds the address of a buffer without useResource");
        command.buffers.push_back(buffer);
        found.push_back({at, buffer->address, buffer->length});
      }
  }
  return found;
}

}  // namespace

@interface RuntimeEncoder : NSObject <MTLComputeCommandEncoder> {
 @public
  std::shared_ptr<metal_runtime::Encoding>* encoding;
  Bound* bound;  // null once the block is over
}
@end

@implementation RuntimeEncoder
- (id<MTLDevice>)device {
  return metal_runtime::device();
}

- (MTLDispatchType)dispatchType {
  return (*encoding)->concurrent ? MTLDispatchTypeConcurrent : static_cast<MTLDispatchType>(0);
}

- (void)memoryBarrierWithScope:(MTLBarrierScope)scope {
  [self slot:0];
  require(scope == MTLBarrierScopeBuffers, "a barrier that is not for buffers");
  (*encoding)->barrier = bound->barrier = true;
}

- (void)endEncoding {
  (*encoding)->end();
}

- (void)dealloc {
  delete encoding;
  delete bound;
  [super dealloc];
}

- (Slot&)slot:(NSUInteger)index {
  (*encoding)->require_usable();
  require(bound, "an encoder is used after the block that fetched it");
  require(index < simulator::kMaximumBuffers, "an argument" + at_index(index) + "; indices go up to 30");
  return bound->slots[index];
}

- (void)setComputePipelineState:(id<MTLComputePipelineState>)pipeline {
  [self slot:0];
  require(pipeline != nil, "no pipeline state");
  bound->pipeline = static_cast<RuntimePipeline*>(pipeline);
  bound->slots.fill({});
  bound->threadgroup_lengths.fill(0);
  bound->resident.clear();
}

- (void)setBytes:(const void*)bytes length:(NSUInteger)length atIndex:(NSUInteger)index {
  Slot& slot = [self slot:index];
  require(length > 0 && length <= 4096,
          std::to_string(length) + " bytes" + at_index(index) + "; from 1 to 4096 are allowed");
  const char* content = static_cast<const char*>(bytes);
  slot = {Slot::kBytes, nil, 0, std::make_shared<Bytes>(content, content + length)};
}

- (void)setBuffer:(id<MTLBuffer>)buffer offset:(NSUInteger)offset atIndex:(NSUInteger)index {
  Slot& slot = [self slot:index];
  RuntimeBuffer* memory = static_cast<RuntimeBuffer*>(buffer);
  require(!memory || offset <= memory->length,
          "offset " + std::to_string(offset) + at_index(index) + " lies outside its buffer");
  slot = {Slot::kBuffer, memory, offset, nullptr};
}

- (void)setThreadgroupMemoryLength:(NSUInteger)length atIndex:(NSUInteger)index {
  [self slot:index];
  require(length % 16 == 0, std::to_string(length) + " bytes of threadgroup memory, which is no multiple of 16");
  bound->threadgroup_lengths[index] = static_cast<uint32_t>(length);
}

- (void)useResources:(const id<MTLResource>[])resources count:(NSUInteger)count usage:(MTLResourceUsage)usage {
  [self slot:0];
  require(usage & MTLResourceUsageRead && usage & MTLResourceUsageWrite,
          "a buffer that kernels write is used for reading only");
  for (NSUInteger i = 0; i < count; ++i) {
    require(resources[i] != nil, "no buffer among those that kernels use");
    bound->resident.insert(static_cast<RuntimeBuffer*>(resources[i]));
  }
}

- (void)dispatchThreads:(MTLSize)threads threadsPerThreadgroup:(MTLSize)group {
  [self slot:0];
  require(bound->pipeline, "a dispatch without a pipeline state");
  const msl_abi::Kernel& kernel = *bound->pipeline->kernel;
  const std::string name = "kernel '" + *bound->pipeline->name + "': ";
  require(threads.width && threads.height && threads.depth, name + "a dispatch of no threads");
  const NSUInteger size = group.width * group.height * group.depth;
  require(size > 0 && size <= bound->pipeline.maxTotalThreadsPerThreadgroup,
          name + "a threadgroup of " + std::to_string(size) + " threads");

  size_t memory = bound->pipeline.staticThreadgroupMemoryLength;
  for (uint32_t length : bound->threadgroup_lengths) memory += length;
  require(memory <= metal_runtime::device().maxThreadgroupMemoryLength,
          name + std::to_string(memory) + " bytes of threadgroup memory");

  Command command;
  simulator::Launch& launch = command.launch;
  launch.kernel = simulator::find_kernel(*bound->pipeline->name, simulator::checking().on);
  launch.threads = {uint32_t(threads.width), uint32_t(threads.height), uint32_t(threads.depth)};
  launch.group = {uint32_t(group.width), uint32_t(group.height), uint32_t(group.depth)};
  launch.threadgroup_lengths = bound->threadgroup_lengths;
  for (uint32_t i = 0; i < kernel.argument_count; ++i) {
    const msl_abi::Argument& argument = kernel.arguments[i];
    const std::string which = name + "'" + argument.name + "'" + at_index(argument.index);
    if (argument.kind != msl_abi::kBuffer) {
      require(bound->threadgroup_lengths[argument.index] > 0, which + " has no threadgroup memory");
      continue;
    }
    const Slot& slot = bound->slots[argument.index];
    simulator::Binding& binding = launch.buffers[argument.index];
    require(slot.kind == Slot::kBytes || slot.buffer, which + " is not bound");
    const size_t given = slot.buffer ? slot.buffer->length - slot.offset : slot.bytes->size();
    require(!argument.by_reference || given >= argument.element_size,
            which + " has " + std::to_string(given) + " bytes, and its type " + std::to_string(argument.element_size));
    if (slot.buffer) command.buffers.push_back(slot.buffer);
    if (slot.kind == Slot::kBytes) {
      command.bytes.push_back(slot.bytes);
      command.embedded.push_back(
          std::make_unique<std::vector<simulator::Embedded>>(embedded_in(*slot.bytes, *bound, which, command)));
      binding = {simulator::Binding::kBytes, slot.bytes->data(), slot.bytes->size(), nullptr,
                 command.embedded.back().get()};
    } else {
      require(slot.offset % alignment(argument) == 0, which + " has an offset of " + std::to_string(slot.offset) +
                                                          " bytes, no multiple of " +
                                                          std::to_string(alignment(argument)));
      binding.kind = simulator::Binding::kBuffer;
      if (slot.buffer) {
        binding.address = slot.buffer->address + slot.offset;
        binding.size = slot.buffer->length - slot.offset;
      }
    }
  }
  require(!(*encoding)->concurrent || bound->dispatched || bound->barrier,
          name + "no barrier separates it from PyTorch's dispatches on a concurrent encoder");
  (*encoding)->count(*bound->pipeline->name);
  command.after_barrier = std::exchange((*encoding)->barrier, !(*encoding)->concurrent);
  bound->dispatched = true, bound->barrier = false;
  (*encoding)->use(command.buffers, name + "a buffer");
  (*encoding)->commands.push_back(std::move(command));
}

- (void)dispatchThreadgroups:(MTLSize)groups threadsPerThreadgroup:(MTLSize)group {
  const MTLSize threads =
      MTLSizeMake(groups.width * group.width, groups.height * group.height, groups.depth * group.depth);
  [self dispatchThreads:threads threadsPerThreadgroup:group];
}
@end

// PyTorch's, during a graph capture. Here it only has the name.
@interface MPSRecordingEncoder : RuntimeEncoder
@end

@implementation MPSRecordingEncoder
@end

namespace metalcore::metal_runtime {

void address_taken(id<MTLBuffer> buffer) { addressed.insert(static_cast<RuntimeBuffer*>(buffer)); }

id<MTLComputeCommandEncoder> encoder_for_block(std::shared_ptr<Encoding> encoding) {
  RuntimeEncoder* encoder = encoding->captured ? [[MPSRecordingEncoder alloc] init] : [[RuntimeEncoder alloc] init];
  encoder->encoding = new std::shared_ptr<Encoding>(std::move(encoding));
  encoder->bound = new Bound;
  return encoder;
}

// The object stays, so that a later use can be detected.
void block_is_over(id<MTLComputeCommandEncoder> ended) {
  RuntimeEncoder* encoder = static_cast<RuntimeEncoder*>(ended);
  const std::unique_ptr<Bound> bound(std::exchange(encoder->bound, nullptr));
  addressed.clear();
  require(!(*encoder->encoding)->concurrent || !bound->dispatched || bound->barrier,
          "no barrier separates PyTorch's next dispatches from a block's on a concurrent encoder");
}

}  // namespace metalcore::metal_runtime
