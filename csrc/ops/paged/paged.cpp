// Attention over the pages of a cache, what puts new tokens there, and merging of attention's results.
#include "paged.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <tuple>
#include <utility>

namespace metalcore {
namespace {

using attention::Dims;

// The dimensions of a pool: (pages, heads, page_size, size), or (pages, page_size, heads, size).
Dims pool_dims(bool heads_first) { return heads_first ? Dims{0, 1, 2} : Dims{0, 2, 1}; }
// A token for each request: (requests, heads, size).
constexpr Dims kOneToken = {0, 1, 0};

void check_indices(const char* op, const Tensor& on, std::initializer_list<std::pair<const char*, const Tensor*>> all) {
  for (const auto& [name, tensor] : all) {
    check_same_device(op, name, *tensor, on);
    check(tensor->scalar_type() == ScalarType::Int && tensor->dim() == 1 && tensor->is_contiguous(), "metalcore::", op,
          ": ", name, " must be a contiguous int32 vector");
  }
}

void check_pools(const char* op, const Tensor& k, const Tensor& v, const Tensor& on, Dims dims) {
  check_float(op, "the cache", k);
  check_same_dtype(op, "the values' cache", v, k);
  check_same_device(op, "the keys' cache", k, on);
  check_same_device(op, "the values' cache", v, on);
  check(k.dim() == 4 && v.dim() == 4, "metalcore::", op, ": a cache must have 4 dimensions");
  for (int64_t d = 0; d < 3; ++d)
    check(k.size(d) == v.size(d), "metalcore::", op, ": the caches have the shapes ", shape_text(k), " and ",
          shape_text(v));
  check(k.size(dims.token) >= 1, "metalcore::", op, ": pages must have a token and more");
}

}  // namespace

void paged_attention_into(Tensor out, Tensor lse, const Tensor& q, const MaybeTensor& qo_indptr, const Tensor& k,
                          const Tensor& v, const Tensor& kv_indptr, const Tensor& kv_indices,
                          const Tensor& kv_last_page_len, bool heads_first, const MaybeTensor& mask,
                          const MaybeTensor& mask_indptr, const MaybeTensor& sinks, int64_t left, int64_t right,
                          double scale, double softcap) {
  const char* op = "paged_attention";
  const Dims dims = pool_dims(heads_first);
  check_indices(op, q,
                {{"kv_indptr", &kv_indptr}, {"kv_indices", &kv_indices}, {"kv_last_page_len", &kv_last_page_len}});
  if (qo_indptr) check_indices(op, q, {{"qo_indptr", &*qo_indptr}});
  check(mask.has_value() == mask_indptr.has_value(), "metalcore::", op, ": mask and mask_indptr go together");
  const int64_t tokens = q.size(0), heads = q.size(1), kv_heads = k.size(dims.head);
  const int64_t batch = qo_indptr ? qo_indptr->size(0) - 1 : tokens;
  check(batch >= 0 && kv_indptr.size(0) == batch + 1 && kv_last_page_len.size(0) == batch, "metalcore::", op, ": ",
        batch, " requests need ", batch + 1, " numbers in kv_indptr and ", batch, " in kv_last_page_len, not ",
        kv_indptr.size(0), " and ", kv_last_page_len.size(0));
  check(kv_heads > 0 && heads % kv_heads == 0, "metalcore::", op, ": ", heads, " heads of q are no multiple of ",
        kv_heads, " of the cache");
  check(q.size(2) == k.size(3) && attention::decode_has_sizes(k.size(3), v.size(3)), "metalcore::", op, ": heads of ",
        q.size(2), " (q), ", k.size(3), " (keys) and ", v.size(3), " (values) do not go together");
  if (mask) {
    check_indices(op, q, {{"mask_indptr", &*mask_indptr}});
    check_same_device(op, "mask", *mask, q);
    check(mask->scalar_type() == ScalarType::Bool && mask->dim() == 1 && mask->is_contiguous() &&
              mask_indptr->size(0) == batch + 1,
          "metalcore::", op, ": mask must be a contiguous bool vector, and mask_indptr have ", batch + 1, " numbers");
  }
  if (sinks) {
    check_float(op, "sinks", *sinks);
    check_same_device(op, "sinks", *sinks, q);
    check(sinks->dim() == 1 && sinks->size(0) == heads, "metalcore::", op, ": sinks must have ", heads, " numbers");
  }
  const int64_t keys = kv_indices.size(0) * k.size(dims.token);
  check(keys < INT64_C(1) << 30, "metalcore::", op, ": ", keys, " keys are more than kernels can count");

  if (tokens == 0 || heads == 0) return;
  if (qo_indptr) {  // for queries of no request
    torch::stable::zero_(out);
    torch::stable::fill_(lse, -INFINITY);
    if (batch == 0) return;
  }
  attention::decode(op, {
                            .q = attention::with_rows(q),
                            .k = attention::with_rows(k),
                            .v = attention::with_rows(v),
                            .out = out,
                            .lse = lse,
                            .query_dims = qo_indptr ? attention::kTokens : kOneToken,
                            .key_dims = dims,
                            .mask = mask,
                            .sinks = sinks ? MaybeTensor(as_contiguous(*sinks)) : std::nullopt,
                            .mask_indptr = mask_indptr,
                            .q_indptr = qo_indptr,
                            .pages = attention::Pages{kv_indptr, kv_indices, kv_last_page_len, k.size(dims.token)},
                            .batch = batch,
                            .queries = qo_indptr ? tokens : 1,
                            .keys = keys,
                            .left = left,
                            .right = right,
                            .lower_right = true,
                            .scale = scale,
                            .softcap = softcap,
                        });
}

void paged_append(const Tensor& key, const Tensor& value, const Tensor& batch_indices, const Tensor& positions,
                  const Tensor& k, const Tensor& v, const Tensor& kv_indptr, const Tensor& kv_indices,
                  bool heads_first) {
  const char* op = "paged_append";
  const Dims dims = pool_dims(heads_first);
  check_float(op, "key", key);
  check_same_dtype(op, "value", value, key);
  check_same_device(op, "value", value, key);
  check_pools(op, k, v, key, dims);
  check_indices(op, key,
                {{"batch_indices", &batch_indices},
                 {"positions", &positions},
                 {"kv_indptr", &kv_indptr},
                 {"kv_indices", &kv_indices}});
  check(key.dim() == 3 && value.dim() == 3 && key.size(0) == value.size(0) && key.size(1) == value.size(1) &&
            key.size(1) == k.size(dims.head) && key.size(2) == k.size(3) && value.size(2) == v.size(3),
        "metalcore::", op, ": key and value of the shapes ", shape_text(key), " and ", shape_text(value),
        " do not go with caches of the shapes ", shape_text(k), " and ", shape_text(v));
  check(batch_indices.size(0) == key.size(0) && positions.size(0) == key.size(0), "metalcore::", op,
        ": batch_indices and positions must have ", key.size(0), " numbers");
  check(kv_indptr.size(0) >= 1, "metalcore::", op, ": kv_indptr is empty");
  check(k.stride(3) == 1 && v.stride(3) == 1, "metalcore::", op, ": a cache's last dimension must be contiguous");
  if (key.numel() + value.numel() == 0 || kv_indices.size(0) == 0) return;
  const Tensor from_key = attention::with_rows(key), from_value = attention::with_rows(value);
  const PagedAppendParams params{
      .tokens = grid_side(key.size(0)),
      .heads = grid_side(key.size(1)),
      .key_size = grid_side(key.size(2)),
      .value_size = grid_side(value.size(2)),
      .batch = grid_side(kv_indptr.size(0) - 1),
      .pages = grid_side(k.size(0)),
      .indices = grid_side(kv_indices.size(0)),
      .page_size = grid_side(k.size(dims.token)),
      .in_type = attention::number_type(key),
      .cache_type = attention::number_type(k),
      .key = attention::strides_of(from_key, attention::kTokens),
      .value = attention::strides_of(from_value, attention::kTokens),
      .key_pages = attention::strides_of(k, dims),
      .value_pages = attention::strides_of(v, dims),
  };
  gpu::note_plan(op, "pages", [&] { return "a thread has an element of a key and of a value"; });
  const uint32_t width = grid_side(std::max(key.size(2), value.size(2)));
  gpu::record(k, [&](gpu::Recording& recording) {
    recording.kernel("paged_append").buffer(0, from_key).buffer(1, from_value);
    recording.buffer(2, batch_indices).buffer(3, positions).buffer(4, kv_indptr).buffer(5, kv_indices);
    recording.buffer(6, k).buffer(7, v).bytes(8, params);
    const double moved = static_cast<double>(key.numel() + value.numel());
    recording.work(moved, moved * static_cast<double>(key.element_size() + k.element_size()));
    recording.dispatch_threads({width, params.heads, params.tokens}, {std::min(width, 256u)});
  });
}

namespace {

// FlashInfer's BatchPrefillWithPagedKVCache and BatchDecodeWithPagedKVCache. Returns the results and the natural
// logarithms of the sums.
std::tuple<Tensor, Tensor> paged_attention(const Tensor& q, const MaybeTensor& qo_indptr, const Tensor& k,
                                           const Tensor& v, const Tensor& kv_indptr, const Tensor& kv_indices,
                                           const Tensor& kv_last_page_len, bool heads_first, const MaybeTensor& mask,
                                           const MaybeTensor& mask_indptr, const MaybeTensor& sinks, int64_t left,
                                           int64_t right, double scale, double softcap) {
  const char* op = "paged_attention";
  check_float(op, "q", q);
  check(q.dim() == 3, "metalcore::", op, ": q must have 3 dimensions, not ", q.dim());
  check_pools(op, k, v, q, pool_dims(heads_first));
  const int64_t out_sizes[3] = {q.size(0), q.size(1), v.size(3)};
  const Tensor out = new_tensor(Sizes(out_sizes, 3), q.scalar_type(), q);
  const Tensor lse = new_tensor(Sizes(out_sizes, 2), ScalarType::Float, q);
  paged_attention_into(out, lse, q, qo_indptr, k, v, kv_indptr, kv_indices, kv_last_page_len, heads_first, mask,
                       mask_indptr, sinks, left, right, scale, softcap);
  return {out, lse};
}

// FlashInfer's merge_states: results (tokens, states, heads, size) with their lse (tokens, states, heads).
std::tuple<Tensor, Tensor> merge_states(const Tensor& v, const Tensor& s) {
  const char* op = "merge_states";
  check_float(op, "v", v);
  check_float32(op, "s", s);
  check_same_device(op, "s", s, v);
  check(v.dim() == 4 && s.dim() == 3 && v.size(0) == s.size(0) && v.size(1) == s.size(1) && v.size(2) == s.size(2),
        "metalcore::", op, ": v and s have the shapes ", shape_text(v), " and ", shape_text(s));
  check(v.size(3) > 0, "metalcore::", op, ": v must have a last dimension of 1 and more");
  const int64_t out_sizes[3] = {v.size(0), v.size(2), v.size(3)}, lse_sizes[2] = {v.size(0), v.size(2)};
  Tensor out = new_tensor(Sizes(out_sizes, 3), v.scalar_type(), v);
  Tensor lse = new_tensor(Sizes(lse_sizes, 2), ScalarType::Float, v);
  if (lse.numel() == 0) return {out, lse};
  const Tensor parts = attention::with_rows(v);
  gpu::note_plan(op, "merge", [&] { return "a threadgroup has a token and a head"; });
  gpu::record(out, [&](gpu::Recording& recording) {
    attention::record_merge(recording, parts, s, std::nullopt, out, lse, attention::kTokens, v.size(0), /*rests=*/0);
  });
  return {out, lse};
}

}  // namespace
}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) {
  m.def(
      "paged_attention(Tensor q, Tensor? qo_indptr, Tensor k, Tensor v, Tensor kv_indptr, Tensor kv_indices, "
      "Tensor kv_last_page_len, bool heads_first, Tensor? mask, Tensor? mask_indptr, Tensor? sinks, int left, "
      "int right, float scale, float softcap) -> (Tensor, Tensor)");
  m.def(
      "paged_append(Tensor key, Tensor value, Tensor batch_indices, Tensor positions, Tensor(a!) k, Tensor(b!) v, "
      "Tensor kv_indptr, Tensor kv_indices, bool heads_first) -> ()");
  m.def("merge_states(Tensor v, Tensor s) -> (Tensor, Tensor)");
}

METALCORE_KERNELS(m) {
  m.impl<&metalcore::paged_attention>("paged_attention");
  m.impl<&metalcore::paged_append>("paged_append");
  m.impl<&metalcore::merge_states>("merge_states");
}
