// add(x, y, alpha) = x + alpha y, and cast(x, dtype).
#include "add_cast.h"

#include "../../gpu/cost.h"
#include "../common/elementwise.h"

#include <algorithm>
#include <string>

namespace metalcore {
namespace {

Tensor add(const Tensor& x, const Tensor& y, double alpha) {
  const char* const op = "add";
  check_float(op, "x", x);
  check_same_dtype(op, "y", y, x);
  check_same_device(op, "y", y, x);
  check_same_shape(op, "y", y, x);
  return elementwise(op, {x, y}, static_cast<float>(alpha));
}

constexpr int64_t kVector = 4;               // elements of a thread of the dense kernel
constexpr int64_t kMost = int64_t{1} << 31;  // threads of a dispatch
constexpr gpu::Size kThreadgroup{256};

bool is_aligned(const Tensor& tensor) {
  const gpu::BufferView view = gpu::view_of(tensor);
  return (reinterpret_cast<uintptr_t>(view.storage) + view.offset) % 16 == 0;
}

Tensor cast(const Tensor& x_, ScalarType dtype) {
  const char* const op = "cast";
  check_float(op, "x", x_);
  check(is_float_dtype(dtype) && dtype != x_.scalar_type(), "metalcore::", op, ": dtype must be another one of ",
        "float32, float16 and bfloat16, not ", dtype_name(dtype));
  const Tensor y = new_tensor(x_.sizes(), dtype, x_);
  cast_into(y, x_);
  return y;
}

// The strides of tensors that are contiguous, or nothing where the kernel cannot count the elements.
std::optional<StridedParams> one_dimension(int64_t count) {
  if (count > UINT32_MAX) return std::nullopt;
  StridedParams params{.dims = 1};
  params.sizes[0] = static_cast<uint32_t>(count);
  params.strides[0][0] = 1;
  return params;
}

}  // namespace

void add_into(const Tensor& sum, const Tensor& x, const Tensor& y) {
  if (sum.numel() > 0) dense_elementwise_into("add", sum, {x, y}, 1.0f);
}

void cast_into(const Tensor& y, const Tensor& x_) {
  const char* const op = "cast";
  const ScalarType dtype = y.scalar_type();
  const int64_t count = y.numel();
  if (count == 0) return;
  const bool contiguous = x_.is_contiguous(), whole = is_aligned(x_) && is_aligned(y) && count % kVector == 0;
  const bool dense = contiguous && whole;
  Tensor x = x_;
  std::optional<StridedParams> params;
  if (!dense) params = contiguous ? one_dimension(count) : strided_params(y, {x});
  if (!dense && !params) {
    x = as_contiguous(x_);
    params = one_dimension(count);
    check(params.has_value(), "metalcore::", op, ": ", count, " elements are more than the kernel counts");
  }
  const int64_t threads = dense ? count / kVector : count, each = dense ? kVector : 1;
  gpu::note_plan(op, dense ? "dense" : "strided",
                 [&] { return std::to_string(count) + " elements, " + std::to_string(each) + " a thread"; });
  gpu::record(y, [&](gpu::Recording& recording) {
    const auto bytes = static_cast<double>(each * (x.element_size() + y.element_size()));
    // Pieces of the strided kernel would need strides of their own.
    const int64_t most = dense ? std::min(kMost, gpu::at_once(recording, threads, {0, bytes}, 1)) : threads;
    for (int64_t first = 0; first < threads; first += most) {
      const int64_t piece = std::min(most, threads - first);
      const auto part = [&](const Tensor& tensor) {
        gpu::BufferView view = gpu::view_of(tensor);
        if (!dense) return view;
        view.offset += first * each * tensor.element_size();
        view.span = piece * each * tensor.element_size();
        return view;
      };
      recording.kernel("cast_", dense ? "dense_" : "strided_", suffix(x.scalar_type()), "_", suffix(dtype));
      recording.buffer(0, part(x)).buffer(1, part(y));
      if (params) recording.bytes(2, *params);
      recording.dispatch_threads({grid_side(piece)}, kThreadgroup);
    }
  });
}

}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) {
  m.def("add(Tensor x, Tensor y, float alpha) -> Tensor");
  m.def("cast(Tensor x, ScalarType dtype) -> Tensor");
}

METALCORE_KERNELS(m) {
  m.impl<&metalcore::add>("add");
  m.impl<&metalcore::cast>("cast");
}
