#include "gemm.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <string_view>
#include <utility>

namespace metalcore {
namespace {

constexpr int64_t kCounted = INT32_MAX;

int64_t up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Outermost first, without those of size 1, and each joined with the next one where all distances allow it.
std::vector<GemmBatchDim> joined(const std::vector<GemmBatchDim>& batch) {
  std::vector<GemmBatchDim> result;
  for (const GemmBatchDim& dim : batch) {
    if (dim.size == 1) continue;
    const auto continues = [&](int64_t outer, int64_t inner) { return outer == inner * dim.size; };
    if (!result.empty()) {
      GemmBatchDim& last = result.back();
      if (continues(last.a, dim.a) && continues(last.b, dim.b) && continues(last.residual, dim.residual)) {
        last = {last.size * dim.size, dim.a, dim.b, dim.residual};
        continue;
      }
    }
    result.push_back(dim);
  }
  return result;
}

// Makes rows of the innermost dimensions of the batch along which b does not change.
void fold_batch(GemmProblem& p) {
  while (!p.bias_of_rows && !p.batch.empty() && p.batch.back().b == 0 && p.rows * p.batch.back().size <= kCounted) {
    const GemmBatchDim dim = p.batch.back();
    if (p.rows > 1 && dim.a != p.a.row * p.rows) return;
    if (p.rows > 1 && p.has_residual && dim.residual != p.residual.row * p.rows) return;
    if (p.rows == 1) p.a.row = dim.a, p.residual.row = dim.residual;
    p.rows *= dim.size;
    p.batch.pop_back();
  }
}

// A dimension of size 1 has no distance.
void forget_single(GemmProblem& p) {
  if (p.rows == 1) p.a.row = p.residual.row = 0;
  if (p.terms == 1) p.a.column = p.b.row = 0;
  if (p.columns == 1) p.b.column = p.residual.column = 0;
}

// Whether an operand can be read `pack` elements at a time, along columns if they are next to each other, or else along
// rows. `batched` has the distances along the batch.
bool has_packs(const GemmMatrix& m, int64_t rows, int64_t columns, const int64_t* batched, int64_t pack, bool by_rows) {
  if (!m.aligned || std::any_of(batched, batched + GEMM_BATCH_DIMS, [=](int64_t d) { return d % pack != 0; }))
    return false;
  if (m.column == 1) return m.row % pack == 0 && columns % pack == 0;
  return by_rows && m.row == 1 && m.column % pack == 0 && rows % pack == 0;
}

void set_batch(GemmParams& params, const GemmProblem& p) {
  int64_t result = p.rows * p.columns;
  size_t d = 0;
  for (; d < p.batch.size(); ++d) {
    const GemmBatchDim& dim = p.batch[p.batch.size() - 1 - d];
    params.batch[d] = static_cast<uint32_t>(dim.size);
    params.a.batch[d] = dim.a, params.b.batch[d] = dim.b, params.residual.batch[d] = dim.residual;
    params.result.batch[d] = result;
    result *= dim.size;
  }
  for (; d < GEMM_BATCH_DIMS; ++d) params.batch[d] = 1;
  if (p.grouped == 0) return;
  params.batch[0] = std::max(p.groups, 1u);
  params.b.batch[0] = p.b_group;
  params.result.batch[0] = p.grouped == GEMM_GROUPED_TERMS ? p.rows * p.columns : 0;
}

int64_t members(const GemmProblem& p) {
  int64_t count = p.grouped == GEMM_GROUPED_TERMS ? p.groups : 1;
  for (const GemmBatchDim& dim : p.batch) count = count > kCounted ? count : count * dim.size;
  return count;
}

// The operands of the transposed product.
void transpose(GemmProblem& p, GemmParams& params) {
  const auto flip = [](auto& matrix) { std::swap(matrix.row, matrix.column); };
  flip(p.a), flip(p.b), flip(p.residual), flip(params.result);
  std::swap(p.a, p.b), std::swap(p.rows, p.columns), std::swap(params.a, params.b);
  std::swap(params.bias_row, params.bias_column);
}

GemmPlan few_rows_plan(const GemmProblem& p, GemmParams params, int64_t element_size) {
  const bool terms = p.terms == 1 || p.b.row == 1;
  const int64_t pack = 16 / element_size;
  const uint32_t tile_rows = p.rows == 1 ? 1 : GEMV_ROWS, columns = terms ? GEMV_LINES : GEMV_COLUMNS;
  // b's terms are its rows: as an operand of columns by terms it is read as a is.
  const GemmMatrix flipped{p.b.column, p.b.row, p.b.aligned};
  params.a_packs = terms && has_packs(p.a, p.rows, p.terms, params.a.batch, pack, false);
  params.b_packs = terms ? has_packs(flipped, p.columns, p.terms, params.b.batch, pack, false)
                         : has_packs(p.b, p.terms, p.columns, params.b.batch, 4, false);
  const int64_t at_once = terms ? 32 * (params.a_packs && params.b_packs ? pack : 1) : 4;
  const int64_t simdgroups = std::clamp<int64_t>(up(p.terms, at_once), 1, GEMV_SIMDGROUPS);
  params.row_tiles = static_cast<uint32_t>(up(p.rows, tile_rows));
  return {
      .variant = tile_rows == 1 ? (terms ? "gemv_terms1" : "gemv_columns1") : (terms ? "gemv_terms4" : "gemv_columns4"),
      .params = params,
      .across = static_cast<uint32_t>(up(p.columns, columns)),
      .tiles = static_cast<uint32_t>(members(p) * params.row_tiles),
      .tile_rows = tile_rows,
      .threads = static_cast<uint32_t>(32 * simdgroups),
      .transposed = false};
}

std::string why_few_rows(const GemmPlan& plan) {
  const bool terms = std::string_view(plan.variant).starts_with("gemv_terms");
  return std::to_string(plan.threads / 32) + " simdgroups share the terms of " +
         std::to_string(terms ? GEMV_LINES : GEMV_COLUMNS) + " columns, whose " + (terms ? "terms" : "columns") +
         " lie " + (terms || plan.params.b.column == 1 ? "next to each other" : "apart");
}

std::string how(bool packs, bool across, const char* along, const char* otherwise) {
  return packs ? std::string("16 bytes at a time along its ") + (across ? along : otherwise) : "one element at a time";
}

GemmPlan tiled_plan(const GemmProblem& p, GemmParams params, int64_t element_size, const GemmTuning& tuning) {
  const int64_t pack = 16 / element_size;
  // Groups begin anywhere in the dimension that they share.
  const bool rows_free = p.grouped != GEMM_GROUPED_ROWS, terms_free = p.grouped != GEMM_GROUPED_TERMS;
  params.a_packs = has_packs(p.a, p.rows, p.terms, params.a.batch, pack, rows_free) && (terms_free || p.a.column != 1);
  params.b_packs = has_packs(p.b, p.terms, p.columns, params.b.batch, pack, terms_free);
  const auto row_tiles = [&](int64_t size) { return std::max<int64_t>(up(p.rows, size), 1); };
  const auto area = [&](int64_t size) { return row_tiles(size) * up(p.columns, size) * size * size; };
  // The kernel for large tiles takes less: it has no registers left. Nor may its tiles be much emptier.
  const bool large = element_size == 2 && p.grouped == 0 && params.a_packs && params.b_packs &&
                     8 * area(GEMM_LARGE) <= 9 * area(GEMM_ROWS) &&
                     members(p) * area(GEMM_LARGE) >= int64_t{GEMM_LARGE} * GEMM_LARGE * tuning.large_tiles;
  const int64_t tile_rows = large ? GEMM_LARGE : GEMM_ROWS;
  params.row_tiles = static_cast<uint32_t>(row_tiles(tile_rows));
  // Each group may end with a tile that is not full, and so may the rows behind the last one.
  const int64_t tiles = rows_free ? members(p) * params.row_tiles : params.row_tiles + int64_t{p.groups};
  return {.variant = large                ? "gemm_large"
                     : tuning.short_steps ? "gemm_short"
                                          : "gemm",
          .params = params,
          .across = static_cast<uint32_t>(up(p.columns, large ? GEMM_LARGE : GEMM_COLUMNS)),
          .tiles = static_cast<uint32_t>(tiles),
          .tile_rows = static_cast<uint32_t>(tile_rows),
          .threads = static_cast<uint32_t>(large ? GEMM_LARGE_THREADS : GEMM_THREADS),
          .transposed = false};
}

std::string why_tiled(const GemmPlan& plan) {
  const GemmParams& params = plan.params;
  const std::string columns = std::to_string(plan.tile_rows == GEMM_LARGE ? GEMM_LARGE : GEMM_COLUMNS);
  const std::string steps = std::string_view(plan.variant) == "gemm_short" ? ", for few registers" : "";
  return "tiles of " + std::to_string(plan.tile_rows) + "x" + columns + steps + "; a is read " +
         how(params.a_packs, params.a.column == 1, "terms", "rows") + ", b " +
         how(params.b_packs, params.b.column == 1, "columns", "terms");
}

// A tile of GPUs whose units multiply tensors, and its kernels, by whether the elements of columns are neighbours in a
// and in b.
struct UnitTile {
  uint32_t rows, columns, threads;
  const char* variants[2][2];
};
#define VARIANTS(tile)                                                                       \
  {                                                                                          \
    {"gemm_unit_nn" tile, "gemm_unit_nt" tile}, { "gemm_unit_tn" tile, "gemm_unit_tt" tile } \
  }
constexpr UnitTile kUnitTiles[] = {
    {GEMM_UNIT_ROWS, GEMM_UNIT_FEW, GEMM_UNIT_WIDE_THREADS, VARIANTS("_few")},
    {GEMM_UNIT_ROWS, GEMM_UNIT_SEVERAL, GEMM_UNIT_WIDE_THREADS, VARIANTS("_several")},
    {GEMM_UNIT_ROWS, GEMM_UNIT_MANY, GEMM_UNIT_WIDE_THREADS, VARIANTS("_many")},
    {GEMM_UNIT_ROWS, GEMM_UNIT_COLUMNS, GEMM_UNIT_THREADS, VARIANTS("")},
    {GEMM_UNIT_ROWS, GEMM_UNIT_WIDE, GEMM_UNIT_WIDE_THREADS, VARIANTS("_wide")},
};
constexpr const UnitTile& kWideTile = kUnitTiles[4];
// The same as "" where a core has one threadgroup alone: its copies are more steps ahead.
constexpr UnitTile kDeepTile = {GEMM_UNIT_ROWS, GEMM_UNIT_COLUMNS, GEMM_UNIT_WIDE_THREADS, VARIANTS("_deep")};
constexpr UnitTile kSmallTile = {GEMM_UNIT_SMALL, GEMM_UNIT_SMALL, GEMM_UNIT_THREADS, VARIANTS("_small")};
constexpr UnitTile kBroadTile = {GEMM_UNIT_SMALL, GEMM_UNIT_COLUMNS, GEMM_UNIT_WIDE_THREADS, VARIANTS("_broad")};
// Those for few terms, for some columns and for more.
constexpr UnitTile kShortTiles[] = {
    {GEMM_UNIT_SMALL, GEMM_UNIT_SMALL, GEMM_UNIT_THREADS, VARIANTS("_short_small")},
    {GEMM_UNIT_SMALL, GEMM_UNIT_COLUMNS, GEMM_UNIT_SHORT_THREADS, VARIANTS("_short")},
};
// The same of which a threadgroup makes several, and keeps the operand of its rows, or of its columns; and for half as
// many terms.
constexpr UnitTile kAlongTile = {GEMM_UNIT_SMALL, GEMM_UNIT_COLUMNS, GEMM_UNIT_SHORT_THREADS, VARIANTS("_along")};
constexpr UnitTile kAlongShortTile = {GEMM_UNIT_SMALL, GEMM_UNIT_COLUMNS, GEMM_UNIT_SHORT_THREADS,
                                      VARIANTS("_along_short")};
constexpr UnitTile kDownTile = {GEMM_UNIT_SMALL, GEMM_UNIT_COLUMNS, GEMM_UNIT_SHORT_THREADS, VARIANTS("_down")};
#undef VARIANTS
constexpr int64_t kLeastSplitTerms = 1024;  // of a product
constexpr int64_t kManyTerms = 2048;        // more than these are read by large tiles sooner

bool is_low(const UnitTile& tile) { return tile.rows == GEMM_UNIT_ROWS && tile.columns <= GEMM_UNIT_MANY; }

// How many threadgroups share the terms of each of so many tiles. What they leave is small beside what they read.
int64_t splits_of(const GemmProblem& p, const UnitTile& tile, int64_t tiles, int64_t cores) {
  if (p.grouped != 0 || !p.batch.empty() || p.terms < kLeastSplitTerms) return 1;
  const bool narrow = is_low(tile) ? tile.columns < GEMM_UNIT_MANY : 4 * tiles <= cores;
  const int64_t least = narrow ? 256 : 1024;
  const int64_t parts = is_low(tile) ? (p.terms + least / 2) / least : p.terms / least;
  return std::max<int64_t>(std::min(cores / tiles, parts), 1);
}

// A GPU runs threadgroups together in one of its parts. An H200, which has 132 cores, has room for these numbers of
// tiles with 1, 2 … threadgroups each, one a core.
constexpr int64_t kTilesAtOnce[] = {132, 66, 39, 30, 22, 17, 15, 15};
constexpr int64_t kMostJoined = std::size(kTilesAtOnce);

int64_t count_tiles(const GemmProblem& p, const UnitTile& tile) {
  return members(p) * up(p.rows, tile.rows) * up(p.columns, tile.columns);
}

// Two threadgroups share a core where they have few threads.
int64_t together_of(const UnitTile& tile, int64_t tiles, int64_t splits, const GemmTuning& tuning) {
  return units_together(tiles, splits, tuning, tile.threads == GEMM_UNIT_THREADS ? 2 : 1);
}

// How many threadgroups there are, where those that share a tile run together.
int64_t joined_threadgroups(const GemmProblem& p, const UnitTile& tile, const GemmTuning& tuning) {
  const int64_t tiles = count_tiles(p, tile);
  return tiles * together_of(tile, tiles, splits_of(p, tile, tiles, tuning.unit_threadgroups), tuning);
}

// Whether small tiles keep more of the GPU's cores busy: where a core has one or two of them, or where there is one for
// two cores, unless the threadgroups of large ones run together in a third of the cores; or twice as many with a part
// of the terms as there are low tiles.
bool takes_small_tiles(const GemmProblem& p, const UnitTile& tile, const GemmTuning& tuning) {
  const int64_t small = count_tiles(p, kSmallTile), cores = tuning.unit_threadgroups;
  if (!is_low(tile)) {
    const int64_t joined = joined_threadgroups(p, kDeepTile, tuning);
    return p.grouped == 0 && small <= (p.terms > kManyTerms ? cores / 2 : 2 * cores) &&
           (joined == count_tiles(p, kDeepTile) || 3 * joined < cores);
  }
  const int64_t low = members(p) * up(p.rows, tile.rows);
  const auto busy = [&](const UnitTile& of, int64_t tiles) {
    return std::min(tiles * splits_of(p, of, tiles, cores), cores);
  };
  return p.grouped != 0 || p.rows <= GEMM_UNIT_SMALL || busy(kSmallTile, small) >= 2 * busy(tile, low);
}

// Elements of rows or else of columns are neighbours, and the tensors of a kernel have strides of 32 bits.
bool is_unit_operand(const GemmMatrix& m) {
  return (m.column == 1 || m.row == 1) && std::max(m.row, m.column) <= kCounted && std::min(m.row, m.column) >= 0;
}

bool takes_units(const GemmProblem& p, int64_t element_size, const GemmTuning& tuning) {
  // Within a tile, distances in the residual take 32 bits.
  const bool near = !p.has_residual || std::max(p.residual.row, p.residual.column) <= kCounted / (2 * GEMM_UNIT_WIDE);
  return tuning.units && element_size == 2 && p.terms > 1 && p.rows > 1 && p.columns > 1 && is_unit_operand(p.a) &&
         is_unit_operand(p.b) && near;
}

// The narrow side of a product is that of its columns. Batches have small tiles for some rows, since a transposed
// result is stored by elements.
bool is_transposed_on_units(const GemmProblem& p) {
  return p.grouped == 0 && p.rows <= (p.batch.empty() ? GEMM_UNIT_MANY : GEMM_UNIT_FEW) && p.rows < p.columns;
}

// The plan where threadgroups walk along tiles of few terms, if a GPU has less room than there are tiles. One operand
// is the same for the whole batch.
std::optional<GemmPlan> walk_plan(const GemmProblem& p, GemmParams params, const GemmTuning& tuning) {
  const bool along = !p.batch.empty();
  if (along && (p.batch.size() > 1 || p.batch[0].a != 0)) return std::nullopt;
  const UnitTile& tile = !along ? kDownTile : p.terms > GEMM_UNIT_SHORT_TERMS / 2 ? kAlongTile : kAlongShortTile;
  const int64_t rows = up(p.rows, tile.rows), columns = up(p.columns, tile.columns);
  const int64_t kept = along ? rows : columns, moving = along ? members(p) * columns : rows;
  // A core runs so many of them, and 3 or 4 of those that make a tile each, which are as fast where all run at once.
  const int64_t cores = tuning.unit_threadgroups, room = cores * (!along ? 3 : &tile == &kAlongTile ? 2 : 4);
  if (kept * moving <= cores * (along ? 4 : 3) || kept > room) return std::nullopt;
  params.walkers = static_cast<uint32_t>(room / kept), params.walk_tiles = static_cast<uint32_t>(moving);
  params.row_tiles = static_cast<uint32_t>(rows), params.split_terms = params.terms;
  return GemmPlan{.variant = tile.variants[p.a.column != 1][p.b.column != 1],
                  .params = params,
                  .across = static_cast<uint32_t>(kept),
                  .tiles = params.walkers,
                  .tile_rows = tile.rows,
                  .threads = tile.threads,
                  .transposed = false,
                  .tile_columns = tile.columns};
}

GemmPlan unit_plan(const GemmProblem& p, GemmParams params, const GemmTuning& tuning) {
  const int64_t wide = members(p) * up(p.rows, GEMM_UNIT_ROWS) * up(p.columns, GEMM_UNIT_WIDE);
  const uint32_t widest = wide >= tuning.wide_tiles ? GEMM_UNIT_WIDE : GEMM_UNIT_COLUMNS;
  const UnitTile* tile = kUnitTiles;
  while (std::min(p.rows, p.columns) > tile->columns && tile->columns < widest) ++tile;
  const int64_t cores = tuning.unit_threadgroups;
  const bool is_short = p.grouped == 0 && p.terms <= GEMM_UNIT_SHORT_TERMS;
  if (is_short && tile->columns >= GEMM_UNIT_SMALL) {
    tile = kShortTiles + (p.columns > GEMM_UNIT_SMALL);
    if (p.columns > GEMM_UNIT_SMALL)
      if (const auto plan = walk_plan(p, params, tuning)) return *plan;
  } else if (takes_small_tiles(p, *tile, tuning)) {
    // A core that would have two of them has a broad one.
    const bool broad = !is_low(*tile) && 2 * count_tiles(p, kSmallTile) > cores && count_tiles(p, kBroadTile) <= cores;
    tile = broad ? &kBroadTile : &kSmallTile;
  } else if (tile->columns == GEMM_UNIT_COLUMNS) {
    // Wide tiles read half as often: as many threadgroups are enough where a has more rows than a tile.
    const int64_t more = joined_threadgroups(p, kWideTile, tuning) - joined_threadgroups(p, kDeepTile, tuning);
    if (more > 0 || (more == 0 && p.rows > GEMM_UNIT_ROWS && p.columns > GEMM_UNIT_COLUMNS)) tile = &kWideTile;
  }
  params.row_tiles = static_cast<uint32_t>(std::max<int64_t>(up(p.rows, tile->rows), 1));
  const bool rows_free = p.grouped != GEMM_GROUPED_ROWS;
  const int64_t tiles = rows_free ? members(p) * params.row_tiles : params.row_tiles + int64_t{p.groups};
  const int64_t across = up(p.columns, tile->columns);
  if (tile->rows == GEMM_UNIT_ROWS && tile->columns == GEMM_UNIT_COLUMNS && tiles * across <= cores) tile = &kDeepTile;
  params.split_terms = params.terms;
  uint32_t splits = 1;
  if (const int64_t most = splits_of(p, *tile, tiles * across, cores); most > 1) {
    // Low tiles have few results, so that a second kernel, which adds them, costs less than fewer threadgroups, unless
    // it would add very many parts.
    const int64_t together = together_of(*tile, tiles * across, most, tuning);
    const bool joins = together == most || together == kMostJoined || (together > 1 && !is_low(*tile));
    params.split_terms = static_cast<uint32_t>(up(up(p.terms, joins ? together : most), 64) * 64);
    splits = static_cast<uint32_t>(up(p.terms, params.split_terms));
    if (joins) params.together = splits;
  }
  return {.variant = tile->variants[p.a.column != 1][p.b.column != 1],
          .params = params,
          .across = static_cast<uint32_t>(across),
          .tiles = static_cast<uint32_t>(tiles),
          .tile_rows = tile->rows,
          .threads = tile->threads,
          .transposed = false,
          .tile_columns = tile->columns,
          .splits = splits};
}

std::string why_units(const GemmPlan& plan) {
  return "units that multiply tensors make tiles of " + std::to_string(plan.tile_rows) + "x" +
         std::to_string(plan.tile_columns) +
         (plan.splits > 1 ? ", of which " + std::to_string(plan.splits) + " threadgroups share the terms" : "") +
         (plan.params.together > 1 ? " and run together" : "") +
         (plan.params.walkers > 0 ? ", of which each threadgroup has several" : "");
}

}  // namespace

bool gemm_countable(const GemmProblem& p) {
  if (std::max({p.rows, p.columns, p.terms}) > kCounted) return false;
  const int64_t batch = members(p);
  return batch <= kCounted && batch * up(p.rows, 1) <= int64_t{kCounted} * (p.rows > GEMV_ROWS ? GEMV_ROWS : 1);
}

bool gemm_takes_units(GemmProblem p, int64_t element_size, const GemmTuning& tuning) {
  forget_single(p);
  return std::min(p.rows, p.columns) > tuning.few_rows && takes_units(p, element_size, tuning);
}

GemmPlan plan_gemm(GemmProblem p, int64_t element_size, const GemmTuning& tuning) {
  GemmParams params{};
  p.batch = joined(p.batch);
  forget_single(p);
  fold_batch(p);
  params.result = {.row = p.columns, .column = 1};
  params.bias_row = p.bias_of_rows, params.bias_column = !p.bias_of_rows;
  set_batch(params, p);
  const bool few = p.grouped == 0 && std::min(p.rows, p.columns) <= tuning.few_rows;
  const bool units = !few && takes_units(p, element_size, tuning);
  const bool transposed = few ? p.columns < p.rows : units && is_transposed_on_units(p);
  if (transposed) transpose(p, params);
  for (auto [to, from] : {std::pair{&params.a, &p.a}, {&params.b, &p.b}, {&params.residual, &p.residual}})
    to->row = from->row, to->column = from->column;
  params.rows = static_cast<uint32_t>(p.rows);
  params.columns = static_cast<uint32_t>(p.columns);
  params.terms = static_cast<uint32_t>(p.terms);
  params.groups = p.groups, params.grouped = p.grouped;
  params.together = 1;
  params.has_bias = p.has_bias, params.has_residual = p.has_residual;
  GemmPlan plan = few     ? few_rows_plan(p, params, element_size)
                  : units ? unit_plan(p, params, tuning)
                          : tiled_plan(p, params, element_size, tuning);
  plan.transposed = transposed;
  return plan;
}

int64_t units_together(int64_t tiles, int64_t splits, const GemmTuning& tuning, int64_t on_a_core) {
  const int64_t room = tuning.unit_threadgroups * on_a_core;
  int64_t together = std::min({splits, int64_t{tuning.most_together}, kMostJoined});
  while (together > 1 && tiles * kTilesAtOnce[0] > kTilesAtOnce[together - 1] * room) --together;
  return together;
}

bool is_tiled(const GemmPlan& plan) { return plan.tile_rows >= GEMM_ROWS; }

std::string why_gemm(const GemmPlan& plan) {
  return (plan.tile_columns ? why_units(plan)
          : is_tiled(plan)  ? why_tiled(plan)
                            : why_few_rows(plan)) +
         (plan.transposed ? ", of the transposed product" : "");
}

}  // namespace metalcore
