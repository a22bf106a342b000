// Metal's gpu::Backend. It encodes a recording on PyTorch's MPS stream, asks the stream to commit where a command
// buffer would become too long, and does not wait.
#include "../../gpu/backend.h"
#import "device.h"
#import "encoder.h"
#import "stream.h"

#import <Foundation/Foundation.h>

#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <string_view>
#include <vector>

namespace metalcore::mps {

CommandBuffer& command_buffer(const at::mps::MPSStream* stream) {
  static std::mutex mutex;  // each stream has a queue of its own
  static auto& of_streams = *new std::map<const at::mps::MPSStream*, CommandBuffer>;
  const std::lock_guard lock(mutex);
  return of_streams[stream];
}

namespace {

struct Work {
  at::mps::MPSStream* stream;
  const gpu::Recording& recording;
  size_t first, end;
  const Pipeline* const* pipelines;  // from that of the first dispatch on
  std::exception_ptr error;          // libdispatch cannot be unwound
};

class StreamCommands final : public OpenCommands {
 public:
  explicit StreamCommands(at::mps::MPSStream* stream) : stream_(stream), work_(command_buffer(stream)) {}
  id<MTLComputeCommandEncoder> encoder() override { return stream_->commandEncoder(); }
  void commit() override { stream_->synchronize(at::mps::SyncType::COMMIT); }
  CommandBuffer& work() override { return work_; }

 private:
  at::mps::MPSStream* const stream_;
  CommandBuffer& work_;
};

void run(void* context) {
  Work& work = *static_cast<Work*>(context);
  @autoreleasepool {
    try {
      StreamCommands commands(work.stream);
      encode(commands, work.recording, work.first, work.end, work.pipelines);
    } catch (...) {
      work.error = std::current_exception();
    }
  }
}

// The stream belongs to this thread, so the queue must not ask for it.
at::mps::MPSStream* current_stream() {
  at::mps::MPSStream* const stream = at::mps::getCurrentMPSStream();
  return stream;
}

void encode_on_queue(Work work) {
  dispatch_sync_f(torch::mps::get_dispatch_queue(), &work, run);
  if (work.error) std::rethrow_exception(work.error);
}

class PreparedRecording final : public gpu::Prepared {
 public:
  explicit PreparedRecording(const gpu::Recording& recording)
      : recording_(recording), pipelines_(made_pipelines(recording, 0, current_stream()->device())) {}

  void submit(size_t first, size_t end) override {
    encode_on_queue({current_stream(), recording_, first, end, pipelines_.data() + first, nullptr});
  }

 private:
  const gpu::Recording& recording_;
  const std::vector<const Pipeline*> pipelines_;
};

class MetalBackend final : public gpu::Backend {
 public:
  std::string_view device_type() const override { return "mps"; }
  std::string_view family() override { return gpu_family(); }
  uint32_t cores() override { return gpu_cores(); }
  bool bounds_work() const override { return true; }

  void submit(int, const gpu::Recording& recording, size_t first) override {
    at::mps::MPSStream* const stream = current_stream();
    const std::vector<const Pipeline*> pipelines = made_pipelines(recording, first, stream->device());
    encode_on_queue({stream, recording, first, recording.dispatches().size(), pipelines.data(), nullptr});
  }

  std::unique_ptr<gpu::Prepared> prepare(int, const gpu::Recording& recording) override {
    return std::make_unique<PreparedRecording>(recording);
  }
};

MetalBackend backend;
const gpu::BackendRegistration registered(backend);

}  // namespace
}  // namespace metalcore::mps
