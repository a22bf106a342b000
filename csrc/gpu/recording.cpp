#include "recording.h"

#include "buffer.h"
#include "limits.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>

#include <cstring>
#include <limits>
#include <stdexcept>
#include <utility>

namespace metalcore::gpu {

namespace {

constexpr size_t kReusedBytes = 1024 * 1024;  // bytes of arguments whose memory the next recording reuses
constexpr size_t kAlignment = 16;             // bytes; no type of Metal needs more

}  // namespace

Recording& Recording::kernel(std::string_view name) {
  name_begin_ = names_.size();
  names_ += name;
  arguments_begin_ = arguments_.size();
  return *this;
}

Argument& Recording::bind(uint32_t index, Argument::Kind kind, size_t first, size_t count) {
  check_index(current(), index);
  return arguments_.emplace_back(
      Argument{kind, static_cast<uint8_t>(index), static_cast<uint32_t>(first), static_cast<uint32_t>(count)});
}

Recording& Recording::buffer(uint32_t index, const BufferView& view) {
  bind(index, Argument::kBuffer, views_.size(), 1);
  views_.push_back(view);
  return *this;
}

Recording& Recording::bytes(uint32_t index, const void* data, size_t size) {
  check_bytes(current(), index, size);
  const size_t begin = bytes_.size();
  bind(index, Argument::kBytes, begin, size);
  bytes_.resize(begin + (size + kAlignment - 1) / kAlignment * kAlignment);
  if (size) std::memcpy(bytes_.data() + begin, data, size);
  return *this;
}

Recording& Recording::pointers(uint32_t index, const BufferView* views, size_t count) {
  check_pointers(current(), index, count);
  bind(index, Argument::kPointers, views_.size(), count);
  views_.insert(views_.end(), views, views + count);
  return *this;
}

Recording& Recording::threadgroup_memory(uint32_t index, size_t bytes) {
  if (bytes > std::numeric_limits<uint32_t>::max())
    refuse(current(), std::to_string(bytes) + " bytes of threadgroup memory");
  bind(index, Argument::kThreadgroup, 0, bytes);
  return *this;
}

void Recording::dispatch_threads(Size threads, Size threadgroup) { dispatch(threads, threadgroup, true); }

void Recording::dispatch_threadgroups(Size threadgroups, Size threadgroup) {
  threads_of(current(), threadgroups, threadgroup);  // refuses too large a grid
  dispatch(threadgroups, threadgroup, false);
}

void Recording::dispatch(Size grid, Size threadgroup, bool threads) {
  check_named(current());
  const Work work = std::exchange(work_, {});
  const uint32_t together = std::exchange(together_, 1);
  if (grid.empty()) return;
  if (threadgroup.empty()) refuse(current(), "a threadgroup of no threads");
  if (together == 0 || (together > 1 && (threads || grid.y % together)))
    refuse(current(), std::to_string(together) + " threadgroups together of " + std::to_string(grid.y));
  dispatches_.push_back({static_cast<uint32_t>(name_begin_), static_cast<uint32_t>(names_.size() - name_begin_),
                         static_cast<uint32_t>(arguments_begin_), static_cast<uint32_t>(arguments_.size()), grid,
                         threadgroup, threads, work, together});
}

Size Recording::threads(const Dispatch& d) const {
  return d.threads ? d.grid : threads_of(name(d), d.grid, d.threadgroup);
}

void Recording::append(const Recording& other, size_t first, size_t end) {
  for (size_t i = first; i < end; ++i) {
    const Dispatch& d = other.dispatches()[i];
    kernel(other.name(d));
    for (const Argument* a = other.begin(d); a != other.end(d); ++a) switch (a->kind) {
        case Argument::kBuffer: buffer(a->index, *other.views(*a)); break;
        case Argument::kBytes: bytes(a->index, other.bytes(*a), a->count); break;
        case Argument::kPointers: pointers(a->index, other.views(*a), a->count); break;
        case Argument::kThreadgroup: threadgroup_memory(a->index, a->count); break;
      }
    work_ = d.work;
    together_ = d.together;
    dispatch(d.grid, d.threadgroup, d.threads);
  }
}

void Recording::clear() {
  dispatches_.clear();
  arguments_.clear();
  views_.clear();
  bytes_.clear();
  names_.clear();
  name_begin_ = arguments_begin_ = 0;
  work_ = {};
  if (bytes_.capacity() > kReusedBytes) bytes_.shrink_to_fit();
}

// Places of tensors (buffer.h).

// The stable ABI does not give the storage's data_ptr(), so this subtracts the offset from the tensor's. On Metal the
// "address" of a storage is an object, and a tensor's data_ptr() is the object's address plus the offset in bytes.
BufferView view_of(AtenTensorHandle tensor, size_t element_size, size_t span) {
  void* data = nullptr;
  int64_t first_element = 0;
  if (aoti_torch_get_data_ptr(tensor, &data) != AOTI_TORCH_SUCCESS ||
      aoti_torch_get_storage_offset(tensor, &first_element) != AOTI_TORCH_SUCCESS)
    throw std::runtime_error("metalcore: a tensor has no memory");
  const size_t offset = static_cast<size_t>(first_element) * element_size;
  return {static_cast<char*>(data) - offset, offset, span, tensor};
}

BufferView view_of(const Tensor& tensor) {
  const size_t item = tensor.element_size();
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  size_t last = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) return {nullptr, 0, 0, tensor.get()};  // data_ptr() is null with any offset
    last += static_cast<size_t>(sizes[i] - 1) * static_cast<size_t>(strides[i]);
  }
  return view_of(tensor.get(), item, (last + 1) * item);
}

