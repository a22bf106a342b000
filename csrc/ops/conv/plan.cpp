#include "plan.h"

#include <algorithm>
#include <array>
#include <initializer_list>
#include <optional>
#include <string_view>
#include <utility>

namespace metalcore {
namespace {

// Groups with up to so many channels of the result leave nearly all of a tile empty.
constexpr uint32_t kFewOutputs = 4;

int64_t up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The distance of terms, if the weight has a single one in this order.
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

bool all_multiples(int64_t pack, std::initializer_list<int64_t> numbers) {
  return std::all_of(numbers.begin(), numbers.end(), [=](int64_t n) { return n % pack == 0; });
}

// Whether x can be read `pack` channels at a time.
bool x_has_packs(const ConvProblem& problem, int64_t pack) {
  const ConvParams& p = problem.params;
  return problem.x_aligned && p.x.channel == 1 && all_multiples(pack, {p.x.image, p.x.y, p.x.x});
}

ConvPlan direct_plan(const ConvProblem& problem) {
  ConvParams p = problem.params;
  const bool depthwise = p.channels == 1 && p.outputs == 1;
  const bool by_channels =
      depthwise && p.result.channel == 1 && p.groups % CONV_RUN == 0 && x_has_packs(problem, CONV_RUN);
  p.runs = by_channels ? p.groups / CONV_RUN : static_cast<uint32_t>(up(p.out.x, CONV_RUN));
  p.weight_packs =
      by_channels && problem.weight_aligned && p.weight.image == 1 && all_multiples(CONV_RUN, {p.weight.y, p.weight.x});
  const int64_t lines = by_channels ? p.pixels : problem.images * p.groups * p.outputs * p.out.y;
  return {.variant = by_channels ? "channels" : "rows",
          .params = p,
          .items = lines * p.runs,
          .across = 1,
          .tiled = false,
          .item_flops = 2.0 * CONV_RUN * p.terms};
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
          .items = up(p.pixels, GEMM_ROWS),
          .across = p.groups * static_cast<uint32_t>(up(p.outputs, GEMM_COLUMNS)),
          .tiled = true,
          .item_flops = 2.0 * GEMM_ROWS * p.groups * p.outputs * p.terms};
}

}  // namespace

bool conv_weight_has_order(const ConvParams& params) {
  return term_distance(params, true) || term_distance(params, false);
}

ConvPlan plan_conv(const ConvProblem& problem, int64_t element_size) {
  const ConvParams& p = problem.params;
  const bool direct = p.outputs <= kFewOutputs || (p.groups > 1 && p.channels == 1);
  return direct ? direct_plan(problem) : tiled_plan(problem, 16 / element_size);
}

std::string why_conv(const ConvPlan& plan) {
  const ConvParams& p = plan.params;
  if (!plan.tiled) {
    const bool channels = std::string_view(plan.variant) == "channels";
    return "groups have few channels, and a thread makes " + std::to_string(CONV_RUN) + " results next to each other" +
           (channels ? " in a pixel's channels" : " in a row") +
           (channels && !p.weight_packs ? "; the weight is read one element at a time" : "");
  }
  const std::string sizes = std::to_string(GEMM_ROWS) + " pixels by " + std::to_string(GEMM_COLUMNS) + " channels";
  const std::string along = p.weight.image == 1 ? "outputs" : p.channels_last ? "channels" : "terms";
  return "tiles of " + sizes + "; x is read " +
         (std::string_view(plan.variant) == "packs" ? "16 bytes at a time along its channels"
                                                    : "one element at a time") +
         ", weight " + (p.weight_packs ? "16 bytes at a time along its " + along : "one element at a time");
}

}  // namespace metalcore
