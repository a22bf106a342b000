#include "decode_plan.h"

#include "../../gpu/cost.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <numbers>

namespace metalcore::attention {
namespace {

// What comes before the sizes in a kernel's name.
std::string kind_of(const DecodePlan& plan) {
  if (plan.lane_keys) return "lanes" + std::to_string(plan.lane_keys) + "_";
  if (plan.matrices) return plan.narrow ? "matrices_narrow_" : "matrices_";
  return !plan.narrow ? "" : plan.general ? "narrow_general_" : "narrow_";
}

std::string why(const DecodeCall& call, const DecodePlan& plan) {
  std::string text = "a threadgroup has up to " + std::to_string(plan.rows) + " rows of " +
                     std::to_string(call.queries) + " queries and " + std::to_string(plan.group) +
                     " heads that share keys" + (plan.narrow ? ", which fit 128 registers a thread" : "");
  if (plan.matrices) text += ", and multiplies matrices, since for so many rows arithmetic is the limit";
  if (plan.splits > 1)
    text += "; " + std::to_string(plan.splits) + " threadgroups share " + std::to_string(call.keys) + " keys, " +
            (plan.together ? "run together and merge their results" : "and a second dispatch merges their results");
  return text;
}

// key / size by a multiplication, for keys below 2^31 (Granlund and Montgomery, 1994).
void set_division(AttentionDecodeParams& params, uint32_t size) {
  params.page_size = size;
  params.page_shift = static_cast<uint32_t>(std::bit_width(size - 1));
  params.page_magic = static_cast<uint32_t>(ceil_div(uint64_t{1} << (31 + params.page_shift), uint64_t{size}));
}

int32_t limit(int64_t distance) { return static_cast<int32_t>(std::clamp<int64_t>(distance, 0, int64_t{1} << 30)); }

AttentionDecodeParams params_of(const DecodeCall& call, const DecodePlan& plan) {
  const bool capped = call.softcap != 0;
  const auto log2e = std::numbers::log2e;
  AttentionDecodeParams params{
      .batch = grid_side(call.batch),
      .kv_heads = grid_side(plan.kv_heads),
      .group = grid_side(plan.group),
      .head_size = grid_side(call.q.size(-1)),
      .value_size = grid_side(call.v.size(-1)),
      .queries = grid_side(call.queries),
      .keys = grid_side(call.keys),
      .splits = grid_side(plan.splits),
      .together = plan.together,
      .alone = plan.alone,
      .ragged = call.q_indptr.has_value(),
      .key_layout = call.pages      ? KEYS_PAGED
                    : call.k_indptr ? KEYS_RAGGED
                                    : KEYS_EACH,
      .vectors = has_vectors(call),
      .general = plan.general,
      .query_type = number_type(call.q),
      .mask_type = call.mask ? number_type(*call.mask) : NUMBER_NONE,
      .sink_type = NUMBER_NONE,
      .out_type = number_type(call.out),
      .lower_right = call.lower_right,
      .left = limit(call.left),
      .right = limit(call.right),
      .query_scale = static_cast<float>(capped ? call.scale / call.softcap : call.scale * log2e),
      .softcap = static_cast<float>(call.softcap * log2e),
      .q = strides_of(call.q, call.query_dims),
      .k = strides_of(call.k, call.key_dims),
      .v = strides_of(call.v, call.key_dims),
      .out = strides_of(call.out, call.query_dims),
      .lse = strides_of(call.lse, call.query_dims),
      .split_step = static_cast<uint32_t>(UINT32_MAX / plan.splits),
  };
  if (call.pages) {
    params.pages = grid_side(call.k.size(call.key_dims.batch));
    params.indices = grid_side(call.pages->indices.numel());
    set_division(params, grid_side(call.pages->size));
  }
  if (call.mask && call.mask_indptr) {
    params.mask_elements = grid_side(call.mask->numel());
    params.mask_key = 1;
  } else if (call.mask) {
    params.mask_batch = call.mask_strides.batch;
    params.mask_head = call.mask_strides.head;
    params.mask_query = call.mask_strides.row;
    params.mask_key = call.mask_strides.column;
    params.mask_first = call.mask_strides.first;
  }
  return params;
}

}  // namespace

bool decode_is_better(int64_t queries, int64_t group, int64_t keys) {
  constexpr int64_t kMostRows = 32, kMostQueries = 8;
  return queries <= kMostQueries && queries * group <= kMostRows && keys >= 32 * queries;
}

Tensor with_rows(const Tensor& tensor) {
  return tensor.stride(-1) == 1 || tensor.size(-1) == 1 ? tensor : torch::stable::contiguous(tensor);
}

uint32_t number_type(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float: return NUMBER_FLOAT;
    case ScalarType::Half: return NUMBER_HALF;
    case ScalarType::BFloat16: return NUMBER_BFLOAT;
    case ScalarType::Bool: return NUMBER_BOOL;
    default: throw std::runtime_error(std::string("metalcore: no kernel for ") + dtype_name(tensor.scalar_type()));
  }
}

DecodeStrides strides_of(const Tensor& tensor, Dims dims) {
  return {dims.batch < 0 ? 0 : tensor.stride(dims.batch), tensor.stride(dims.head), tensor.stride(dims.token), 0};
}

