#include "recording.h"

#include "limits.h"

#include <cstring>
#include <limits>
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
  if (grid.empty()) return;
  if (threadgroup.empty()) refuse(current(), "a threadgroup of no threads");
  dispatches_.push_back({static_cast<uint32_t>(name_begin_), static_cast<uint32_t>(names_.size() - name_begin_),
                         static_cast<uint32_t>(arguments_begin_), static_cast<uint32_t>(arguments_.size()), grid,
                         threadgroup, threads, work});
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

}  // namespace metalcore::gpu
