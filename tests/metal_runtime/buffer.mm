// Buffers: those that a program makes for itself have memory that the CPU shares.
//
// The environment makes it a worse machine:
//   METAL_RUNTIME_LARGEST=<n>   no buffer has more bytes
//   METAL_RUNTIME_MEMORY=<n>    all buffers together have no more bytes
#import "runtime.h"

#include <atomic>
#include <cstdlib>
#include <cstring>

using namespace metalcore;
using metal_runtime::require;

namespace {

constexpr size_t kPage = 16 * 1024;
constexpr int kUnwritten = 0xa5, kFreed = 0x5f;

std::atomic<size_t> in_use;
std::atomic<int> made;

size_t limit(const char* variable) {
  const char* bytes = std::getenv(variable);
  return bytes ? std::strtoull(bytes, nullptr, 10) : size_t{1} << 34;
}

}  // namespace

@implementation RuntimeBuffer
- (uint64_t)gpuAddress {
  metal_runtime::address_taken(self);
  return reinterpret_cast<uint64_t>(address);
}
- (void*)contents {
  require(own, "the CPU asks for the memory of a buffer of PyTorch's, which it may not share");
  return address;
}
- (void)dealloc {
  require(own, "a buffer of PyTorch's is released");
  std::memset(address, kFreed, length);
  std::free(address);
  in_use -= length;
  [super dealloc];
}
@end

namespace metalcore::metal_runtime {

size_t largest_buffer() { return limit("METAL_RUNTIME_LARGEST"); }

id<MTLBuffer> new_buffer(size_t length) {
  require(length > 0 && length <= largest_buffer(), "a buffer of " + std::to_string(length) + " bytes");
  if (in_use + length > limit("METAL_RUNTIME_MEMORY")) return nil;
  RuntimeBuffer* buffer = [[RuntimeBuffer alloc] init];
  buffer->address = static_cast<char*>(std::aligned_alloc(kPage, (length + kPage - 1) / kPage * kPage));
  buffer->length = length;
  buffer->own = true;
  require(buffer->address != nullptr, "this machine has too little memory for the test");
  std::memset(buffer->address, kUnwritten, length);
  in_use += length;
  ++made;
  return buffer;
}

int buffers() { return made; }

}  // namespace metalcore::metal_runtime