void record_merge(gpu::Recording& recording, const Tensor& parts, const Tensor& part_lse, const MaybeTensor& sinks,
                  const Tensor& out, const Tensor& lse, Dims dims, int64_t queries, int64_t rests) {
  const int64_t tokens = parts.size(0), count = parts.size(1), heads = parts.size(2), size = parts.size(3);
  const int64_t units = heads * ceil_div<int64_t>(size, ATTENTION_MERGE_ELEMENTS);  // of a token
  const auto [team, simdgroups] = plan_merge(out, units, tokens, count);
  const AttentionMergeParams params{
      .heads = grid_side(heads),
      .parts = grid_side(count),
      .value_size = grid_side(size),
      .team = grid_side(team),
      .queries = grid_side(queries),
      .out_type = number_type(out),
      .sink_type = sinks ? number_type(*sinks) : NUMBER_NONE,
      .in = {0, parts.stride(2), parts.stride(0), parts.stride(1)},
      .in_lse = {0, part_lse.stride(2), part_lse.stride(0), part_lse.stride(1)},
      .out = strides_of(out, dims),
      .lse = strides_of(lse, dims),
      .rests = rests,
  };
  recording.kernel("attention_merge_", suffix(parts.scalar_type()))
      .buffer(0, parts)
      .buffer(1, part_lse)
      .buffer(2, sinks);
  recording.buffer(3, out).buffer(4, lse).bytes(5, params);
  recording.dispatch_threadgroups({grid_side(ceil_div(units, simdgroups / team)), grid_side(tokens)},
                                  {static_cast<uint32_t>(gpu::kSimdWidth * simdgroups)});
}

void decode(const char* op, const DecodeCall& call) {
  const DecodePlan plan = plan_decode(call);
  gpu::note_plan(op, plan.matrices ? "decode_matrices" : "decode", [&] { return why(call, plan); });
  AttentionDecodeParams params = params_of(call, plan);
  const bool shared = plan.splits > 1 && !plan.together;
  const int64_t tokens = call.queries * (call.q_indptr ? 1 : call.batch);
  const int64_t heads = plan.group * plan.kv_heads, value_size = call.v.size(-1);
  const Tensor parts = new_tensor({shared ? tokens : 0, plan.splits, heads, value_size}, ScalarType::Float, call.q);
  Tensor part_lse = new_tensor({2 * (shared ? tokens : 0), plan.splits, heads}, ScalarType::Float, call.q);
  if (shared) {
    const int64_t of_request = call.q_indptr ? 0 : call.queries;
    params.out = {of_request * parts.stride(0), parts.stride(2), parts.stride(0), parts.stride(1)};
    params.lse = {of_request * part_lse.stride(0), part_lse.stride(2), part_lse.stride(0), part_lse.stride(1)};
    params.out_type = NUMBER_FLOAT;
    params.rests = tokens * part_lse.stride(0);
  } else if (call.sinks) {
    params.sink_type = number_type(*call.sinks);
  }
  if (shared && call.q_indptr) torch::stable::fill_(part_lse, -INFINITY);  // for queries of no request
  gpu::record(call.out, [&](gpu::Recording& recording) {
    const auto requests = static_cast<double>(call.q_indptr ? 1 : call.batch);
    const double keys = static_cast<double>(plan.keys) * static_cast<double>(plan.kv_heads) * requests;
    const auto sizes = static_cast<double>(call.q.size(-1) + value_size);
    const gpu::Work each = {2 * plan.rows * keys * sizes, keys * sizes * static_cast<double>(call.k.element_size())};
    gpu::in_pieces(recording, plan.tiles, each, [&](const gpu::Piece& piece) {
      params.first_tile = grid_side(piece.first);
      recording.kernel("attention_decode_", kind_of(plan), std::to_string(plan.kernel_size), "x",
                       std::to_string(plan.rows), "_", suffix(call.k.scalar_type()));
      recording.buffer(0, call.q).buffer(1, call.k).buffer(2, call.v);
      if (!plan.matrices) recording.buffer(3, call.mask).buffer(9, call.mask_indptr);
      recording.buffer(4, call.sinks).buffer(5, call.q_indptr);
      recording.buffer(6, call.pages ? call.pages->indptr : call.k_indptr);
      recording.buffer(7, call.pages ? MaybeTensor(call.pages->indices) : std::nullopt);
      recording.buffer(8, call.pages ? MaybeTensor(call.pages->last_page_len) : std::nullopt);
      recording.buffer(10, shared ? parts : call.out).buffer(11, shared ? part_lse : call.lse).bytes(12, params);
      recording.work(piece.work.flops, piece.work.bytes);
      recording.together(plan.together ? static_cast<uint32_t>(plan.splits) : 1);
      recording.dispatch_threadgroups(
          {grid_side(piece.count), grid_side(plan.kv_heads * plan.splits), grid_side(call.q_indptr ? 1 : call.batch)},
          {gpu::kSimdWidth * plan.simdgroups});
    });
    if (shared)
      record_merge(recording, parts, part_lse, call.sinks, call.out, call.lse, call.query_dims,
                   call.q_indptr ? tokens : call.queries, params.rests);
  });
}

}  // namespace metalcore::attention
