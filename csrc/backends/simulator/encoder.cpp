#include "encoder.h"

#include "launch.h"

#include "../../gpu/limits.h"

#include <cstring>
#include <limits>
#include <memory>
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
    gpu::check_bytes(name(), index, size);
    binding = {Binding::kBytes, std::memcpy(allocate(size), data, size), size, nullptr};
    return *this;
  }

  Encoder& pointers(uint32_t index, const gpu::BufferView* views, size_t count) override {
    Binding& binding = bind(index);
    gpu::check_pointers(name(), index, count);
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
    if (bytes > std::numeric_limits<uint32_t>::max())
      gpu::refuse(name(), std::to_string(bytes) + " bytes of threadgroup memory");
    launch_.threadgroup_lengths[index] = static_cast<uint32_t>(bytes);
    return *this;
  }

  void dispatch_threads(gpu::Size threads, gpu::Size group) override {
    gpu::check_named(name());
    launch_.threads = {threads.x, threads.y, threads.z};
    launch_.group = {group.x, group.y, group.z};
    execute(launch_);
  }

  void dispatch_threadgroups(gpu::Size groups, gpu::Size group) override {
    dispatch_threads(gpu::threads_of(name(), groups, group), group);
  }

 private:
  std::string_view name() const { return launch_.kernel.kernel ? launch_.kernel.kernel->name : std::string_view(); }

  Binding& bind(uint32_t index) {
    gpu::check_index(name(), index);
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
