#include "encoder.h"

#include "launch.h"

#include <cstring>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace metalcore::simulator {
namespace {

class SimulatorEncoder final : public gpu::Encoder {
 public:
  Encoder& kernel(std::string_view name) override {
    launch_.kernel = find_builtin(name, checking().on);
    launch_.buffers.fill({});
    launch_.threadgroup_lengths.fill(0);
    used_ = 0;
    overflow_.clear();
    return *this;
  }

  Encoder& buffer(uint32_t index, const gpu::BufferView& view) override {
    bind(index) = {Binding::kBuffer, static_cast<char*>(view.storage) + view.offset, view.span, nullptr};
    return *this;
  }

  Encoder& bytes(uint32_t index, const void* data, size_t size) override {
    Binding& binding = bind(index);
    if (size > kMaximumBytes)
      refuse("bytes at index " + std::to_string(index) + " are " + std::to_string(size) + "; Metal allows 4096");
    binding = {Binding::kBytes, std::memcpy(allocate(size), data, size), size, nullptr};
    return *this;
  }

  Encoder& pointers(uint32_t index, const gpu::BufferView* views, size_t count) override {
    Binding& binding = bind(index);
    if (count > kMaximumPointers)
      refuse("a table of " + std::to_string(count) + " pointers at index " + std::to_string(index) + "; at most 512 fit");
    auto* addresses = static_cast<char**>(allocate(count * sizeof(char*)));
    auto* spans = static_cast<size_t*>(allocate(count * sizeof(size_t)));
    for (size_t i = 0; i < count; ++i) {
      addresses[i] = views[i].storage ? static_cast<char*>(views[i].storage) + views[i].offset : nullptr;
      spans[i] = views[i].storage ? views[i].span : 0;
    }
    binding = {Binding::kPointers, addresses, count * sizeof(char*), spans};
    return *this;
  }

  Encoder& threadgroup_memory(uint32_t index, size_t bytes) override {
    bind(index);
    if (bytes > std::numeric_limits<uint32_t>::max()) refuse(std::to_string(bytes) + " bytes of threadgroup memory");
    launch_.threadgroup_lengths[index] = static_cast<uint32_t>(bytes);
    return *this;
  }

  void dispatch_threads(gpu::Size threads, gpu::Size group) override {
    require_kernel();
    launch_.threads = {threads.x, threads.y, threads.z};
    launch_.group = {group.x, group.y, group.z};
    execute(launch_);
  }

  void dispatch_threadgroups(gpu::Size groups, gpu::Size group) override {
    const auto side = [&](uint32_t count, uint32_t size) {
      const uint64_t threads = uint64_t{count} * size;
      if (threads > std::numeric_limits<uint32_t>::max())
        refuse("a grid of " + std::to_string(threads) + " threads along one side; positions have 32 bits");
      return static_cast<uint32_t>(threads);
    };
    require_kernel();
    if (groups.empty()) return;
    if (group.empty()) refuse("a threadgroup of no threads");
    dispatch_threads({side(groups.x, group.x), side(groups.y, group.y), side(groups.z, group.z)}, group);
  }

 private:
  [[noreturn]] void refuse(const std::string& reason) const {
    const std::string kernel = launch_.kernel.kernel ? "kernel '" + std::string(launch_.kernel.kernel->name) + "': " : "";
    throw std::invalid_argument("metalcore: " + kernel + reason);
  }

  void require_kernel() const {
    if (!launch_.kernel.kernel) refuse("a dispatch before a kernel was named");
  }

  Binding& bind(uint32_t index) {
    require_kernel();
    if (index >= kMaximumBuffers) refuse("index " + std::to_string(index) + "; arguments have indices up to 30");
    return launch_.buffers[index];
  }

  // Memory until the next kernel(): small arguments lie in the encoder itself.
  void* allocate(size_t size) {
    const size_t rounded = (size + 15) / 16 * 16;
    if (rounded > sizeof inline_ - used_) {
      overflow_.push_back(std::make_unique<Block[]>(rounded / sizeof(Block) + 1));
      return overflow_.back().get();
    }
    void* memory = inline_ + used_;
    used_ += rounded;
    return memory;
  }

  struct alignas(16) Block {
    char bytes[16];
  };

  Launch launch_ = {};
  alignas(16) char inline_[1024];
  size_t used_ = 0;
  std::vector<std::unique_ptr<Block[]>> overflow_;
};

}  // namespace

void encode(const std::function<void(gpu::Encoder&)>& body) {
  SimulatorEncoder encoder;
  body(encoder);
}

}  // namespace metalcore::simulator
