// The list of an op's dispatches: kernels, their arguments, grids and threadgroup memory. An op makes a recording, a
// backend submits it, and explain prints it. A kept recording can be submitted again with other tensors.
#pragma once

#include "buffer.h"
#include "limits.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace metalcore::gpu {

// One argument of a dispatch. It replaces an earlier one of the same dispatch with the same index.
struct Argument {
  enum Kind : uint8_t {
    kBuffer,       // views[first]
    kBytes,        // `count` bytes from bytes[first]
    kPointers,     // a table of the addresses of views[first] to views[first + count - 1]
    kThreadgroup,  // `count` bytes of threadgroup memory
  };
  Kind kind;
  uint8_t index;
  uint32_t first, count;
};

// What a dispatch does, for the cost model (cost.h). Where `bytes` is negative, that is all that its views span.
struct Work {
  double flops = 0, bytes = -1;
};

struct Dispatch {
  uint32_t name_begin, name_size;
  uint32_t arguments_begin, arguments_end;
  Size grid;  // in threads, or in threadgroups
  Size threadgroup;
  bool threads;
  Work work;
  uint32_t together;  // threadgroups beside each other in y that run at the same time
};

class Recording {
 public:
  // Selects a built-in kernel by its host_name for the next dispatches, and forgets the arguments of the one before.
  Recording& kernel(std::string_view name);
  // The same, by the parts of the name: kernel("softmax", "_", "simd1", "_float").
  template <typename... Parts>
  Recording& kernel(std::string_view first, const Parts&... rest) {
    kernel(first);
    ((names_ += rest), ...);
    return *this;
  }
  Recording& buffer(uint32_t index, const BufferView& view);
  Recording& buffer(uint32_t index, const Tensor& tensor) { return buffer(index, view_of(tensor)); }
  // An optional tensor. Where there is none, the kernel must not touch the argument.
  template <typename T>
  Recording& buffer(uint32_t index, const std::optional<T>& tensor) {
    return buffer(index, view_of(tensor));
  }
  // Copies `size` <= 4096 bytes; the caller may free its memory at once.
  Recording& bytes(uint32_t index, const void* data, size_t size);
  // Binds a table of at most 512 device addresses, one per view (nullptr where a view's storage is null), for kernels
  // over more tensors than there are buffer slots. The kernel reads it as `constant` structs of device pointers, and
  // may read and write each view's span.
  Recording& pointers(uint32_t index, const BufferView* views, size_t count);
  Recording& threadgroup_memory(uint32_t index, size_t bytes);
  // Says what the next dispatch does, where that is more or less than to read or write its views once.
  Recording& work(double flops, double bytes = -1) {
    work_ = {flops, bytes};
    return *this;
  }
  // Says that of the next dispatch, this many threadgroups beside each other in y run at the same time and read each
  // other's threadgroup memory, where Backend::most_together() allows it.
  Recording& together(uint32_t count) {
    together_ = count;
    return *this;
  }
  // Dispatches run in order, and each sees the writes of those before it. A dispatch without threads is not recorded.
  void dispatch_threads(Size threads, Size threads_per_threadgroup);
  void dispatch_threadgroups(Size threadgroups, Size threads_per_threadgroup);

  template <typename T>
  Recording& bytes(uint32_t index, const T& value) {
    static_assert(std::is_trivially_copyable_v<T> && !std::is_pointer_v<T>);
    return bytes(index, &value, sizeof(T));
  }

  // Whether its backend bounds the work of a dispatch.
  bool bounds_work() const { return bounds_work_; }
  void bound_work(bool on) { bounds_work_ = on; }

  // The functions below are for backends and for readers.
  const std::vector<Dispatch>& dispatches() const { return dispatches_; }
  std::string_view name(const Dispatch& d) const { return {names_.data() + d.name_begin, d.name_size}; }
  const Argument* begin(const Dispatch& d) const { return arguments_.data() + d.arguments_begin; }
  const Argument* end(const Dispatch& d) const { return arguments_.data() + d.arguments_end; }
  const BufferView* views(const Argument& a) const { return views_.data() + a.first; }
  const std::byte* bytes(const Argument& a) const { return bytes_.data() + a.first; }  // a multiple of 16
  // The grid in threads. A side has 32 bits.
  Size threads(const Dispatch& d) const;

  // All views, in the order in which they were bound. A kept recording replaces them.
  std::vector<BufferView>& views() { return views_; }
  const std::vector<BufferView>& views() const { return views_; }

  // Adds dispatches of another recording.
  void append(const Recording& other, size_t first, size_t end);

  // Forgets the dispatches from `first` on, which did not run.
  void forget_dispatches(size_t first) { dispatches_.erase(dispatches_.begin() + first, dispatches_.end()); }

  // Forgets everything, but keeps the memory for the next recording, unless there is much of it.
  void clear();

 private:
  std::string_view current() const { return {names_.data() + name_begin_, names_.size() - name_begin_}; }
  void dispatch(Size grid, Size threadgroup, bool threads);
  Argument& bind(uint32_t index, Argument::Kind kind, size_t first, size_t count);

  std::vector<Dispatch> dispatches_;
  std::vector<Argument> arguments_;
  std::vector<BufferView> views_;
  std::vector<std::byte> bytes_;
  std::string names_;
  bool bounds_work_ = false;
  // The kernel that is selected, and its first argument.
  size_t name_begin_ = 0, arguments_begin_ = 0;
  // Of the next dispatch.
  Work work_;
  uint32_t together_ = 1;
};

}  // namespace metalcore::gpu
