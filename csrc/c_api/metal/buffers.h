// The process's MTLBuffers for C, by their memory. All lie in memory that the CPU and the GPU share.
#pragma once

#import <Metal/Metal.h>

#include <cstddef>
#include <cstdint>

namespace metalcore::c_api {

struct Buffer {
  id<MTLBuffer> object = nil;
  uintptr_t begin = 0;
};

// The memory of a new buffer. Throws std::bad_alloc.
void* new_buffer(id<MTLDevice> device, size_t bytes);
// Releases the buffer whose memory begins here; false where none does.
bool free_buffer(void* memory);
// The buffer in whose memory the address lies; nil where it lies in none. A buffer serves all contexts.
Buffer find_buffer(const void* address);

}  // namespace metalcore::c_api
