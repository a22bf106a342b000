// rope: rotary position embedding of q and k, out of place and in place.
#include "rope.h"

#include "../../../kernels/rotary/rope.h"
#include "../common/rows.h"

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>

namespace metalcore {
namespace {

struct Strides {
  int64_t values[3];  // of batch, token and head
};
Strides strides_of(const Tensor& x, int64_t heads_dim) {
  const auto strides = x.strides();
  return {{strides[0], strides[3 - heads_dim], strides[heads_dim]}};
}

bool vectors_along(const Tensor& x) {
  const auto sizes = x.sizes(), strides = x.strides();
  for (int64_t d = 0; d + 1 < x.dim(); ++d)
    if (sizes[d] > 1 && strides[d] * x.element_size() % 16 != 0) return false;
  return reinterpret_cast<uintptr_t>(x.data_ptr()) % 16 == 0;
}

// The tensor itself if the elements of a head are neighbours, or a contiguous copy.
Tensor with_heads(const Tensor& x) {
  return x.sizes().back() <= 1 || x.strides()[x.dim() - 1] == 1 ? x : torch::stable::contiguous(x);
}

void check_rotated(const char* op, const char* argument, const Tensor& x, const Tensor& q, const Rotation& rotation) {
  check_same_device(op, argument, x, q);
  check_same_dtype(op, argument, x, q);
  const auto sizes = x.sizes(), as = q.sizes();
  check(x.dim() == 4 && sizes[0] == as[0] && sizes[3 - rotation.heads_dim] == as[3 - rotation.heads_dim] &&
            sizes[3] == as[3],
        "metalcore::", op, ": ", argument, " must have the shape of q, except for the number of heads, and q is ",
        shape_text(q), " and ", argument, " is ", shape_text(x));
}

// Whether a tensor of angles or positions has a dimension for sections, one of size 1 or `batch`, and one of `tokens`.
void check_along(const char* op, const char* argument, Sizes sizes, bool sections, int64_t batch, int64_t tokens) {
  check(sizes[0] == (sections ? 3 : 1) && (sizes[1] == 1 || sizes[1] == batch) && sizes[2] == tokens, "metalcore::", op,
        ": ", argument, " is ", shape_text(sizes), ", and its first sizes must be ", sections ? 3 : 1, ", ", batch,
        " or 1, and ", tokens);
}

int64_t broadcast_stride(const Tensor& x, int64_t dim) { return x.sizes()[dim] == 1 ? 0 : x.strides()[dim]; }

void check_arguments(const char* op, const Tensor& q, const MaybeTensor& k, const Tensor& cosine, const Tensor& sine,
                     const MaybeTensor& positions, const Rotation& r) {
  check_float(op, "q", q);
  check(q.dim() == 4, "metalcore::", op, ": q must have 4 dimensions, and is ", shape_text(q));
  check(r.heads_dim == 1 || r.heads_dim == 2, "metalcore::", op, ": heads_dim must be 1 or 2, not ", r.heads_dim);
  if (k) check_rotated(op, "k", *k, q, r);
  const ScalarType type = cosine.scalar_type();
  check_same_device(op, "cos", cosine, q);
  check(type == q.scalar_type() || type == ScalarType::Float, "metalcore::", op, ": cos must be ",
        dtype_name(q.scalar_type()), " or float32, not ", dtype_name(type));
  check_same_device(op, "sin", sine, cosine);
  check_same_dtype(op, "sin", sine, cosine);
  check_same_shape(op, "sin", sine, cosine);
  check(r.rotary > 0 && r.rotary % 2 == 0 && r.rotary <= q.sizes()[3], "metalcore::", op,
        ": rotary must be even and from 2 to ", q.sizes()[3], ", not ", r.rotary);
  const bool sections = r.third > 0;
  check(0 <= r.second && r.second <= r.third && 2 * r.third <= r.rotary, "metalcore::", op,
        ": sections begin at pairs ", r.second, " and ", r.third, " of ", r.rotary / 2);
  const int64_t batch = q.sizes()[0], tokens = q.sizes()[3 - r.heads_dim];
  check(cosine.dim() == (positions ? 2 : 4), "metalcore::", op, ": cos must have ", positions ? 2 : 4,
        " dimensions, and is ", shape_text(cosine));
  const int64_t width = cosine.sizes().back();
  check(width == r.rotary || 2 * width == r.rotary, "metalcore::", op, ": cos must have ", r.rotary, " or ",
        r.rotary / 2, " columns, not ", width);
  if (!positions) return check_along(op, "cos", cosine.sizes(), sections, batch, tokens);
  check_same_device(op, "positions", *positions, q);
  check(positions->scalar_type() == ScalarType::Long, "metalcore::", op, ": positions must be int64, not ",
        dtype_name(positions->scalar_type()));
  check(positions->dim() == 3, "metalcore::", op, ": positions must have 3 dimensions, and are ",
        shape_text(*positions));
  check_along(op, "positions", positions->sizes(), sections, batch, tokens);
}

}  // namespace

void rotate(const char* op, const Tensor& q, const MaybeTensor& k, const Tensor& q_out, const MaybeTensor& k_out,
            const Tensor& cosine_, const Tensor& sine_, const MaybeTensor& positions, const Rotation& r,
            bool in_place) {
  const int64_t batch = q.sizes()[0], tokens = q.sizes()[3 - r.heads_dim], size = q.sizes()[3];
  const int64_t q_heads = q.sizes()[r.heads_dim], heads = q_heads + (k ? k->sizes()[r.heads_dim] : 0);
  if (batch == 0 || tokens == 0 || heads == 0) return;
  const Tensor cosine = as_contiguous(cosine_), sine = as_contiguous(sine_);
  const int64_t pairs = r.rotary / 2, rest = in_place ? 0 : size - r.rotary;
  const bool every_other = r.interleaved && cosine.sizes().back() == r.rotary;
  RopeParams params{
      .tokens = grid_side(tokens),
      .q_heads = grid_side(q_heads),
      .heads = grid_side(heads),
      .pairs = grid_side(pairs),
      .rest = grid_side(rest),
      .interleaved = r.interleaved,
      .every_other = every_other,
      .sections = {grid_side(r.second), grid_side(r.third)},
      .sectioned = r.third > 0,
      .has_positions = positions.has_value(),
      .positions = positions ? grid_side(cosine.sizes()[0]) : 0,
      .direction = r.inverse ? -1.0f : 1.0f,
  };
  const auto put = [&](int64_t (&strides)[3], const Tensor& x) {
    std::copy_n(strides_of(x, r.heads_dim).values, 3, strides);
  };
  put(params.q_strides, q);
  put(params.q_out_strides, q_out);
  put(params.k_strides, k ? *k : q);
  put(params.k_out_strides, k ? *k_out : q_out);
  for (int64_t d = 0; d < 3; ++d) {
    params.table_strides[d] = positions ? (d == 2 ? cosine.strides()[0] : 0) : broadcast_stride(cosine, d);
    if (positions) params.position_strides[d] = broadcast_stride(*positions, d);
  }
  const int64_t pack = 16 / q.element_size();
  const auto vectors = [](const MaybeTensor& x) { return !x || vectors_along(*x); };
  const bool packed = pairs % pack == 0 && rest % pack == 0 && vectors_along(q) && vectors_along(q_out) && vectors(k) &&
                      vectors(k_out) && vectors_along(cosine) && vectors_along(sine);
  gpu::note_plan(op, packed ? "packed" : "single", [&] {
    return std::string("a thread has ") +
           (packed ? std::to_string(pack) + " pairs"
                   : "one pair, since heads or tables are no whole vectors of 16 bytes") +
           " of " + std::to_string(ROPE_HEADS) + " heads";
  });
  const int64_t per_head = (pairs + rest) / (packed ? pack : 1);
  const uint32_t across = grid_side(per_head * ceil_div<int64_t>(heads, ROPE_HEADS));
  const uint32_t width = std::min(256u, round_up(across, 32u));
  gpu::record(q_out, [&](gpu::Recording& recording) {
    recording.kernel(packed ? "rope_packed_" : "rope_single_", suffix(q.scalar_type()),
                     cosine.scalar_type() == q.scalar_type() ? "" : "_float");
    recording.buffer(0, q).buffer(1, k).buffer(2, q_out).buffer(3, k_out);
    recording.buffer(4, cosine).buffer(5, sine).buffer(6, positions).bytes(7, params);
    recording.dispatch_threads({across, grid_side(batch * tokens)}, {width, 256 / width});
  });
}

namespace {

// A tensor of x's shape, with its strides if it has no gaps.
Tensor result_like(const Tensor& x) {
  return is_dense(x) ? new_strided(x.sizes(), x.strides(), x.scalar_type(), x) : new_like(x);
}

std::tuple<Tensor, Tensor> rope(const Tensor& q_, const MaybeTensor& k_, const Tensor& cosine, const Tensor& sine,
                                const MaybeTensor& positions, int64_t heads_dim, int64_t rotary, bool interleaved,
                                int64_t second, int64_t third, bool inverse) {
  const Rotation r{heads_dim, rotary, interleaved, second, third, inverse};
  check_arguments("rope", q_, k_, cosine, sine, positions, r);
  const Tensor q = with_heads(q_), q_out = result_like(q);
  const int64_t none[1] = {0};
  if (!k_) {
    rotate("rope", q, std::nullopt, q_out, std::nullopt, cosine, sine, positions, r, false);
    return {q_out, new_tensor(Sizes(none, 1), q.scalar_type(), q)};
  }
  const Tensor k = with_heads(*k_), k_out = result_like(k);
  rotate("rope", q, k, q_out, k_out, cosine, sine, positions, r, false);
  return {q_out, k_out};
}

void rope_(const Tensor& q, const MaybeTensor& k, const Tensor& cosine, const Tensor& sine,
           const MaybeTensor& positions, int64_t heads_dim, int64_t rotary, bool interleaved, int64_t second,
           int64_t third, bool inverse) {
  const Rotation r{heads_dim, rotary, interleaved, second, third, inverse};
  check_arguments("rope_", q, k, cosine, sine, positions, r);
  for (const Tensor* x : {&q, k ? &*k : &q})
    check(x->sizes()[3] <= 1 || x->strides()[3] == 1, "metalcore::rope_: the elements of a head must be neighbours");
  rotate("rope_", q, k, q, k, cosine, sine, positions, r, true);
}

}  // namespace
}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) {
  m.def(
      "rope(Tensor q, Tensor? k, Tensor cos, Tensor sin, Tensor? positions, int heads_dim, int rotary, bool "
      "interleaved, int second, int third, bool inverse) -> (Tensor, Tensor)");
  m.def(
      "rope_(Tensor(a!) q, Tensor(b!)? k, Tensor cos, Tensor sin, Tensor? positions, int heads_dim, int rotary, bool "
      "interleaved, int second, int third, bool inverse) -> ()");
}

METALCORE_KERNELS(m) {
  m.impl<&metalcore::rope>("rope");
  m.impl<&metalcore::rope_>("rope_");
}
