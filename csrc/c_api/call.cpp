#include "call.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <new>
#include <stdexcept>

namespace metalcore::c_api {

void Call::require_positive(const Size& size) const {
  require(size.value > 0, size.name, "must be positive, not ", size.value);
}

void Call::require_ascending(const char* argument, const Tensor& numbers, int64_t most) const {
  const auto* values = static_cast<const int32_t*>(numbers.data_ptr());
  int64_t last = 0;
  for (int64_t i = 0; i < numbers.numel(); ++i) {
    require(values[i] >= last && values[i] <= most, argument, "must ascend from 0 to at most ", most);
    last = values[i];
  }
}

Tensor Call::filled(std::initializer_list<Size> sizes, float number) {
  return torch::stable::fill_(scratch<float>(sizes), number);
}

Tensor Call::array(const char* name, void* data, size_t item, ScalarType type, std::initializer_list<Size> sizes,
                   const Size& row, Use use) {
  std::array<int64_t, Tensor::kMostDims> shape{}, strides{};
  size_t dims = 0;
  bool empty = false;
  for (const Size& size : sizes) {
    require(size.value >= 0, size.name, "must not be negative");
    empty |= size.value == 0;
    shape[dims++] = size.value;
  }
  int64_t stride = 1, last = 0, bytes = 0;  // the last element's place
  bool fits = true;
  for (size_t d = dims; d-- > 0;) {
    if (row.name && d + 2 == dims) {
      require(row.value >= shape[d + 1], row.name, "must be at least the length of a row");
      stride = row.value;
    }
    strides[d] = stride;
    int64_t step = 0;
    fits &= !__builtin_mul_overflow(stride, std::max<int64_t>(shape[d] - 1, 0), &step);
    fits &= !__builtin_add_overflow(last, step, &last);
    fits &= !__builtin_mul_overflow(stride, std::max<int64_t>(shape[d], 1), &stride);
  }
  fits &= !__builtin_mul_overflow(last + 1, static_cast<int64_t>(item), &bytes);
  const Tensor::Sizes shape_view(shape.data(), dims), strides_view(strides.data(), dims);
  if (use == kScratch) {
    if (!fits && !empty) throw std::bad_alloc();
    data = context_.arena.take(empty ? 0 : static_cast<size_t>(bytes));
  } else if (!empty) {
    require(fits, name, "has more bytes than memory can have");
    require(data, name, "is NULL");
    const auto begin = reinterpret_cast<uintptr_t>(data);
    uintptr_t end = 0;
    require(begin % item == 0, name, "is not aligned to its elements");
    require(!__builtin_add_overflow(begin, static_cast<uintptr_t>(bytes), &end) && end <= INTPTR_MAX, name,
            "does not fit into memory");
    if (use != kInPlace) note({name, begin, end, use != kRead});
    const Access access = use == kRead ? Access::kRead : use == kWritten ? Access::kWritten : Access::kUpdated;
    context_.memory->use_array(data, static_cast<size_t>(bytes), access);
  }
  return Tensor(empty ? nullptr : data, shape_view, strides_view, type, context_.device_type, context_.index);
}

void Call::note(const Range& range) {
  for (size_t i = 0; i < count_; ++i) {
    const Range& other = ranges_[i];
    const bool apart = range.end <= other.begin || other.end <= range.begin;
    require(apart || !(range.written || other.written), range.name, "overlaps ", other.name);
  }
  if (count_ == ranges_.size()) throw std::logic_error("metalcore: a function has more arguments than Call counts");
  ranges_[count_++] = range;
}

}  // namespace metalcore::c_api
