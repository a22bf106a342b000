#include "decode.h"

#include "../../gpu/cost.h"
#include "../../gpu/tuning.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <numbers>

namespace metalcore::attention {
namespace {

struct DecodeTuning {
  const char* family;
  gpu::Count fill_threadgroups = gpu::filling_threadgroups(4);  // share the keys of all requests
  uint32_t simdgroups = 4;                                      // of a threadgroup
  uint32_t least_share = 128;                                   // keys of a threadgroup
  gpu::Count fill_matrices = gpu::filling_threadgroups(4);      // as above, of the kernels that multiply matrices
  int64_t most_plain_rows = 4;     // more rows of up to 128 16-bit numbers multiply matrices
  int64_t long_share = INT64_MAX;  // bytes of keys and values from which threadgroups of full GPUs take turns
  bool narrow = false;             // threads have at most 128 registers
  uint32_t merge_simdgroups = 1;   // of a threadgroup that merges results of several heads
  bool lanes = false;              // lanes may load the operands of products
};
const gpu::Table<DecodeTuning> decode_tuning("attention_decode",
                                             {{"fill_threadgroups", &DecodeTuning::fill_threadgroups, {1, 2048}},
                                              {"simdgroups", &DecodeTuning::simdgroups, {1, 4}},
                                              {"least_share", &DecodeTuning::least_share, {32, 4096}},
                                              {"fill_matrices", &DecodeTuning::fill_matrices, {1, 2048}},
                                              {"narrow", &DecodeTuning::narrow},
                                              {"merge_simdgroups", &DecodeTuning::merge_simdgroups, {1, 16}}},
                                             {{.family = "baseline"},
                                              {.family = "apple7", .narrow = true},
                                              {.family = "apple8", .narrow = true},
                                              {.family = "apple9", .narrow = true},
                                              {.family = "apple10", .narrow = true},
                                              {.family = "hopper",
                                               .fill_threadgroups = gpu::per_core(3),
                                               .least_share = 32,
                                               .fill_matrices = gpu::per_core(2),
                                               .most_plain_rows = 1,
                                               .long_share = 1 << 19,
                                               .merge_simdgroups = 8,
                                               .lanes = true},
                                              {.family = "simulator", .fill_threadgroups = 2, .fill_matrices = 2}});

struct Sizes2 {
  int64_t head, value;
};
constexpr Sizes2 kSizes[] = {{64, 64}, {128, 128}, {256, 256}, {576, 512}};
constexpr int64_t kMostSplits = 512;
constexpr int64_t kUnlimited = int64_t{1} << 30;

const Sizes2* sizes_for(int64_t head_size, int64_t value_size) {
  for (const Sizes2& sizes : kSizes)
    if (head_size <= sizes.head && value_size <= sizes.value) return &sizes;
  return nullptr;
}

// Keys that a threadgroup with matrices has at a time.
constexpr int64_t kMatrixStep = 64;
// The most keys of a wide threadgroup whose sums the tensor cores' rounding does not show in.
constexpr int64_t kMostMatrixKeys = 8192;

struct DecodePlan {
  bool matrices;        // the kernel multiplies matrices
  int64_t kernel_size;  // as in the kernel's name
  uint32_t rows;        // of a threadgroup
  int64_t tiles;        // of all rows of a request, or of all requests where they have different lengths
  int64_t splits;
  bool together;  // these run together and merge their results
  uint32_t simdgroups;
  int64_t group, kv_heads;
  int64_t keys;  // of a request, taking all to have the same number where only the device knows it
  bool general;  // there is a mask or a soft cap, or rows that cannot be loaded by vectors, or lie far apart
  bool narrow;
  bool alone;             // later kernels begin when this one has ended
  int64_t lane_keys = 0;  // of a simdgroup whose lanes load the operands of products
};

bool aligned16(const Tensor& tensor) {
  const auto size = static_cast<int64_t>(tensor.element_size());
  if (reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 || tensor.size(-1) * size % 16) return false;
  for (int64_t d = 0; d + 1 < tensor.dim(); ++d)
    if (tensor.size(d) > 1 && tensor.stride(d) * size % 16) return false;
  return true;
}

bool has_vectors(const DecodeCall& call) { return aligned16(call.k) && aligned16(call.v); }

// Kernels that are not general take tokens to be fewer than 2^32 bytes apart.
bool has_near_tokens(const DecodeCall& call) {
  const int64_t stride = std::max(call.k.stride(call.key_dims.token), call.v.stride(call.key_dims.token));
  return stride * static_cast<int64_t>(call.k.element_size()) < (int64_t{1} << 32);
}

// Whether there is a kernel that multiplies matrices: it has no masks, no soft caps, and one dtype.
bool takes_matrices(const DecodeCall& call, int64_t kernel_size, bool general, bool narrow) {
  return !general && kernel_size <= (narrow ? 128 : 256) && call.k.element_size() == 2 &&
         call.q.scalar_type() == call.k.scalar_type() && aligned16(call.q);
}

// How many threadgroups share the keys of a tile, at most `most`, where wide ones multiply matrices. A threadgroup
// takes whole steps, so that more of them may have as many steps each. An H200 takes time for a step as for 6/5
// threadgroups and those that share a core. The 65th to 128th results of 16 rows take as long to merge as 3/2 steps,
// and those of more rows longer. Fewer threadgroups than the most must save an eighth of the time.
int64_t whole_steps(int64_t keys, int64_t rows, int64_t busy, int64_t least, int64_t most, int64_t cores) {
  int64_t best = most, best_time = 0;
  for (int64_t splits = most; splits >= least; --splits) {
    const int64_t steps = ceil_div(ceil_div(keys, kMatrixStep), splits);
    const int64_t merging = rows * (ceil_div(splits, int64_t{64}) - 1);
    const int64_t time = steps * (6 + 5 * ceil_div(busy * splits, std::max<int64_t>(cores, 1))) + merging;
    if (splits == most || 8 * time < 7 * best_time) best = splits, best_time = time;
  }
  return best;
}

// Whether a GPU that has room for `fill` threadgroups runs those of all tiles at once where those of a tile run
// together. They lie in one of a GPU's parts (an H200's have up to 18 cores), of which some cores are left over. An
// H200 has room for 496 of 528 threadgroups by fours or eights, 470 by fives, and 28 times nine to sixteen of them.
bool all_at_once(int64_t tiles, int64_t splits, int64_t fill) {
  if (splits > 8) return 22 * tiles <= fill;
  const bool even = std::has_single_bit(static_cast<uint64_t>(splits));
  return even ? 11 * tiles * splits <= 10 * fill : 20 * tiles * splits <= 17 * fill;
}

// Threadgroups whose lanes load the operands of products take less time than others for rows of 64 numbers where all
// cores have as many of them as fit, or nearly so, as an H200 has shown for 1,024 keys and more.
constexpr int64_t kLeastLaneKeys = 1024;
struct LaneForm {
  int64_t keys;         // of a simdgroup, or 0
  uint32_t simdgroups;  // of a threadgroup
  int64_t fill;         // threadgroups, in quarters of those of other kernels
  int64_t splits;
};
LaneForm plan_lanes(int64_t busy, int64_t fill) {
  for (const LaneForm& form : {LaneForm{32, 8, 1, 1}, LaneForm{32, 4, 3, 2}, LaneForm{16, 8, 2, 1}}) {
    const int64_t room = form.fill * fill / 4, all = busy * form.splits;
    if (all <= room && 16 * all >= 15 * room) return form;
  }
  return {};
}

DecodePlan plan_decode(const DecodeCall& call) {
  const DecodeTuning& tuning = decode_tuning(call.q);
  const int64_t kv_heads = call.k.size(call.key_dims.head), group = call.q.size(call.query_dims.head) / kv_heads;
  const int64_t kernel_size = sizes_for(call.q.size(-1), call.v.size(-1))->head;
  const bool ragged = call.q_indptr.has_value();
  const int64_t rows = call.queries * group;
  const bool few = rows <= 4 || (ragged && call.queries <= call.batch && group <= 4);
  const bool single = rows == 1 || (ragged && call.queries <= call.batch && group == 1);
  const bool general = call.mask || call.softcap != 0 || !has_vectors(call) || !has_near_tokens(call);
  // Where only the device knows the lengths, the plan assumes that all requests have as many rows.
  const int64_t usual_rows = ragged ? ceil_div(call.queries, call.batch) * group : rows;
  const bool matrices = usual_rows > (kernel_size <= 128 ? tuning.most_plain_rows : 4) &&
                        takes_matrices(call, kernel_size, general, tuning.narrow);
  const uint32_t matrix_tile = kernel_size > 128 ? 16 : usual_rows <= 8 ? 8 : usual_rows <= 16 ? 16 : 32;
  const uint32_t wide_tile = matrices                       ? matrix_tile
                             : general || kernel_size > 256 ? 8
                             : single                       ? 1
                             : few                          ? 4
                                                            : 8;  // kernels of fewer rows are not general
  const uint32_t narrow_tile = matrices ? (kernel_size <= 64 ? 16 : 8) : single && kernel_size <= 256 ? 1 : 4;
  const uint32_t tile = tuning.narrow ? narrow_tile : wide_tile;
  const int64_t tiles = ceil_div<int64_t>(rows, tile) + (ragged ? call.batch : 0);
  const int64_t of_request = call.pages || call.k_indptr ? ceil_div(call.keys, call.batch) : call.keys;
  const int64_t keys = std::min(of_request, call.left + call.right + call.queries);
  const int64_t busy = tiles * kv_heads * (ragged ? 1 : call.batch);
  const bool wide = matrices && !tuning.narrow, large = matrices && kernel_size > 128;
  // Twice as many wide threadgroups that multiply matrices share a core, except those of 32 long rows, and a third more
  // of those with short rows that multiply none.
  const bool heavy = wide && tile == 32 && kernel_size > 64, is_short = kernel_size <= 64 && !tuning.narrow;
  const int64_t fill_plain = static_cast<int64_t>(tuning.fill_threadgroups) * (is_short ? 4 : 3) / 3;
  const int64_t fill = !matrices ? fill_plain : static_cast<int64_t>(tuning.fill_matrices) * (wide && !heavy ? 2 : 1);
  const int64_t least_share = std::max<int64_t>(tuning.least_share, matrices ? kMatrixStep >> large : 1);
  // Simdgroups of one short row ask for twice as many keys at a time as others. Where some cores have three
  // threadgroups and some have four, these take more of memory's speed than their part, so half of the simdgroups do.
  const bool uneven = 4 * busy > 3 * fill && 16 * busy < 15 * fill;
  const bool short_rows = tile == 1 && is_short && call.k.element_size() == 2;
  const uint32_t simdgroups = large || (short_rows && uneven) ? 2 : wide ? 4 : tuning.simdgroups;
  // A part of a step takes a wide threadgroup as long as all of it.
  const int64_t shares = std::min(wide ? ceil_div(keys, least_share) : keys / least_share, kMostSplits);
  // Cores get unequal parts of memory's speed. Where each tile has one threadgroup and a long way to go, there are
  // about twice as many threadgroups as the GPU holds, so that the faster cores take more of them. Those that multiply
  // matrices, or have short rows, all run at once.
  const int64_t bytes = keys * (call.q.size(-1) + call.v.size(-1)) * static_cast<int64_t>(call.k.element_size());
  const bool in_turns = fill < 2 * busy && bytes >= tuning.long_share && !matrices && !is_short;
  const int64_t threadgroups = in_turns ? 2 * fill : fill;
  const int64_t least_splits = std::min(wide ? ceil_div(keys, kMostMatrixKeys) : 1, kMostSplits);
  const int64_t of_tile = threadgroups / std::max<int64_t>(busy, 1);
  // One threadgroup for each of many short rows takes less time than two and a merge.
  const bool whole = short_rows && of_tile == 2 && busy > 1;
  const int64_t most_splits = whole || keys < 2 * least_share ? 1 : std::clamp<int64_t>(of_tile, least_splits, shares);
  int64_t splits =
      wide && !large ? whole_steps(keys, tile, busy, least_splits, most_splits, fill / (heavy ? 2 : 4)) : most_splits;
  // A second step of short rows takes less time than a second kernel.
  const int64_t most_together = gpu::most_together(call.q);
  const int64_t by_two = ceil_div(ceil_div(keys, kMatrixStep), int64_t{2});
  if (wide && kernel_size <= 64 && most_together > 1 && splits > most_together && by_two <= most_together &&
      all_at_once(busy, by_two, fill))
    splits = by_two;
  const bool together = wide && splits > 1 && splits <= most_together && all_at_once(busy, splits, fill);
  // Where a later kernel begins early, the cores that end first get more of its threadgroups than others. That counts
  // for a long way of one threadgroup for each tile, where more threadgroups than these would fit.
  const bool alone = !matrices && splits == 1 && (whole || bytes >= tuning.long_share) && 4 * busy <= 3 * fill;
  if (wide && tuning.lanes && tile == 8 && !ragged && call.q.size(-1) == 64 && call.v.size(-1) == 64 &&
      keys >= kLeastLaneKeys && keys <= kMostMatrixKeys) {
    const LaneForm form = plan_lanes(busy, fill);
    const bool share = form.splits > 1 && form.splits <= most_together;
    if (form.keys)
      return {true,  64,       tile, tiles,   form.splits, share, form.simdgroups,
              group, kv_heads, keys, general, false,       false, form.keys};
  }
  return {matrices, kernel_size, tile, tiles,   splits,        together, simdgroups,
          group,    kv_heads,    keys, general, tuning.narrow, alone};
}

// How the results of `parts` threadgroups become one, for each of `units` of each token: a head, and some elements.
struct MergePlan {
  int64_t team;        // simdgroups that share the parts of a unit
  int64_t simdgroups;  // of a threadgroup, which has one team or more
};
// A kernel that begins early gives more threadgroups to the cores that end the one before it first. NVIDIA's GPUs have
// larger ones here, of which fewer fit a core, as long as most cores have one.
MergePlan plan_merge(const DecodeTuning& tuning, int64_t units, int64_t tokens, int64_t parts) {
  constexpr int64_t kMostSimdgroups = 16;
  const int64_t least = static_cast<int64_t>(tuning.fill_threadgroups) / 4;  // threadgroups
  int64_t team = 1, teams = 1;
  while (team < kMostSimdgroups && team * ATTENTION_MERGE_PARTS < parts) team *= 2;
  while (2 * teams * team <= tuning.merge_simdgroups && 2 * teams * least <= units * tokens) teams *= 2;
  return {team, team * std::min(teams, units)};
}

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

int32_t limit(int64_t distance) { return static_cast<int32_t>(std::clamp<int64_t>(distance, 0, kUnlimited)); }

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

bool decode_has_sizes(int64_t head_size, int64_t value_size) {
  return head_size > 0 && value_size > 0 && sizes_for(head_size, value_size);
}

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
  const auto [team, simdgroups] = plan_merge(decode_tuning(out), units, tokens, count);
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
