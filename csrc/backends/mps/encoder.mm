#import "encoder.h"

#include "../../gpu/cost.h"
#include "../../gpu/limits.h"

#import <Foundation/Foundation.h>
#import <objc/runtime.h>

#include <array>
#include <optional>
#include <string>
#include <string_view>

namespace metalcore::mps {
namespace {

id<MTLBuffer> buffer_of(const gpu::BufferView& view) { return static_cast<id<MTLBuffer>>(view.storage); }

MTLSize metal_size(gpu::Size size) { return MTLSizeMake(size.x, size.y, size.z); }

// Stands for tensors without elements and for optional ones that are not there: Metal wants each of a kernel's buffers
// bound. Bytes will not do for those that a kernel may write.
id<MTLBuffer> nothing(id<MTLDevice> device) {
  static id<MTLBuffer> const buffer = [device newBufferWithLength:16 options:MTLResourceStorageModeShared];
  return buffer;
}

size_t rounded_length(uint32_t threadgroup_length) { return (size_t{threadgroup_length} + 15) / 16 * 16; }

// Whether PyTorch records for its graph capture, of which it exports nothing: it is in development (pull request
// 189019). There commandEncoder() returns an object of this class. It keeps the bindings and forwards useResource:, so
// that a replay would reach buffers by address that are not resident.
bool is_captured(id<MTLComputeCommandEncoder> encoder) {
  return std::string_view(object_getClassName(encoder)) == "MPSRecordingEncoder";
}
void check_captured(const gpu::Recording& recording, const gpu::Dispatch& dispatch) {
  for (const gpu::Argument* argument = recording.begin(dispatch); argument != recording.end(dispatch); ++argument)
    if (argument->kind == gpu::Argument::kPointers)
      gpu::refuse(recording.name(dispatch), "addresses of tensors, which a graph capture of PyTorch's cannot replay");
}

// Metal itself would end the process for what this refuses. A pipeline takes fewer threads than kernels do where it
// needs many registers, which only this GPU's compiler knows.
void check(const gpu::Recording& recording, const gpu::Dispatch& dispatch, const Pipeline& pipeline,
           id<MTLDevice> device) {
  const std::string_view name = recording.name(dispatch);
  const uint64_t threads = uint64_t{dispatch.threadgroup.x} * dispatch.threadgroup.y * dispatch.threadgroup.z;
  if (threads > pipeline.max_threads)
    refuse_family(name, "a threadgroup of " + std::to_string(threads) + " threads; its pipeline takes up to " +
                            std::to_string(pipeline.max_threads));
  std::array<size_t, gpu::kMaximumBuffers> lengths = {};
  for (const gpu::Argument* argument = recording.begin(dispatch); argument != recording.end(dispatch); ++argument)
    if (argument->kind == gpu::Argument::kThreadgroup) lengths[argument->index] = rounded_length(argument->count);
  size_t memory = pipeline.static_memory;
  for (size_t length : lengths) memory += length;
  if (const size_t most = device.maxThreadgroupMemoryLength; memory > most)
    refuse_family(name, std::to_string(memory) + " bytes of threadgroup memory; this GPU has " + std::to_string(most));
}

class MetalEncoder {
 public:
  MetalEncoder(id<MTLComputeCommandEncoder> encoder, const gpu::Recording& recording)
      : encoder_(encoder), recording_(recording), concurrent_(encoder.dispatchType == MTLDispatchTypeConcurrent) {}
  // What PyTorch encodes next on a concurrent encoder may depend on these dispatches.
  ~MetalEncoder() { wait_for_dispatches_before(); }
  MetalEncoder(const MetalEncoder&) = delete;

  void encode(const gpu::Dispatch& dispatch, const Pipeline& pipeline) {
    wait_for_dispatches_before();
    [encoder_ setComputePipelineState:pipeline.state];
    for (const gpu::Argument* argument = recording_.begin(dispatch); argument != recording_.end(dispatch); ++argument)
      bind(*argument);
    if (dispatch.threads)
      [encoder_ dispatchThreads:metal_size(dispatch.grid) threadsPerThreadgroup:metal_size(dispatch.threadgroup)];
    else
      [encoder_ dispatchThreadgroups:metal_size(dispatch.grid) threadsPerThreadgroup:metal_size(dispatch.threadgroup)];
  }

