// PyTorch's Metal streams, and the queues on which they are encoded.
#import "../../csrc/backends/mps/stream.h"
#import "runtime.h"

#include <mutex>

struct dispatch_queue_s {
  std::mutex mutex;
  id<MTLComputeCommandEncoder> encoder = nil;  // of the stream whose queue this is
};

namespace {

struct Stream final : at::mps::MPSStream {
  dispatch_queue_s queue;
};

Stream streams[2];  // the default one, and one of the pool
thread_local int current = 0;
thread_local dispatch_queue_t running = nullptr;  // the queue whose block this thread is in

}  // namespace

namespace metalcore::metal_runtime {

void require_on_queue() { require(running && running->encoder, "an encoder is used outside of the stream's queue"); }

void set_current_stream(int stream) { current = stream; }

}  // namespace metalcore::metal_runtime

using metalcore::metal_runtime::require;

id<MTLComputeCommandEncoder> at::mps::MPSStream::commandEncoder() {
  dispatch_queue_t own = &static_cast<Stream*>(this)->queue;
  require(running == own, "commandEncoder() is called outside of the stream's queue");
  if (!own->encoder) own->encoder = metalcore::metal_runtime::open_encoder();
  return own->encoder;
}

at::mps::MPSStream* at::mps::getCurrentMPSStream() { return &streams[current]; }

dispatch_queue_t torch::mps::get_dispatch_queue() { return &streams[current].queue; }

void dispatch_sync_f(dispatch_queue_t queue, void* context, void (*work)(void*)) {
  require(running != queue, "dispatch_sync onto the queue that is running waits for ever");
  std::lock_guard lock(queue->mutex);
  const dispatch_queue_t outer = running;
  running = queue;
  // As in libdispatch: nothing may be thrown through here.
  [](void (*call)(void*), void* with) noexcept { call(with); }(work, context);
  running = outer;
  id<MTLComputeCommandEncoder> encoder = queue->encoder;
  queue->encoder = nil;
  if (encoder) metalcore::metal_runtime::end_encoder(encoder);
}
