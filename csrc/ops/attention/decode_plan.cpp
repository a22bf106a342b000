#include "decode_plan.h"

#include "../../gpu/tuning.h"

#include <algorithm>
#include <bit>

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

const Sizes2* sizes_for(int64_t head_size, int64_t value_size) {
  for (const Sizes2& sizes : kSizes)
    if (head_size <= sizes.head && value_size <= sizes.value) return &sizes;
  return nullptr;
}

// Keys that a threadgroup with matrices has at a time.
constexpr int64_t kMatrixStep = 64;
// The most keys of a wide threadgroup whose sums the tensor cores' rounding does not show in.
constexpr int64_t kMostMatrixKeys = 8192;

bool aligned16(const Tensor& tensor) {
  const auto size = static_cast<int64_t>(tensor.element_size());
  if (reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 || tensor.size(-1) * size % 16) return false;
  for (int64_t d = 0; d + 1 < tensor.dim(); ++d)
    if (tensor.size(d) > 1 && tensor.stride(d) * size % 16) return false;
  return true;
}

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

// Threadgroups whose lanes load the operands of products take less time than others for rows of 64 numbers where cores
// have as many of them as fit, or not many fewer: an H200 has shown the shares.
struct LaneForm {
  int64_t keys;         // of a simdgroup, or 0
  uint32_t simdgroups;  // of a threadgroup
  int64_t fill;         // the room for threadgroups, in quarters of that for other kernels
  int64_t splits;
  int64_t least;       // the share of the room that threadgroups fill, in percent
  int64_t least_keys;  // of a request
};
constexpr LaneForm kLaneForms[] = {
    {32, 8, 1, 1, 93, 256}, {32, 4, 3, 2, 80, 512}, {16, 8, 2, 1, 93, 256}, {32, 4, 3, 1, 67, 256}};

LaneForm plan_lanes(int64_t busy, int64_t keys, int64_t fill) {
  for (const LaneForm& form : kLaneForms) {
    const int64_t room = form.fill * fill / 4, all = busy * form.splits;
    if (keys >= form.least_keys && all <= room && 100 * all >= form.least * room) return form;
  }
  return {};
}

}  // namespace

bool decode_has_sizes(int64_t head_size, int64_t value_size) {
  return head_size > 0 && value_size > 0 && sizes_for(head_size, value_size);
}

bool has_vectors(const DecodeCall& call) { return aligned16(call.k) && aligned16(call.v); }

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
      keys <= kMostMatrixKeys) {
    const LaneForm form = plan_lanes(busy, keys, fill);
    const bool share = form.splits > 1 && form.splits <= most_together;
    if (form.keys)
      return {true,  64,       tile, tiles,   form.splits, share, form.simdgroups,
              group, kv_heads, keys, general, false,       false, form.keys};
  }
  return {matrices, kernel_size, tile, tiles,   splits,        together, simdgroups,
          group,    kv_heads,    keys, general, tuning.narrow, alone};
}

// A kernel that begins early gives more threadgroups to the cores that end the one before it first. NVIDIA's GPUs have
// larger ones here, of which fewer fit a core, as long as most cores have one.
MergePlan plan_merge(const Tensor& out, int64_t units, int64_t tokens, int64_t parts) {
  const DecodeTuning& tuning = decode_tuning(out);
  constexpr int64_t kMostSimdgroups = 16;
  const int64_t least = static_cast<int64_t>(tuning.fill_threadgroups) / 4;  // threadgroups
  int64_t team = 1, teams = 1;
  while (team < kMostSimdgroups && team * ATTENTION_MERGE_PARTS < parts) team *= 2;
  while (2 * teams * team <= tuning.merge_simdgroups && 2 * teams * least <= units * tokens) teams *= 2;
  return {team, team * std::min(teams, units)};
}

}  // namespace metalcore::attention