  bool captured() const { return is_captured(encoder_); }

 private:
  // A recording's dispatches run in order, and the first one after PyTorch's.
  void wait_for_dispatches_before() {
    if (concurrent_) [encoder_ memoryBarrierWithScope:MTLBarrierScopeBuffers];
  }

  void bind(const gpu::Argument& argument) {
    switch (argument.kind) {
      case gpu::Argument::kBuffer: bind_buffer(argument.index, *recording_.views(argument)); break;
      case gpu::Argument::kBytes:
        [encoder_ setBytes:recording_.bytes(argument) length:argument.count atIndex:argument.index];
        break;
      case gpu::Argument::kPointers: bind_pointers(argument); break;
      case gpu::Argument::kThreadgroup:
        [encoder_ setThreadgroupMemoryLength:rounded_length(argument.count) atIndex:argument.index];
        break;
    }
  }

  void bind_buffer(uint32_t index, const gpu::BufferView& view) {
    id<MTLBuffer> buffer = buffer_of(view);
    [encoder_ setBuffer:buffer ? buffer : nothing([encoder_ device]) offset:view.offset atIndex:index];
  }

  // Sets the buffers' gpuAddress (Metal 3) as bytes.
  void bind_pointers(const gpu::Argument& argument) {
    const gpu::BufferView* const views = recording_.views(argument);
    std::array<uint64_t, gpu::kMaximumPointers> addresses;
    std::array<id<MTLResource>, gpu::kMaximumPointers> reached;
    NSUInteger count = 0;
    for (uint32_t i = 0; i < argument.count; ++i) {
      id<MTLBuffer> buffer = buffer_of(views[i]);
      addresses[i] = buffer ? buffer.gpuAddress + views[i].offset : 0;
      if (buffer) reached[count++] = buffer;
    }
    // The driver cannot see which buffers a kernel reaches by address.
    if (count > 0)
      [encoder_ useResources:reached.data() count:count usage:MTLResourceUsageRead | MTLResourceUsageWrite];
    [encoder_ setBytes:addresses.data() length:argument.count * sizeof(uint64_t) atIndex:argument.index];
  }

  const id<MTLComputeCommandEncoder> encoder_;
  const gpu::Recording& recording_;
  const bool concurrent_;
};

}  // namespace

std::vector<const Pipeline*> made_pipelines(const gpu::Recording& recording, size_t first, id<MTLDevice> device) {
  const std::vector<gpu::Dispatch>& dispatches = recording.dispatches();
  std::vector<std::string_view> names;
  names.reserve(dispatches.size() - first);
  for (size_t i = first; i < dispatches.size(); ++i) names.push_back(recording.name(dispatches[i]));
  std::vector<const Pipeline*> made = pipelines(device, names);
  for (size_t i = first; i < dispatches.size(); ++i) check(recording, dispatches[i], *made[i - first], device);
  return made;
}

void encode(OpenCommands& commands, const gpu::Recording& recording, size_t first, size_t end,
            const Pipeline* const* pipelines) {
  const std::vector<gpu::Dispatch>& dispatches = recording.dispatches();
  std::optional<MetalEncoder> encoder;
  const auto fetch_encoder = [&] { encoder.emplace(commands.encoder(), recording); };
  fetch_encoder();
  if (encoder->captured())
    for (size_t i = first; i < end; ++i) check_captured(recording, dispatches[i]);
  for (size_t i = first; i < end; ++i) {
    if (commands.work().must_end_before(gpu::seconds(recording, dispatches[i]))) {
      encoder.reset();
      commands.commit();
      fetch_encoder();
    }
    encoder->encode(dispatches[i], *pipelines[i - first]);
  }
}

}  // namespace metalcore::mps
