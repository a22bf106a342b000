// activation(gate) * up, of two tensors (swiglu, geglu) or of the two halves of one tensor's last dimension
// (silu_and_mul, gelu_and_mul).
#include "activation.h"

#include "../../../kernels/activation/activation.h"
#include "../common/rows.h"

#include <algorithm>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace metalcore {
namespace {

int64_t last_size(const Tensor& x) { return x.dim() ? x.sizes().back() : 1; }

// Rows of `length` elements, and those of them that this tensor has from `offset` elements on.
struct Half {
  Rows rows;
  int64_t offset = 0;
  gpu::BufferView view() const {
    const gpu::BufferView all = gpu::view_of(rows.tensor);
    const size_t skipped = static_cast<size_t>(offset) * rows.tensor.element_size();
    return {all.storage, all.offset + skipped, all.span - skipped, all.tensor};
  }
  bool aligned(int64_t length) const {
    return aligned16(rows.tensor, rows.stride, length) && offset * rows.tensor.element_size() % 16 == 0;
  }
};

// Dispatches a gated kernel over `rows` rows. If the rows of all tensors are next to each other they are one row.
void record_gated(const char* op, const std::string& activation, const char* direction,
                  std::initializer_list<const Half*> halves, int64_t rows, int64_t length, const Tensor& on) {
  const int64_t pack = 16 / on.element_size();
  const auto all = [&](auto&& holds) { return std::all_of(halves.begin(), halves.end(), holds); };
  const bool joined = all([&](const Half* half) { return half->rows.stride == length; }) && rows * length <= INT32_MAX;
  if (joined) length *= std::exchange(rows, 1);
  const bool aligned = all([&](const Half* half) { return half->aligned(length); });
  gpu::note_plan(op, aligned ? "packed" : "dense", [&] {
    return std::to_string(rows * length) +
           (aligned ? " elements, 16 bytes a thread"
                    : " elements, one a thread: rows do not begin and end at multiples of 16 bytes");
  });
  GatedParams params{.length = grid_side(length)};
  int64_t* const strides[5] = {&params.gate_stride, &params.up_stride, &params.y_stride, &params.gate_grad_stride,
                               &params.up_grad_stride};
  // The backward kernels have the gradient first.
  const bool backward = halves.size() == 5;
  const size_t order[5] = {2, 0, 1, 3, 4};
  size_t index = 0;
  for (const Half* half : halves) {
    *strides[backward ? order[index] : index] = half->rows.stride;
    ++index;
  }
  const uint32_t across = grid_side(aligned ? length / pack : length);
  const uint32_t width = std::min(256u, round_up(across, 32u));
  gpu::record(on, [&](gpu::Recording& recording) {
    recording.kernel("gated_", activation, direction, aligned ? "_packed_" : "_dense_", suffix(on.scalar_type()));
    uint32_t slot = 0;
    for (const Half* half : halves) recording.buffer(slot++, half->view());
    recording.bytes(slot, params);
    recording.dispatch_threads({across, grid_side(rows)}, {width, 256 / width});
  });
}

void check_pair(const char* op, const Tensor& gate, const Tensor& up) {
  check_float(op, "gate", gate);
  check_same_device(op, "up", up, gate);
  check_same_dtype(op, "up", up, gate);
  check_same_shape(op, "up", up, gate);
}

Tensor gated(const Tensor& gate, const Tensor& up, const std::string& activation) {
  check_pair("gated", gate, up);
  check_activation("gated", activation);
  const Tensor y = new_like(gate);
  if (y.numel() == 0) return y;
  const int64_t length = last_size(gate);
  const Half g{rows_of(gate, length)}, u{rows_of(up, length)}, out{{y, length}};
  record_gated("gated", activation, "", {&g, &u, &out}, y.numel() / length, length, y);
  return y;
}

std::tuple<Tensor, Tensor> gated_backward(const Tensor& grad, const Tensor& gate, const Tensor& up,
                                          const std::string& activation) {
  check_pair("gated_backward", gate, up);
  check_activation("gated_backward", activation);
  check_same_device("gated_backward", "grad", grad, gate);
  check_same_dtype("gated_backward", "grad", grad, gate);
  check_same_shape("gated_backward", "grad", grad, gate);
  const Tensor gate_grad = new_like(gate), up_grad = new_like(gate);
  if (gate.numel() == 0) return {gate_grad, up_grad};
  const int64_t length = last_size(gate);
  const Half d{rows_of(grad, length)}, g{rows_of(gate, length)}, u{rows_of(up, length)};
  const Half dg{{gate_grad, length}}, du{{up_grad, length}};
  record_gated("gated_backward", activation, "_backward", {&d, &g, &u, &dg, &du}, gate.numel() / length, length,
               gate_grad);
  return {gate_grad, up_grad};
}

int64_t check_packed(const char* op, const Tensor& x) {
  check_float(op, "x", x);
  check(x.dim() > 0 && x.sizes().back() % 2 == 0, "metalcore::", op,
        ": the last dimension of x must be even, and x is ", shape_text(x));
  return x.sizes().back() / 2;
}

std::vector<int64_t> halved(const Tensor& x) {
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() /= 2;
  return sizes;
}

Tensor gated_packed(const Tensor& x, const std::string& activation) {
  check_packed("gated_packed", x);
  check_activation("gated_packed", activation);
  const std::vector<int64_t> sizes = halved(x);
  const Tensor y = new_tensor(Sizes(sizes.data(), sizes.size()), x.scalar_type(), x);
  gated_packed_into(y, x, activation);
  return y;
}

Tensor gated_packed_backward(const Tensor& grad, const Tensor& x, const std::string& activation) {
  const char* op = "gated_packed_backward";
  const int64_t length = check_packed(op, x);
  check_activation(op, activation);
  check_same_device(op, "grad", grad, x);
  check_same_dtype(op, "grad", grad, x);
  const std::vector<int64_t> sizes = halved(x);
  const auto found = grad.sizes();
  check(std::equal(found.begin(), found.end(), sizes.begin(), sizes.end()), "metalcore::", op,
        ": grad must have shape ", shape_text(Sizes(sizes.data(), sizes.size())), ", not ", shape_text(grad));
  const Tensor gx = new_like(x);
  if (gx.numel() == 0) return gx;
  const Rows rows = rows_of(x, 2 * length), out{gx, 2 * length};
  const Half d{rows_of(grad, length)}, g{rows}, u{rows, length}, dg{out}, du{out, length};
  record_gated(op, activation, "_backward", {&d, &g, &u, &dg, &du}, grad.numel() / length, length, gx);
  return gx;
}

}  // namespace

void gated_packed_into(const Tensor& y, const Tensor& x, const std::string& activation) {
  if (y.numel() == 0) return;
  const int64_t length = last_size(y);
  const Rows rows = rows_of(x, 2 * length);
  const Half g{rows}, u{rows, length}, out{{y, length}};
  record_gated("gated_packed", activation, "", {&g, &u, &out}, y.numel() / length, length, y);
}

}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) {
  m.def("gated(Tensor gate, Tensor up, str activation) -> Tensor");
  m.def("gated_backward(Tensor grad, Tensor gate, Tensor up, str activation) -> (Tensor, Tensor)");
  m.def("gated_packed(Tensor x, str activation) -> Tensor");
  m.def("gated_packed_backward(Tensor grad, Tensor x, str activation) -> Tensor");
}

METALCORE_KERNELS(m) {
  m.impl<&metalcore::gated>("gated");
  m.impl<&metalcore::gated_backward>("gated_backward");
  m.impl<&metalcore::gated_packed>("gated_packed");
  m.impl<&metalcore::gated_packed_backward>("gated_packed_backward");
}
