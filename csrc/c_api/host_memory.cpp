#include "host_memory.h"

#include <algorithm>
#include <cstring>
#include <new>

namespace metalcore::c_api {
namespace {

constexpr std::align_val_t kAlignment{256};

class HostMemory final : public Memory {
 public:
  void* allocate(size_t bytes) override { return ::operator new(bytes, kAlignment); }
  void free(void* memory) noexcept override { ::operator delete(memory, kAlignment); }
  void fill(void* memory, unsigned char number, size_t count) override { std::memset(memory, number, count); }
  void fill(void* memory, float number, size_t count) override {
    std::fill_n(static_cast<float*>(memory), count, number);
  }
};

}  // namespace

std::unique_ptr<Memory> host_memory() { return std::make_unique<HostMemory>(); }

}  // namespace metalcore::c_api
