#include "encoder.h"

#include "recording.h"

#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <utility>

namespace metalcore::cuda {
namespace {

// A recording whose memory is the last one's of this thread.
class Reused {
 public:
  Reused() : recording_(std::move(spare)) {
    if (!recording_) recording_ = std::make_unique<Recording>();
  }
  ~Reused() {
    recording_->clear();
    spare = std::move(recording_);
  }
  Recording& operator*() { return *recording_; }

 private:
  static thread_local std::unique_ptr<Recording> spare;
  std::unique_ptr<Recording> recording_;
};
thread_local std::unique_ptr<Recording> Reused::spare;

class CudaEncoder final : public gpu::Encoder {
 public:
  explicit CudaEncoder(Recording& recording) : recording_(recording) {}

  Encoder& kernel(std::string_view name) override {
    recording_.kernel(find_kernel(0, name));
    return *this;
  }

  Encoder& buffer(uint32_t index, const gpu::BufferView& view) override {
    gpu::check_index(recording_.name(), index);
    recording_.buffer(index, static_cast<char*>(view.storage) + view.offset);
    return *this;
  }

  Encoder& bytes(uint32_t index, const void* data, size_t size) override {
    gpu::check_index(recording_.name(), index);
    gpu::check_bytes(recording_.name(), index, size);
    std::memcpy(recording_.bytes(index, size), data, size);
    return *this;
  }

  Encoder& pointers(uint32_t index, const gpu::BufferView* views, size_t count) override {
    gpu::check_index(recording_.name(), index);
    gpu::check_pointers(recording_.name(), index, count);
    auto* addresses = static_cast<char**>(recording_.bytes(index, count * sizeof(char*)));
    for (size_t i = 0; i < count; ++i)
      addresses[i] = views[i].storage ? static_cast<char*>(views[i].storage) + views[i].offset : nullptr;
    return *this;
  }

  Encoder& threadgroup_memory(uint32_t index, size_t bytes) override {
    gpu::check_index(recording_.name(), index);
    if (bytes > std::numeric_limits<uint32_t>::max())
      gpu::refuse(recording_.name(), std::to_string(bytes) + " bytes of threadgroup memory");
    recording_.threadgroup_memory(index, static_cast<uint32_t>(bytes));
    return *this;
  }

  void dispatch_threads(gpu::Size threads, gpu::Size group) override {
    gpu::check_named(recording_.name());
    recording_.dispatch(threads, group);
  }

  void dispatch_threadgroups(gpu::Size groups, gpu::Size group) override {
    recording_.dispatch(gpu::threads_of(recording_.name(), groups, group), group);
  }

 private:
  Recording& recording_;
};

}  // namespace

void encode(int index, const std::function<void(gpu::Encoder&)>& body) {
  const Device& on = device(index);
  Reused recording;
  CudaEncoder encoder(*recording);
  body(encoder);
  (*recording).launch(on);
}

}  // namespace metalcore::cuda
