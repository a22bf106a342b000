// PyTorch's Metal streams, the queues on which they are encoded, and when they commit.
#import "../../csrc/backends/mps/stream.h"
#import "commands.h"

#include "../../csrc/simulated_device/queue.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <iterator>
#include <mutex>
#include <set>
#include <sstream>

using namespace metalcore;
using metal_runtime::require;
using simulator::Launch;

extern "C" int PyGILState_Check(void);

struct dispatch_queue_s {
  std::mutex mutex;
  int stream;
};

namespace {

struct Stream final : at::mps::MPSStream {
  dispatch_queue_s queue;
  std::vector<metal_runtime::Command> commands;       // of the open command buffer
  std::vector<metal_runtime::Command> committed;      // they have not run yet
  metal_runtime::Work work;                           // of the open command buffer
  std::shared_ptr<metal_runtime::Encoding> encoding;  // the open encoder; null where none is open
  id<MTLComputeCommandEncoder> encoder = nil;         // of the block that runs
};

Stream* streams() {
  static auto& all = *new std::array<Stream, metal_runtime::kStreams>;
  static std::once_flag numbered;
  std::call_once(numbered, [] {
    for (int i = 0; i < metal_runtime::kStreams; ++i) all[i].queue.stream = i;
  });
  return all.data();
}

thread_local int current = 0;
thread_local dispatch_queue_t running = nullptr;  // the queue whose block this thread is in

// A record of events, for tests.
struct Counts {
  std::mutex mutex;
  std::array<int, metal_runtime::kStreams> encoders = {}, dispatches = {}, commits = {};
  std::set<std::string> kernels;
} counts;

// What tests choose: encoders that run dispatches in another order, up to a barrier; a graph capture.
std::atomic<bool> concurrent = false, captured = false;

struct StreamEncoding final : metal_runtime::Encoding {
  explicit StreamEncoding(Stream& stream)
      : Encoding(stream.commands, ::concurrent, ::captured), stream(stream), number(stream.queue.stream) {}

  void require_usable() const override {
    metal_runtime::require_on_queue();
    require(!ended, "an encoder is used after PyTorch ended it");
  }

  void count(const std::string& kernel) override {
    stream.work.add(kernel);
    const std::lock_guard lock(counts.mutex);
    ++counts.dispatches[number];
    counts.kernels.insert(kernel);
  }

  void use(const std::vector<RuntimeBuffer*>& buffers, const std::string& what) override {
    for (RuntimeBuffer* buffer : buffers) metal_runtime::require_allocated(buffer, what);
    for (RuntimeBuffer* buffer : buffers) metal_runtime::begin_use(buffer, number);
  }

  void end() override { require(false, "PyTorch's encoder is ended by somebody else"); }

  Stream& stream;
  const int number;
};

// Commands that no barrier separates may run in any order: it is the reverse one.
std::vector<const metal_runtime::Command*> in_order(const std::vector<metal_runtime::Command>& commands) {
  std::vector<const metal_runtime::Command*> order;
  size_t barrier = 0;
  for (const metal_runtime::Command& command : commands) {
    if (command.after_barrier) barrier = order.size();
    order.insert(order.begin() + static_cast<std::ptrdiff_t>(barrier), &command);
  }
  return order;
}

// Ends the encoder and commits.
void commit(Stream& stream) {
  if (stream.encoding) stream.encoding->ended = true;
  stream.encoding = nullptr;
  stream.work = {};
  std::move(stream.commands.begin(), stream.commands.end(), std::back_inserter(stream.committed));
  stream.commands.clear();
}

}  // namespace

extern "C" void __real__ZN9metalcore9simulator7executeERKNS0_6LaunchE(const Launch& launch);
// The linker sends the executor's other dispatches here: kernels of compile_shader go to the same stream.
extern "C" void __wrap__ZN9metalcore9simulator7executeERKNS0_6LaunchE(const Launch& launch) {
  metal_runtime::finish(current);
  __real__ZN9metalcore9simulator7executeERKNS0_6LaunchE(launch);
}

