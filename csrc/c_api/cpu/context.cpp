// Contexts for memory of the host, whose kernels run on the CPU.
#include "../context.h"

#include "../error.h"

#include "../../backends/simulator/library.h"
#include "../../backends/simulator/launch.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <algorithm>
#include <cstring>
#include <mutex>
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
  void write(void* memory, const void* data, size_t bytes) override { std::memcpy(memory, data, bytes); }
  std::unique_ptr<gpu::Prepared> prepare(const gpu::Recording& recording, int32_t, int32_t, bool trusted) override {
    return simulator::prepare_program(recording, trusted);
  }
};

std::unique_ptr<metalcore_context> make_context(int index, void* stream) {
  if (index != 0 || stream) throw Error(METALCORE_INVALID_ARGUMENT, "index and stream must be 0 for METALCORE_CPU");
  static std::once_flag once;
  std::call_once(once, [] { simulator::set_library_path(kernels_folder()); });
  return std::make_unique<metalcore_context>(aoti_torch_device_type_mps(), 0, nullptr, std::make_unique<HostMemory>());
}

const ContextKind kind(METALCORE_CPU, make_context);

}  // namespace
}  // namespace metalcore::c_api
