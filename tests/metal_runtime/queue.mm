// Command queues and command buffers that a program makes for itself. What is committed runs when somebody waits for
// it.
//
// The environment makes it a worse machine:
//   METAL_RUNTIME_FAILS=<a>   command buffers fail in which a kernel's name begins so
#import "commands.h"

#include <atomic>
#include <cstdlib>
#include <memory>

using namespace metalcore;
using metal_runtime::require;

namespace {

std::atomic<int> made;

struct QueueEncoding final : metal_runtime::Encoding {
  using Encoding::Encoding;

  void require_usable() const override { require(!ended, "an encoder is used after endEncoding"); }
  void count(const std::string& kernel) override { work.add(kernel); }
  void use(const std::vector<RuntimeBuffer*>& buffers, const std::string&) override {
    for (RuntimeBuffer* buffer : buffers) [buffer retain];
  }
  void end() override {
    require(!ended, "endEncoding is called twice");
    ended = true;
  }

  metal_runtime::Work work;  // an encoder has all that its command buffer has
};

bool fails(const std::vector<metal_runtime::Command>& commands) {
  const char* beginning = std::getenv("METAL_RUNTIME_FAILS");
  for (const metal_runtime::Command& command : commands)
    if (beginning && std::string(command.launch.kernel.kernel->name).rfind(beginning, 0) == 0) return true;
  return false;
}

}  // namespace

@interface RuntimeCommandBuffer : NSObject <MTLCommandBuffer> {
 @public
  std::vector<metal_runtime::Command>* commands;
  std::shared_ptr<QueueEncoding>* encoding;
  id<MTLComputeCommandEncoder> encoder;
  std::string* failure;  // empty: none
  bool committed, completed;
}
@end

@implementation RuntimeCommandBuffer
- (instancetype)init {
  commands = new std::vector<metal_runtime::Command>;
  encoding = new std::shared_ptr<QueueEncoding>;
  failure = new std::string;
  return self;
}
- (id<MTLComputeCommandEncoder>)computeCommandEncoder {
  require(!committed, "an encoder of a command buffer that is committed");
  require(!encoder, "a second encoder of a command buffer, which this runtime does not have");
  *encoding = std::make_shared<QueueEncoding>(*commands);
  encoder = metal_runtime::encoder_for_block(*encoding);
  return [[encoder retain] autorelease];
}
- (void)commit {
  require(!committed, "a command buffer is committed twice");
  require(!*encoding || (*encoding)->ended, "a command buffer is committed while its encoder is open");
  committed = true;
}
- (void)waitUntilCompleted {
  require(committed, "a wait for a command buffer that is not committed");
  if (completed) return;
  completed = true;
  if (fails(*commands)) *failure = "Caused GPU Timeout Error (00000002)";
  try {
    for (const metal_runtime::Command& command : *commands)
      if (failure->empty()) simulator::execute(command.launch);
  } catch (const std::exception& error) {
    *failure = error.what();
  }
}
- (MTLCommandBufferStatus)status {
  constexpr auto kCommitted = static_cast<MTLCommandBufferStatus>(2), kError = static_cast<MTLCommandBufferStatus>(5);
  if (!completed) return committed ? kCommitted : static_cast<MTLCommandBufferStatus>(0);
  return failure->empty() ? MTLCommandBufferStatusCompleted : kError;
}
- (NSError*)error {
  return failure->empty() ? nil : metal_runtime::error(*failure);
}
- (void)dealloc {
  require(!*encoding || (*encoding)->ended, "a command encoder is deallocated without endEncoding");
  for (const metal_runtime::Command& command : *commands)
    for (RuntimeBuffer* buffer : command.buffers) [buffer release];
  if (encoder) metal_runtime::block_is_over(encoder);
  [encoder release];
  delete commands;
  delete encoding;
  delete failure;
  [super dealloc];
}
@end

@interface RuntimeQueue : NSObject <MTLCommandQueue>
@end

@implementation RuntimeQueue
- (id<MTLCommandBuffer>)commandBuffer {
  return [[[RuntimeCommandBuffer alloc] init] autorelease];
}
@end

namespace metalcore::metal_runtime {

int buffers();

id<MTLCommandQueue> new_queue() {
  ++made;
  return [[RuntimeQueue alloc] init];
}

int buffers_and_queues() { return made + buffers(); }

}  // namespace metalcore::metal_runtime