namespace metalcore::metal_runtime {

int current_stream() { return current; }

void set_current_stream(int stream) { current = stream; }

void require_on_queue() { require(running, "an encoder is used outside of the stream's queue"); }

void require_off_queue(const std::string& what) {
  require(!running, what + " in a block on a stream's queue, which may wait for that block for ever");
}

void require_time(const std::string& what) {
  require_off_queue(what);
  require(!PyGILState_Check(), what + " while the thread has Python's GIL");
}

void finish(int number) {
  require_off_queue("work of PyTorch");
  throw_found();
  Stream& stream = streams()[number];
  std::vector<Command> commands;
  std::exception_ptr error;
  {
    const std::lock_guard lock(stream.queue.mutex);
    commit(stream);
    commands.swap(stream.committed);
    try {
      for (const Command* command : in_order(commands))
        __real__ZN9metalcore9simulator7executeERKNS0_6LaunchE(command->launch);
    } catch (...) {
      error = std::current_exception();
    }
  }
  for (const Command& command : commands) end_use(command.buffers, number);
  if (error) std::rethrow_exception(error);
}

}  // namespace metalcore::metal_runtime

id<MTLComputeCommandEncoder> at::mps::MPSStream::commandEncoder() {
  Stream& stream = *static_cast<Stream*>(this);
  require(running == &stream.queue, "commandEncoder() is called outside of the stream's queue");
  if (!stream.encoding) {
    [[[NSObject alloc] init] autorelease];  // Metal's computeCommandEncoder is autoreleased, and PyTorch retains it
    stream.encoding = std::make_shared<StreamEncoding>(stream);
    const std::lock_guard lock(counts.mutex);
    ++counts.encoders[stream.queue.stream];
  }
  if (!stream.encoder) stream.encoder = metal_runtime::encoder_for_block(stream.encoding);
  return stream.encoder;
}

id<MTLDevice> at::mps::MPSStream::device() const { return metal_runtime::device(); }

// The GPU is as slow as it may be: what is committed runs when somebody waits for it.
void at::mps::MPSStream::synchronize(SyncType type) {
  Stream& stream = *static_cast<Stream*>(this);
  require(running == &stream.queue, "synchronize() is called outside of the stream's queue");
  require(type == SyncType::COMMIT, "synchronize() is asked for more than a commit");
  if (stream.encoder) metal_runtime::block_is_over(std::exchange(stream.encoder, nil));
  commit(stream);
  const std::lock_guard lock(counts.mutex);
  ++counts.commits[stream.queue.stream];
}

at::mps::MPSStream* at::mps::getCurrentMPSStream() {
  // The block may run on another thread, whose stream is another.
  require(!running, "getCurrentMPSStream() is called on a stream's queue");
  return &streams()[current];
}

dispatch_queue_t torch::mps::get_dispatch_queue() {
  require(!running, "get_dispatch_queue() is called on a stream's queue");
  return &streams()[current].queue;
}

void dispatch_sync_f(dispatch_queue_t queue, void* context, void (*work)(void*)) {
  require(running != queue, "dispatch_sync onto the queue that is running waits for ever");
  require(queue->stream == current, "work for stream " + std::to_string(queue->stream) + " where stream " +
                                        std::to_string(current) + " is the current one");
  metal_runtime::throw_found();
  Stream& stream = streams()[queue->stream];
  const std::lock_guard lock(queue->mutex);
  const dispatch_queue_t outer = std::exchange(running, queue);
  // As in libdispatch, no exception may pass through here.
  [](void (*call)(void*), void* with) noexcept { call(with); }(work, context);
  running = outer;
  if (stream.encoder) metal_runtime::block_is_over(std::exchange(stream.encoder, nil));
}

// Tests call these.
#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED void metal_runtime_set_stream(int stream) { metal_runtime::set_current_stream(stream); }
EXPORTED void metal_runtime_set_concurrent(int on) { concurrent = on; }
EXPORTED void metal_runtime_set_captured(int on) { captured = on; }
EXPORTED void metal_runtime_set_slowness(double factor) { metal_runtime::set_slowness(factor); }
EXPORTED int metal_runtime_commits(int stream) {
  const std::lock_guard lock(counts.mutex);
  return counts.commits[stream];
}

// "<encoders opened on each stream>;<dispatches on each>;<names of the kernels dispatched>"
EXPORTED const char* metal_runtime_counts() {
  static thread_local std::string text;
  std::ostringstream out;
  const std::lock_guard lock(counts.mutex);
  for (int count : counts.encoders) out << count << ' ';
  out << ';';
  for (int count : counts.dispatches) out << count << ' ';
  out << ';';
  for (const std::string& kernel : counts.kernels) out << kernel << ' ';
  text = out.str();
  return text.c_str();
}

EXPORTED const simulated_device::Queue metal_runtime_queue = {
    [](bool all) {
      for (int stream = 0; stream < metal_runtime::kStreams; ++stream)
        if (all || stream == current) metal_runtime::finish(stream);
    },
    metal_runtime::allocated,
    metal_runtime::freed,
};
