// Metal, and PyTorch's Metal streams, for tests on Linux: the parts that csrc/backends/mps uses. Dispatches are
// validated as Metal's API validation does, recorded, and run by the simulator's executor when the stream commits.
#pragma once

#import <Metal/Metal.h>

#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace metalcore::metal_runtime {

// Thrown where Metal's API validation would end the process, or where PyTorch's streams would go wrong.
struct Misuse : std::logic_error {
  explicit Misuse(const std::string& what) : std::logic_error("Metal API misuse: " + what) {}
};

inline void require(bool condition, const std::string& otherwise) {
  if (!condition) throw Misuse(otherwise);
}

NSString* string(const std::string& text);
NSError* error(const std::string& description);
NSArray* array(id only);  // empty for nil; the caller owns it
std::string text(NSString* string);
std::string path(NSURL* url);

id<MTLDevice> device();
void address_taken(id<MTLBuffer> buffer);
int programs_and_pipelines();  // that were made so far
// Compilers take seconds. Throws Misuse where this thread has no time.
void require_time(const std::string& what);

// Command queues and buffers that a program makes for itself. `nil` where there is no memory.
id<MTLCommandQueue> new_queue() NS_RETURNS_RETAINED;
id<MTLBuffer> new_buffer(size_t length) NS_RETURNS_RETAINED;
size_t largest_buffer();
int buffers_and_queues();  // that were made so far

constexpr int kStreams = 3;  // the default one, and two of the pool
int current_stream();
void set_current_stream(int stream);
void require_on_queue();
void require_off_queue(const std::string& what);
// Runs the recorded dispatches of a stream: PyTorch ends the encoder, commits and waits.
void finish(int stream);

}  // namespace metalcore::metal_runtime

// The buffer of one of PyTorch's storages, which is kept for good, so that a use after the storage's end can be
// detected; or one that a program made, with memory of its own.
@interface RuntimeBuffer : NSObject <MTLBuffer> {
 @public
  char* address;
  size_t length;
  bool own;
  int stream;  // on which PyTorch allocated it
  bool freed;
  std::array<uint32_t, metalcore::metal_runtime::kStreams> uses;  // by commands in flight
  std::vector<std::pair<void (*)(void*), void*>>* releases;       // of memory that was freed in that time
}
@end

namespace metalcore::metal_runtime {

// PyTorch's allocator: memory belongs to the stream on which it was allocated. Later work on that stream may use freed
// memory again, so that stream's commands in flight are safe; those of another stream are not.
void allocated(void* address, size_t bytes);
bool freed(void* address, void (*release)(void*), void* block);
// Throws the fault that freed() has found, since freed() itself must not throw.
void throw_found();
// Returns the buffer of the storage at this address; nil where there is none.
void* buffer_of(void* address, size_t length);
void require_allocated(const RuntimeBuffer* buffer, const std::string& argument);
void begin_use(RuntimeBuffer* buffer, int stream);
void end_use(const std::vector<RuntimeBuffer*>& buffers, int stream);

}  // namespace metalcore::metal_runtime

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
  size_t static_memory;
}
@end
