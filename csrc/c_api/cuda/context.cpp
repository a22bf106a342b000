// Contexts for NVIDIA GPUs: device memory, and a stream of the caller's.
#include "../context.h"

#include "../error.h"
#include "compiler.h"

#include "../../backends/cuda/driver.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <bit>
#include <new>
#include <stdexcept>

namespace metalcore::c_api {
namespace {

using cuda::check;
using cuda::CurrentContext;
using cuda::driver;

class DeviceMemory final : public Memory {
 public:
  DeviceMemory(const cuda::Device& device, cuda::Stream stream) : device_(device), stream_(stream) {}

  void* allocate(size_t bytes) override {
    const CurrentContext context(device_);
    void* memory = nullptr;
    const cuda::Status status = driver().allocate(&memory, bytes);
    if (status == cuda::kOutOfMemory) throw std::bad_alloc();
    check(status, "allocating a GPU's memory");
    return memory;
  }

  void free(void* memory) noexcept override {
    try {
      const CurrentContext context(device_);
      driver().free(memory);
    } catch (const std::exception&) {  // the driver is gone, and the memory with it
    }
  }

  void fill(void* memory, unsigned char number, size_t count) override {
    if (count == 0) return;
    const CurrentContext context(device_);
    check(driver().fill_bytes(memory, number, count, stream_), "filling a GPU's memory");
  }

  void fill(void* memory, float number, size_t count) override {
    if (count == 0) return;
    const CurrentContext context(device_);
    check(driver().fill_words(memory, std::bit_cast<uint32_t>(number), count, stream_), "filling a GPU's memory");
  }

  void write(void* memory, const void* data, size_t bytes) override {
    const CurrentContext context(device_);
    check(driver().copy_to_device(memory, data, bytes), "copying to a GPU's memory");
  }

  void wait() override {
    const CurrentContext context(device_);
    check(driver().wait_for_stream(stream_), "waiting for a CUDA stream");
  }

  bool on_host() const override { return false; }

 private:
  const cuda::Device& device_;
  const cuda::Stream stream_;
};

const cuda::Device& find_device(int index) try { return cuda::device(index); } catch (const std::runtime_error& error) {
  throw Error(METALCORE_NO_DEVICE, error.what());
}

std::unique_ptr<metalcore_context> make_context(int index, void* stream) {
  const cuda::Device& device = find_device(index);
  require_compiler();
  return std::make_unique<metalcore_context>(aoti_torch_device_type_cuda(), index, stream,
                                             std::make_unique<DeviceMemory>(device, static_cast<cuda::Stream>(stream)));
}

const ContextKind kind(METALCORE_CUDA, make_context);

}  // namespace
}  // namespace metalcore::c_api

namespace metalcore::cuda {

// Takes the place of the one in csrc/backends/cuda/python.cpp.
Stream current_stream(const Device&) { return static_cast<Stream>(c_api::running().stream); }

}  // namespace metalcore::cuda
