// Metal, and PyTorch's Metal stream, for tests on Linux: as much of them as csrc/backends/mps uses. Dispatches are
// recorded, validated as Metal's API validation does, and run by the simulator's executor once the block on the
// stream's queue is over.
#pragma once

#import <Metal/Metal.h>

#include <stdexcept>
#include <string>

namespace metalcore::metal_runtime {

// What Metal's API validation would end the process for.
struct Misuse : std::logic_error {
  explicit Misuse(const std::string& what) : std::logic_error("Metal API misuse: " + what) {}
};

inline void require(bool condition, const std::string& otherwise) {
  if (!condition) throw Misuse(otherwise);
}

NSString* string(const std::string& text);
NSError* error(const std::string& description);
std::string text(NSString* string);
std::string path(NSURL* url);

id<MTLDevice> device();
// The buffer that is the storage at this address.
void* buffer_of(void* address, size_t length);
void address_taken(id<MTLBuffer> buffer);

id<MTLComputeCommandEncoder> open_encoder();
// Ends the encoder and runs what it recorded. PyTorch does so whenever it likes to; here, after each block.
void end_encoder(id<MTLComputeCommandEncoder> encoder);
void require_on_queue();
void set_current_stream(int stream);

}  // namespace metalcore::metal_runtime

@interface RuntimeBuffer : NSObject <MTLBuffer> {
 @public
  char* address;
  size_t length;
}
@end

namespace msl_abi {
struct Kernel;
}

@interface RuntimeFunction : NSObject <MTLFunction> {
 @public
  std::string* name;
}
@end

@interface RuntimePipeline : NSObject <MTLComputePipelineState> {
 @public
  std::string* name;
  const msl_abi::Kernel* kernel;
}
@end
