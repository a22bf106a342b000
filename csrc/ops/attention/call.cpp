#include "call.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace metalcore::attention {
namespace {

// Threads of Apple's GPUs have at most 128 registers, and wide kernels take up to 255. Nobody has timed either there.
const gpu::Table<AttentionTuning> tuning_table(
    "attention",
    {{"narrow_forward", &AttentionTuning::narrow_forward},
     {"narrow_dq", &AttentionTuning::narrow_dq},
     {"narrow_dkv", &AttentionTuning::narrow_dkv},
     {"units", &AttentionTuning::units}},
    {{.family = "baseline"},
     {.family = "apple7", .narrow_forward = true, .narrow_dq = true, .narrow_dkv = true},
     {.family = "apple8", .narrow_forward = true, .narrow_dq = true, .narrow_dkv = true},
     {.family = "apple9", .narrow_forward = true, .narrow_dq = true, .narrow_dkv = true},
     {.family = "apple10", .narrow_forward = true, .narrow_dq = true, .narrow_dkv = true},
     {.family = "hopper", .units = true}});

constexpr uint32_t kSizes[] = {ATTENTION_SIZES}, kUnitSizes[] = {ATTENTION_UNIT_SIZES};
constexpr int64_t kMostLength = ATTENTION_UNLIMITED - 1;

template <size_t n>
uint32_t kernel_size(const uint32_t (&sizes)[n], int64_t q_size, int64_t v_size) {
  for (const uint32_t size : sizes)
    if (std::max(q_size, v_size) <= size) return size;
  return 0;
}

void check_shapes(const char* op, const Arguments& a) {
  check_float(op, "q", a.q);
  for (const auto& [name, tensor] : {std::pair{"k", &a.k}, std::pair{"v", &a.v}}) {
    check_same_device(op, name, *tensor, a.q);
    check_same_dtype(op, name, *tensor, a.q);
  }
  check(a.q.dim() == 4 && a.k.dim() == 4 && a.v.dim() == 4, "metalcore::", op, ": q, k and v must have 4 dimensions");
  const auto q = a.q.sizes(), k = a.k.sizes(), v = a.v.sizes();
  check(q[0] == k[0] && k[0] == v[0] && k[1] == v[1] && k[2] == v[2] && q[3] == k[3] && q[3] > 0 && v[3] > 0 &&
            (k[1] > 0 ? q[1] % k[1] == 0 : q[1] == 0),
        "metalcore::", op, ": q, k and v of shapes ", shape_text(q), ", ", shape_text(k), " and ", shape_text(v),
        " do not go together");
  check(std::max(q[2], k[2]) <= kMostLength, "metalcore::", op, ": more than ", kMostLength, " queries or keys");
}

// int32 numbers that lie beside each other.
void check_integers(const char* op, const char* name, const Tensor& tensor, const Tensor& on) {
  check_same_device(op, name, tensor, on);
  check(tensor.scalar_type() == ScalarType::Int && tensor.dim() == 1 && tensor.is_contiguous(), "metalcore::", op, ": ",
        name, " must be contiguous int32 numbers");
}

uint32_t mask_kind(const char* op, const Arguments& a) {
  if (!a.mask) return ATTENTION_NO_MASK;
  const Tensor& mask = *a.mask;
  check_same_device(op, "mask", mask, a.q);
  if (mask.scalar_type() == ScalarType::Bool) return ATTENTION_BOOL_MASK;
  if (mask.scalar_type() == a.q.scalar_type()) return ATTENTION_ADDED_MASK;
  check(mask.scalar_type() == ScalarType::Float, "metalcore::", op, ": mask must be bool, float32 or ",
        dtype_name(a.q.scalar_type()), ", not ", dtype_name(mask.scalar_type()));
  return ATTENTION_ADDED_FLOAT_MASK;
}

// Where the mask has the number for a query and a key. Dimensions of size 1 are for all; a row that is longer has a
// number for each distance, from that of the last query to the first key on.
AttentionMaskStrides mask_strides(const char* op, const Arguments& a, int64_t batches) {
  const Tensor& mask = *a.mask;
  const bool variable = a.cu_seq_q.has_value();
  const int64_t queries = variable ? a.max_q : a.q.size(2), keys = variable ? a.max_k : a.k.size(2);
  const int64_t others = std::max<int64_t>(queries, 1) - 1, distances = others + keys;
  const int64_t shape[4] = {batches, a.q.size(1), queries, keys};
  const bool diagonal = mask.dim() == 4 && mask.size(2) == 1 && mask.size(3) == distances && (variable || queries > 1);
  bool fits = mask.dim() == 4 && (diagonal || !variable);
  for (int64_t d = 0; fits && d < (diagonal ? 2 : 4); ++d) fits = mask.size(d) == shape[d] || mask.size(d) == 1;
  check(fits, "metalcore::", op, ": mask must have shape ", shape_text(Sizes(shape, 4)), ", or 1 in places, or ",
        distances, " columns in one row, not ", shape_text(mask));
  const auto stride = [&](int64_t d) { return mask.size(d) == 1 ? 0 : mask.stride(d); };
  if (!diagonal) return {stride(0), stride(1), stride(2), stride(3), 0};
  return {stride(0), stride(1), -stride(3), stride(3), stride(3) * others};
}

bool mask_has_pairs(const Tensor& mask, const AttentionMaskStrides& strides) {
  const gpu::BufferView view = gpu::view_of(mask);
  const bool aligned = (reinterpret_cast<uintptr_t>(view.storage) + view.offset) % (2 * mask.element_size()) == 0;
  return aligned && strides.column == 1 && (strides.first | strides.batch | strides.head | strides.row) % 2 == 0;
}

int32_t limit(int64_t n) { return static_cast<int32_t>(n < 0 ? ATTENTION_UNLIMITED : std::min(n, kMostLength)); }

}  // namespace

