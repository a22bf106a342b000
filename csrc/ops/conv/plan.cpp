#include "conv2d.h"

#include <algorithm>
#include <array>
#include <initializer_list>
#include <string_view>
#include <utility>

namespace metalcore {
namespace {

// Groups with up to so many channels of the result leave nearly all of a tile empty.
constexpr uint32_t kFewOutputs = 4;

bool all_multiples(int64_t pack, std::initializer_list<int64_t> numbers) {
  return std::all_of(numbers.begin(), numbers.end(), [=](int64_t n) { return n % pack == 0; });
}

// Whether x can be read `pack` channels at a time.
bool x_has_packs(const ConvProblem& problem, int64_t pack) {
  const ConvParams& p = problem.params;
  return problem.x_aligned && p.x.channel == 1 && all_multiples(pack, {p.x.image, p.x.y, p.x.x});
}

bool is_direct(const ConvParams& p) { return p.outputs <= kFewOutputs || (p.groups > 1 && p.channels == 1); }

// Whether units that multiply tensors of 16-bit elements have tiles for a convolution.
bool has_unit_tiles(const ConvParams& p) { return !is_direct(p) || (p.groups == 1 && p.channels >= 8); }

// The distance of the pixels of all images of the result, if it is a single one.
std::optional<int64_t> row_distance(const ConvImages& images, const ConvParams& p, int64_t count) {
  std::optional<int64_t> distance;
  int64_t pixels = 1;
  for (const auto& [size, stride] :
       {std::pair<int64_t, int64_t>{p.out.x, images.x}, {p.out.y, images.y}, {count, images.image}}) {
    if (size == 1) continue;
    if (!distance) distance = stride;
    if (stride != *distance * pixels) return std::nullopt;
    pixels *= size;
  }
  return distance.value_or(0);
}

// A tile of units, and its kernels: for a GPU that has more tiles than cores, and for one that has less, where copies
// are more steps ahead.
struct ConvUnitTile {
  uint32_t columns;
  const char *many, *few;
};
constexpr ConvUnitTile kNarrowTile = {64, "unit_64", "unit_deep_64"}, kWideTile = {128, "unit_128", "unit_deep_128"};

// The distance of an image's pixels, which come row by row.
std::optional<int64_t> pixel_distance(const ConvImages& images, const ConvPair& size) {
  if (size.x == 1) return images.y;
  return size.y == 1 || images.y == int64_t{images.x} * size.x ? std::optional<int64_t>(images.x) : std::nullopt;
}

}  // namespace

std::optional<int64_t> term_distance(const ConvParams& p, bool channels_last) {
  using Dim = std::pair<uint32_t, int64_t>;  // its size, and the distance along it
  const Dim channel{p.channels, p.weight.channel}, y{p.window.y, p.weight.y}, x{p.window.x, p.weight.x};
  const std::array<Dim, 3> inner_first = channels_last ? std::array{channel, x, y} : std::array{x, y, channel};
  std::optional<int64_t> distance;
  int64_t terms = 1;
  for (const auto& [size, stride] : inner_first) {
    if (size == 1) continue;
    if (!distance) distance = stride;
    if (stride != *distance * terms) return std::nullopt;
    terms *= size;
  }
  return distance.value_or(1);
}

bool conv_weight_has_order(const ConvParams& params) {
  return term_distance(params, true) || term_distance(params, false);
}

bool goes_by_channels(const ConvProblem& problem, int64_t pack) {
  const ConvParams& p = problem.params;
  return p.channels == 1 && p.outputs == 1 && p.result.channel == 1 && p.groups % pack == 0 &&
         x_has_packs(problem, pack);
}

namespace {

ConvPlan direct_plan(const ConvProblem& problem, int64_t pack) {
  ConvParams p = problem.params;
  const bool by_channels = goes_by_channels(problem, pack);
  const int64_t run = by_channels ? CONV_PIXELS : CONV_RUN;
  p.runs = static_cast<uint32_t>(ceil_div<int64_t>(p.out.x, run));
  p.weight_packs =
      by_channels && problem.weight_aligned && p.weight.image == 1 && all_multiples(pack, {p.weight.y, p.weight.x});
  const int64_t lines = problem.images * p.out.y * p.groups * p.outputs / (by_channels ? pack : 1);
  return {.variant = by_channels ? "channels" : "rows",
          .params = p,
          .items = lines * p.runs,
          .across = 1,
          .threads = 0,
          .item_flops = 2.0 * static_cast<double>(run * (by_channels ? pack : 1)) * p.terms};
}

ConvPlan tiled_plan(const ConvProblem& problem, int64_t pack) {
  ConvParams p = problem.params;
  const auto by_channels = term_distance(p, true), by_places = term_distance(p, false);
  const bool packs = by_channels && p.channels % pack == 0 && x_has_packs(problem, pack);
  p.channels_last = packs || !by_places;
  p.weight_term = p.channels_last ? *by_channels : *by_places;
  p.weight_packs = problem.weight_aligned &&
                   (p.weight.image == 1 ? all_multiples(pack, {p.weight_term, p.outputs})
                                        : p.weight_term == 1 && all_multiples(pack, {p.weight.image, p.terms}));
  return {.variant = packs ? "packs" : "elements",
          .params = p,
          .items = ceil_div<int64_t>(p.pixels, GEMM_ROWS),
          .across = p.groups * static_cast<uint32_t>(ceil_div<int64_t>(p.outputs, GEMM_COLUMNS)),
          .threads = GEMM_THREADS,
          .item_flops = 2.0 * GEMM_ROWS * p.groups * p.outputs * p.terms};
}

}  // namespace

bool units_take_channels(const ConvParams& p) { return has_unit_tiles(p) && p.channels % 8 == 0; }
bool units_take_images(const ConvProblem& problem) {
  const ConvParams& p = problem.params;
  const auto of_residual = row_distance(p.residual, p, problem.images);
  return units_take_channels(p) && p.result.channel == 1 && x_has_packs(problem, 8) &&
         (!p.has_residual || (of_residual && *of_residual <= INT32_MAX / CONV_UNIT_PIXELS));
}

bool units_take_packed(const ConvParams& p) {
  const bool fits = int64_t{p.size.y} * p.size.x * ceil_div<int64_t>(p.channels, 8) * 8 <= INT32_MAX;
  return p.groups == 1 && has_unit_tiles(p) && p.channels % 8 != 0 && p.terms != p.channels && fits;
}

int64_t joined_groups(const ConvParams& p) {
  if (p.channels == 1) return 1;
  for (int64_t joined = std::min(kNarrowTile.columns / p.outputs, p.groups); joined > 1; --joined)
    if (p.groups % joined == 0 && joined * p.channels % 8 == 0) return joined;
  return 1;
}

ConvPlan unit_plan(const ConvProblem& problem, int64_t cores, const Tensor& like) {
  constexpr int64_t kLeastSteps = 3;  // of a threadgroup that shares a tile
  ConvParams p = problem.params;
  p.channels_last = true, p.weight_term = 1;
  p.residual.x = static_cast<int32_t>(row_distance(p.residual, p, problem.images).value_or(0));
  const int64_t tiles = ceil_div<int64_t>(p.pixels, CONV_UNIT_PIXELS),
                steps = ceil_div<int64_t>(p.terms, CONV_UNIT_STEP);
  const auto threadgroups = [&](const ConvUnitTile& tile) {
    return tiles * p.groups * ceil_div<int64_t>(p.outputs, tile.columns);
  };
  // Threadgroups share the terms where there are few of them, and run together where the GPU does so.
  const auto shares = [&](const ConvUnitTile& tile) {
    const int64_t most = std::clamp<int64_t>(cores / threadgroups(tile), 1, std::max<int64_t>(steps / kLeastSteps, 1));
    const int64_t together = units_together(threadgroups(tile), most, like);
    // Twice as many threadgroups are faster, also with a second kernel that adds what they leave.
    return most < 2 * together ? std::pair{together, together > 1} : std::pair{most, false};
  };
  const ConvUnitTile* tile = p.outputs > kNarrowTile.columns ? &kWideTile : &kNarrowTile;
  const bool many = threadgroups(*tile) > cores;
  // Narrow tiles use more cores where wide ones would leave half of them.
  if (2 * threadgroups(*tile) * shares(*tile).first <= cores) tile = &kNarrowTile;
  const auto [share, joins] = shares(*tile);
  p.split_terms = static_cast<uint32_t>(ceil_div<int64_t>(steps, share) * CONV_UNIT_STEP);
  const uint32_t splits = static_cast<uint32_t>(ceil_div<int64_t>(p.terms, p.split_terms));
  p.together = joins ? splits : 1;
  return {.variant = many ? tile->many : tile->few,
          .params = p,
          .items = tiles,
          .across = p.groups * static_cast<uint32_t>(ceil_div<int64_t>(p.outputs, tile->columns)),
          .threads = static_cast<uint32_t>(many ? CONV_UNIT_THREADS : CONV_UNIT_DEEP_THREADS),
          .item_flops = 2.0 * CONV_UNIT_PIXELS * p.groups * p.outputs * p.terms,
          .splits = splits};
}

ConvPlan plan_conv(const ConvProblem& problem, int64_t element_size) {
  const int64_t pack = 16 / element_size;
  return is_direct(problem.params) ? direct_plan(problem, pack) : tiled_plan(problem, pack);
}

std::string why_conv(const ConvPlan& plan) {
  const ConvParams& p = plan.params;
  if (plan.threads == 0) {
    const bool channels = std::string_view(plan.variant) == "channels";
    return "groups have few channels, and a thread makes " + std::to_string(channels ? CONV_PIXELS : CONV_RUN) +
           " results next to each other in a row" + (channels ? ", of 16 bytes of channels each" : "") +
           (channels && !p.weight_packs ? "; the weight is read one element at a time" : "");
  }
  if (std::string_view(plan.variant).starts_with("unit"))
    return "units that multiply tensors make tiles of " + std::to_string(CONV_UNIT_PIXELS) + " pixels by " +
           std::string(plan.variant).substr(std::string_view(plan.variant).rfind('_') + 1) + " channels" +
           (plan.splits > 1 ? ", of which " + std::to_string(plan.splits) + " threadgroups share the terms" : "") +
           (p.together > 1 ? " and run together" : "");
  const std::string sizes = std::to_string(GEMM_ROWS) + " pixels by " + std::to_string(GEMM_COLUMNS) + " channels";
  const std::string along = p.weight.image == 1 ? "outputs" : p.channels_last ? "channels" : "terms";
  return "tiles of " + sizes + "; x is read " +
         (std::string_view(plan.variant) == "packs" ? "16 bytes at a time along its channels"
                                                    : "one element at a time") +
         ", weight " + (p.weight_packs ? "16 bytes at a time along its " + along : "one element at a time");
}

std::optional<GemmProblem> product_of(const ConvProblem& problem) {
  const ConvParams& p = problem.params;
  const bool by_pixels = p.groups == 1 && p.terms == p.channels && p.stride.x == 1 && p.stride.y == 1 &&
                         p.out.x == p.size.x && p.out.y == p.size.y && p.padding.x == 0 && p.padding.y == 0;
  const auto of_x = pixel_distance(p.x, p.size), of_residual = pixel_distance(p.residual, p.size);
  if (!by_pixels || p.has_scale || !of_x || (p.has_residual && !of_residual)) return std::nullopt;
  const int64_t pixels = int64_t{p.size.x} * p.size.y;
  const GemmMatrix x{.row = *of_x, .column = p.x.channel}, weight{.row = p.weight.channel, .column = p.weight.image};
  const GemmMatrix residual{.row = of_residual.value_or(0), .column = p.residual.channel};
  const auto flipped = [](const GemmMatrix& m) { return GemmMatrix{.row = m.column, .column = m.row}; };
  GemmProblem product{.rows = pixels, .columns = p.outputs, .terms = p.channels, .a = x, .b = weight};
  product.residual = residual;
  product.has_bias = p.has_bias, product.has_residual = p.has_residual;
  product.batch = {{problem.images, p.x.image, 0, p.residual.image}};
  if (p.result.channel == 1) return product;
  std::swap(product.rows, product.columns);
  product.a = flipped(weight), product.b = flipped(x), product.residual = flipped(residual);
  product.bias_of_rows = true;
  product.batch = {{problem.images, 0, p.x.image, p.residual.image}};
  return product;
}

}  // namespace metalcore
