// A call of a C function: its arguments become tensors once they are checked.
#pragma once

#include "context.h"
#include "error.h"

#include <torch/csrc/stable/tensor.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <sstream>
#include <type_traits>

namespace metalcore::c_api {

using torch::stable::Tensor;
using ScalarType = Tensor::ScalarType;

template <typename T>
constexpr ScalarType type_of() {
  if constexpr (std::is_same_v<T, float>)
    return ScalarType::Float;
  else if constexpr (std::is_same_v<T, metalcore_bfloat16>)
    return ScalarType::BFloat16;
  else if constexpr (std::is_same_v<T, int32_t>)
    return ScalarType::Int;
  else {
    static_assert(std::is_same_v<T, int64_t>);
    return ScalarType::Long;
  }
}

// The size of one dimension, and how errors call it.
struct Size {
  const char* name;
  int64_t value;
};

class Call {
 public:
  Call() : context_(running_.context()) {}
  Call(const Call&) = delete;

  // Whether the CPU may read the arguments' memory.
  bool on_host() const { return context_.memory->on_host(); }

  // Throws Error(METALCORE_INVALID_ARGUMENT) "<argument> <must>", where `must` is made of parts.
  template <typename... Must>
  void require(bool condition, const char* argument, const Must&... must) const {
    if (__builtin_expect(condition, true)) return;
    std::ostringstream text;
    ((text << argument << " ") << ... << must);
    throw Error(METALCORE_INVALID_ARGUMENT, text.str());
  }
  void require_positive(const Size& size) const;
  // The numbers (int32), which the CPU can read, do not descend, and lie between 0 and `most`.
  void require_ascending(const char* argument, const Tensor& numbers, int64_t most) const;

  // Tensors of row-major arrays, which are not NULL, unless they have no elements, and are aligned. Rows of a matrix,
  // its last dimension, lie `row` elements apart where it has a name.
  template <typename T>
  Tensor input(const char* name, const T* data, std::initializer_list<Size> sizes, const Size& row = {nullptr, 0}) {
    return array(name, const_cast<T*>(data), sizeof(T), type_of<T>(), sizes, row, kRead);
  }
  // It overlaps nothing that the call has named before, and nothing that it names later.
  template <typename T>
  Tensor output(const char* name, T* data, std::initializer_list<Size> sizes) {
    return array(name, data, sizeof(T), type_of<T>(), sizes, {nullptr, 0}, kWritten);
  }
  // An array that the call writes to, and of which it reads or keeps a part.
  template <typename T>
  Tensor updated(const char* name, T* data, std::initializer_list<Size> sizes) {
    return array(name, data, sizeof(T), type_of<T>(), sizes, {nullptr, 0}, kUpdated);
  }
  // Results in the place of an argument that has been checked.
  template <typename T>
  Tensor in_place(const char* name, T* data, std::initializer_list<Size> sizes) {
    return array(name, data, sizeof(T), type_of<T>(), sizes, {nullptr, 0}, kInPlace);
  }
  // Scratch memory.
  template <typename T>
  Tensor scratch(std::initializer_list<Size> sizes) {
    return array("scratch memory", static_cast<T*>(nullptr), sizeof(T), type_of<T>(), sizes, {nullptr, 0}, kScratch);
  }

  // Scratch memory that is full of one number.
  Tensor filled(std::initializer_list<Size> sizes, float number);

  // The end of a call without an error.
  void complete() { context_.memory->complete(); }

 private:
  enum Use : uint8_t { kRead, kWritten, kUpdated, kInPlace, kScratch };
  struct Range {
    const char* name;
    uintptr_t begin, end;
    bool written;
  };

  Tensor array(const char* name, void* data, size_t item, ScalarType type, std::initializer_list<Size> sizes,
               const Size& row, Use use);
  void note(const Range& range);

  Running running_;
  metalcore_context& context_;
  std::array<Range, 16> ranges_;
  size_t count_ = 0;
};

// Runs body(call), and returns the status of what it throws.
template <typename Body>
int call(const char* function, const Body& body) noexcept {
  try {
    Call made;
    body(made);
    made.complete();
    return METALCORE_OK;
  } catch (...) {
    return status_of_exception(function);
  }
}

}  // namespace metalcore::c_api