Tensor new_like_heads(const Tensor& like, int64_t size) {
  const int64_t heads = like.size(1), length = like.size(2), sizes[4] = {like.size(0), heads, length, size};
  const int64_t one = std::max<int64_t>(size, 1), h = std::max<int64_t>(heads, 1), l = std::max<int64_t>(length, 1);
  const bool heads_inside = like.stride(1) < like.stride(2);
  const int64_t strides[4] = {h * l * one, heads_inside ? one : l * one, heads_inside ? h * one : one, 1};
  return new_strided(Sizes(sizes, 4), Sizes(strides, 4), like.scalar_type(), like);
}

Tensor with_dense_rows(const Tensor& tensor) {
  return tensor.stride(3) == 1 || tensor.size(3) == 1 ? tensor : torch::stable::contiguous(tensor);
}

AttentionStrides strides_of(const Tensor& tensor, bool variable) {
  return {variable ? 0 : tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

bool has_vectors(const Tensor& tensor, int64_t size) {
  const auto multiple = [&](int64_t elements) { return elements * tensor.element_size() % 16 == 0; };
  bool all = multiple(size) && reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 == 0;
  for (int64_t d = 0; d < 3; ++d) all = all && (tensor.size(d) == 1 || multiple(tensor.stride(d)));
  return all;
}

Call call_of(const char* op, const Arguments& a) {
  check_shapes(op, a);
  const bool variable = a.cu_seq_q.has_value();
  check(variable == a.cu_seq_k.has_value(), "metalcore::", op, ": cu_seq_q and cu_seq_k go together");
  if (variable) {
    check_integers(op, "cu_seq_q", *a.cu_seq_q, a.q);
    check_integers(op, "cu_seq_k", *a.cu_seq_k, a.q);
    check(a.cu_seq_q->numel() == a.cu_seq_k->numel() && a.cu_seq_q->numel() > 0, "metalcore::", op,
          ": cu_seq_q and cu_seq_k must have one number more than there are sequences");
    check(a.q.size(0) == 1, "metalcore::", op, ": with cu_seq_q there must be one batch item");
  }
  check(0.0 <= a.dropout && a.dropout <= 1.0, "metalcore::", op, ": dropout must be in [0, 1], not ", a.dropout);
  if (a.dropout > 0.0) {
    check(a.seed.has_value(), "metalcore::", op, ": dropout needs a seed");
    check_integers(op, "seed", *a.seed, a.q);
    check(a.seed->numel() == 2, "metalcore::", op, ": seed must have 2 numbers, not ", a.seed->numel());
  }
  const Tensor q = with_dense_rows(a.q), k = with_dense_rows(a.k), v = with_dense_rows(a.v);
  const int64_t heads = q.size(1), k_heads = k.size(1);
  MaybeTensor sinks;
  if (a.sinks) {
    check_float(op, "sinks", *a.sinks);
    check_same_device(op, "sinks", *a.sinks, q);
    check(a.sinks->dim() == 1 && a.sinks->numel() == heads, "metalcore::", op, ": sinks must have ", heads, " numbers");
    sinks = as_contiguous(torch::stable::to(*a.sinks, ScalarType::Float));
  }
  const uint32_t kind = mask_kind(op, a);
  const double dropped = std::min(std::nearbyint(a.dropout * 4294967296.0), 4294967295.0);
  Call call{
      .q = q,
      .k = k,
      .v = v,
      .mask = a.mask,
      .sinks = sinks,
      .cu_seq_q = a.cu_seq_q,
      .cu_seq_k = a.cu_seq_k,
      .seed = a.dropout > 0.0 ? a.seed : std::nullopt,
      .batches = variable ? a.cu_seq_q->numel() - 1 : q.size(0),
      .heads = heads,
      .k_heads = k_heads,
      .longest_q = variable ? std::min(a.max_q, q.size(2)) : q.size(2),
      .longest_k = variable ? std::min(a.max_k, k.size(2)) : k.size(2),
      .size = kernel_size(kSizes, q.size(3), v.size(3)),
      .params = {},
  };
  AttentionParams& p = call.params;
  p.q = strides_of(q, variable);
  p.k = strides_of(k, variable);
  p.v = strides_of(v, variable);
  if (call.mask) p.mask = mask_strides(op, a, call.batches);
  p.band = {limit(a.left), limit(a.right), a.lower_right};
  p.heads = grid_side(heads);
  p.group = k_heads > 0 ? grid_side(heads / k_heads) : 1;
  p.q_length = grid_side(q.size(2));
  p.k_length = grid_side(k.size(2));
  p.head_size = grid_side(q.size(3));
  p.value_size = grid_side(v.size(3));
  p.variable = variable;
  p.mask_kind = kind;
  p.mask_pairs = call.mask && mask_has_pairs(*call.mask, p.mask);
  p.has_sinks = a.sinks.has_value();
  p.vectors = has_vectors(q, q.size(3)) && has_vectors(k, q.size(3)) && has_vectors(v, v.size(3));
  p.numbers = q.size(0) * heads * q.size(2);
  p.scale = static_cast<float>(a.scale);
  p.product_scale = static_cast<float>(a.softcap > 0.0 ? a.scale / a.softcap : a.scale * std::numbers::log2e);
  p.softcap = static_cast<float>(a.softcap * std::numbers::log2e);
  p.dropped = static_cast<uint32_t>(dropped);
  p.kept_scale = a.dropout < 1.0 ? static_cast<float>(1.0 / (1.0 - a.dropout)) : 0.0f;
  return call;
}

const AttentionTuning& attention_tuning(const Tensor& tensor) { return tuning_table(tensor); }

namespace {
// Narrow kernels without masks, soft caps and dropout leave these branches out of their loops.
bool is_general(const Call& call) {
  const AttentionParams& p = call.params;
  return p.mask_kind != ATTENTION_NO_MASK || p.softcap != 0.0f || p.dropped != 0;
}
}  // namespace

uint32_t unit_size(const Call& call) {
  if (!attention_tuning(call.q).units || !gpu::multiplies_held_tensors(call.q) || call.q.element_size() != 2 ||
      call.params.dropped != 0)
    return 0;
  // The tensors of these kernels have strides of 32 bits.
  if (std::max({call.q.stride(2), call.k.stride(2), call.v.stride(2)}) > INT32_MAX) return 0;
  return kernel_size(kUnitSizes, call.params.head_size, call.params.value_size);
}

std::string unit_kind_of(const Call& call) {
  return is_general(call) || !(call.params.product_scale > 0.0f) ? "unit_general_" : "unit_";
}

std::string kind_of(const Call& call, bool narrow) {
  return !narrow ? "" : is_general(call) ? "narrow_general_" : "narrow_";
}

std::string kind_text(const Call& call, bool narrow) {
  if (!narrow) return "";
  return std::string(" (8 a simdgroup, which fits 128 registers a thread; ") + (is_general(call) ? "with" : "without") +
         " masks, soft caps and dropout)";
}

void check_size(const char* op, const Call& call) {
  check(call.size, "metalcore::", op, ": head sizes must be at most ", std::end(kSizes)[-1], ", not ",
        std::max(call.params.head_size, call.params.value_size));
}

uint32_t turns_of(const AttentionParams& params, int64_t heads) {
  constexpr int64_t kMostTurns = 8;
  if (params.band.right == ATTENTION_UNLIMITED && params.band.left == ATTENTION_UNLIMITED) return 1;
  int64_t turns = std::clamp<int64_t>(heads, 1, kMostTurns);
  while (heads % turns != 0) --turns;
  return static_cast<uint32_t>(turns);
}

std::string size_text(const Call& call, uint32_t size) {
  const std::string q = std::to_string(call.params.head_size), v = std::to_string(call.params.value_size);
  return "head size " + q + (q == v ? "" : " (" + v + " of values)") + " in tiles for " + std::to_string(size);
}

}  // namespace metalcore::attention