int32_t device_type_of(const Tensor& tensor) {
  int32_t type = -1;
  aoti_torch_get_device_type(tensor.get(), &type);
  return type;
}

// Metal's limits (limits.h).

void refuse(std::string_view kernel, const std::string& reason) {
  const std::string prefix = kernel.empty() ? "" : "kernel '" + std::string(kernel) + "': ";
  throw std::invalid_argument("metalcore: " + prefix + reason);
}

void check_named(std::string_view kernel) {
  if (kernel.empty()) refuse(kernel, "a dispatch before a kernel was named");
}

void check_index(std::string_view kernel, uint32_t index) {
  check_named(kernel);
  if (index >= kMaximumBuffers) refuse(kernel, "index " + std::to_string(index) + "; arguments have indices up to 30");
}

void check_bytes(std::string_view kernel, uint32_t index, size_t size) {
  if (size > kMaximumBytes)
    refuse(kernel, "bytes at index " + std::to_string(index) + " are " + std::to_string(size) + "; Metal allows 4096");
}

void check_pointers(std::string_view kernel, uint32_t index, size_t count) {
  if (count > kMaximumPointers)
    refuse(kernel,
           "a table of " + std::to_string(count) + " pointers at index " + std::to_string(index) + "; at most 512 fit");
}

Size threads_of(std::string_view kernel, Size threadgroups, Size threadgroup) {
  const auto side = [&](uint32_t count, uint32_t size) {
    const uint64_t threads = uint64_t{count} * size;
    if (threads > std::numeric_limits<uint32_t>::max())
      refuse(kernel, "a grid of " + std::to_string(threads) + " threads along one side; positions have 32 bits");
    return static_cast<uint32_t>(threads);
  };
  check_named(kernel);
  if (threadgroups.empty()) return {0, 0, 0};
  if (threadgroup.empty()) refuse(kernel, "a threadgroup of no threads");
  return {side(threadgroups.x, threadgroup.x), side(threadgroups.y, threadgroup.y),
          side(threadgroups.z, threadgroup.z)};
}

}  // namespace metalcore::gpu
