// quant_matmul(x, packed, type, transposed): x Wᵀ for packed weights W, or x W, which is the gradient by x.
// quant_matmul_experts: the same where each row of the result has a matrix of its own.
#include "formats.h"
#include "packed_products.h"
#include "rows.h"

#include "../../../kernels/quant/quant.h"
#include "../../gpu/cost.h"
#include "../../gpu/tuning.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <string>
#include <vector>

namespace metalcore {
namespace {

struct QuantTuning {
  const char* family;
  // About so many are wanted, of mv_simdgroups simdgroups. With fewer, each has more rows of weights.
  gpu::Count mv_threadgroups = gpu::filling_threadgroups(4);
  uint32_t mv_group_rows = 16;  // of weights, of a threadgroup, at most
  uint32_t mv_simdgroups = 4;   // that share a row of weights, at most
  uint32_t mv_rows = 8;         // of x, up to which the weights of a product are read as they are
  // Rows of x that share what is read of the weights: 2 or 4, of which Apple's GPUs have no registers for 4.
  uint32_t mv_x_rows = 4;
  // Rows of x in 16 bits from which, and up to which, the matrix units multiply formats that have such kernels.
  uint32_t tiles_from = 2;
  uint32_t tiles_rows = 0;
  // Rows of x in 16 bits from which units that multiply tensors take unpacked tiles, where the GPU has such units. 0 is
  // never.
  uint32_t unit_rows = 0;
  // Whether, for more rows, PyTorch's matmul of weights that became numbers is faster than mul_mm.
  bool torch = false;
};
const gpu::Table<QuantTuning> quant_tuning(
    "quant",
    {{"mv_threadgroups", &QuantTuning::mv_threadgroups, {1, 4096}},
     {"mv_group_rows", &QuantTuning::mv_group_rows, {4, 64, 4}},
     {"mv_simdgroups", &QuantTuning::mv_simdgroups, {1, 16}},
     {"mv_rows", &QuantTuning::mv_rows, {1, 32}},
     {"tiles_from", &QuantTuning::tiles_from, {1, 32}},
     {"tiles_rows", &QuantTuning::tiles_rows, {0, 64}},
     {"unit_rows", &QuantTuning::unit_rows, {0, 1 << 16}},
     {"torch", &QuantTuning::torch}},
    {{.family = "baseline"},
     {.family = "apple7", .mv_x_rows = 2},
     {.family = "apple8", .mv_x_rows = 2},
     {.family = "apple9", .mv_x_rows = 2},
     {.family = "apple10", .mv_x_rows = 2},
     {.family = "hopper", .mv_threadgroups = 512, .mv_group_rows = 32, .tiles_rows = 16, .torch = true},
     {.family = "simulator", .mv_threadgroups = 512}});

struct MvKernel {
  int64_t x_rows, simdgroups, step;
};
constexpr MvKernel kMvKernels[] = {{1, QUANT_MV1_SIMDGROUPS, QUANT_MV1_STEP},
                                   {2, QUANT_MV2_SIMDGROUPS, QUANT_MV2_STEP},
                                   {4, QUANT_MV4_SIMDGROUPS, QUANT_MV4_STEP}};

}  // namespace

int64_t most_mv_rows(const Tensor& on) { return quant_tuning(on).mv_rows; }

MvPlan plan_mv(int64_t rows, int64_t length, int64_t x_rows, bool experts, const Tensor& on) {
  const QuantTuning& tuning = quant_tuning(on);
  const int64_t wide = x_rows == 1 || experts ? 1 : tuning.mv_x_rows;
  const MvKernel& kernel = *std::find_if(std::begin(kMvKernels), std::end(kMvKernels),
                                         [=](const MvKernel& one) { return one.x_rows == wide; });
  const int64_t chunks = ceil_div<int64_t>(length, QUANT_CHUNK);
  const int64_t most = std::min<int64_t>(kernel.simdgroups, tuning.mv_simdgroups);
  const int64_t each = ceil_div(chunks, most);
  const int64_t wanted = ceil_div<int64_t>(rows * ceil_div(x_rows, wide), tuning.mv_threadgroups);
  const int64_t most_rows = std::min<int64_t>(QUANT_MV_RESULTS / wide, tuning.mv_group_rows);
  const int64_t group_rows = std::clamp<int64_t>(round_up<int64_t>(wanted, kernel.step), kernel.step, most_rows);
  return {static_cast<uint32_t>(wide), static_cast<uint32_t>(ceil_div(chunks, each)),
          static_cast<uint32_t>(group_rows)};
}

std::string MvPlan::kernel(const std::string& format) const {
  return "quant_mv" + std::to_string(x_rows) + "_" + format;
}

int64_t MvPlan::threadgroups(int64_t rows, int64_t all_x_rows) const {
  return ceil_div<int64_t>(rows, group_rows) * ceil_div<int64_t>(all_x_rows, x_rows);
}

void MvPlan::note(const char* op, int64_t all_x_rows, const std::string& format) const {
  gpu::note_plan(op, ("mul_mv" + std::to_string(x_rows)).c_str(), [&] {
    return std::to_string(all_x_rows) + " rows of x: " + std::to_string(simdgroups) + " simdgroups share a row of " +
           format + ", and a threadgroup has " + std::to_string(group_rows) + " rows";
  });
}

std::optional<TilesPlan> plan_tiles(int64_t length, int64_t x_rows, const Tensor& x) {
  const QuantTuning& tuning = quant_tuning(x);
  const bool taken = x_rows >= tuning.tiles_from && x_rows <= tuning.tiles_rows && length > 0 &&
                     length % QUANT_SLICE == 0 && x.scalar_type() != ScalarType::Float;
  if (!taken) return std::nullopt;
  const bool narrow = x_rows <= 8;
  const int64_t most = narrow ? QUANT_TILE8_SIMDGROUPS : QUANT_TILE16_SIMDGROUPS;
  const int64_t chunks = ceil_div<int64_t>(length, 4 * QUANT_SLICE);
  return TilesPlan{narrow ? 8u : 16u, static_cast<uint32_t>(std::min(most, chunks))};
}

std::string TilesPlan::kernel(const std::string& format, ScalarType dtype) const {
  return "quant_tiles" + std::to_string(x_rows) + "_" + format + "_" + suffix(dtype);
}

int64_t TilesPlan::threadgroups(int64_t rows, int64_t all_x_rows) const {
  return ceil_div<int64_t>(rows, QUANT_TILE_ROWS) * ceil_div<int64_t>(all_x_rows, x_rows);
}

void TilesPlan::note(const char* op, int64_t all_x_rows, const std::string& format) const {
  gpu::note_plan(op, ("mul_tiles" + std::to_string(x_rows)).c_str(), [&] {
    return std::to_string(all_x_rows) + " rows of x: the matrix units multiply " + std::to_string(QUANT_TILE_ROWS) +
           " rows of " + format + " at a time, whose length " + std::to_string(simdgroups) + " simdgroups share";
  });
}

namespace {

// `result` has `x_rows` rows. `chosen` are the experts of its rows, or nullptr.
void mul_mv(const char* op, const Tensor& x, const PackedRows& weights, const QuantFormat& format, const Tensor* chosen,
            int64_t x_rows, int64_t shared, const Tensor& result) {
  const MvPlan plan = plan_mv(weights.rows, weights.length, x_rows, chosen != nullptr, x);
  plan.note(op, x_rows, format.name);
  if (result.numel() == 0) return;
  const Tensor input = from_multiple_of_16(x);
  const QuantMvParams params{
      .row_bytes = static_cast<uint64_t>(weights.row_bytes),
      .expert_bytes = static_cast<uint64_t>(weights.row_bytes * weights.rows),
      .weights = grid_side(weights.rows),
      .slices = grid_side(weights.length / QUANT_SLICE),
      .x_rows = grid_side(x_rows),
      .shared = grid_side(shared),
      .experts = chosen ? grid_side(weights.matrices) : 0u,
      .group_rows = plan.group_rows,
      .dtype = quant_dtype(x.scalar_type()),
  };
  const int64_t groups = plan.threadgroups(weights.rows, x_rows);
  gpu::record(result, [&](gpu::Recording& recording) {
    recording.kernel(plan.kernel(format.name)).buffer(0, weights.tensor);
    recording.buffer(1, input).buffer(2, result).buffer(3, result).buffer(4,
                                                                          chosen ? MaybeTensor(*chosen) : std::nullopt);
    recording.bytes(5, params).work(2.0 * static_cast<double>(result.numel() * weights.length),
                                    static_cast<double>(weights.rows * weights.row_bytes * (chosen ? x_rows : 1)));
    recording.dispatch_threadgroups({grid_side(groups)}, {32 * plan.simdgroups});
  });
}

// `chosen` as above.
void mul_mm(const char* op, const Tensor& x, const PackedRows& weights, const QuantFormat& format, const Tensor* chosen,
            int64_t x_rows, int64_t shared, bool transposed, const Tensor& result) {
  gpu::note_plan(op, "mul_mm", [&] {
    return std::to_string(x_rows) + " rows of x: tiles of " + std::to_string(QUANT_MM_ROWS) + " rows and " +
           std::to_string(QUANT_MM_COLUMNS) + " columns of the result, of " + format.name;
  });
  if (result.numel() == 0) return;
  const Tensor input = from_multiple_of_16(x);
  const int64_t length = transposed ? weights.length : weights.rows;
  const int64_t x_length = transposed ? weights.rows : weights.length;
  const int64_t experts = chosen ? weights.matrices : 0;
  Tensor order = result, begins = result;  // not read without experts; packed weights may begin at any byte
  if (chosen) {
    order = new_tensor({x_rows}, ScalarType::Int, x);
    begins = new_tensor({experts + 2}, ScalarType::Int, x);
  }
  QuantMmParams params{
      .row_bytes = static_cast<uint64_t>(weights.row_bytes),
      .expert_bytes = static_cast<uint64_t>(weights.row_bytes * weights.rows),
      .type = static_cast<uint32_t>(format.number),
      .weights = grid_side(weights.rows),
      .slices = grid_side(weights.length / QUANT_SLICE),
      .x_rows = grid_side(x_rows),
      .shared = grid_side(shared),
      .experts = grid_side(experts),
      .transposed = transposed,
      .aligned = x_length * x.element_size() % 16 == 0,
  };
  const double flops = 2.0 * static_cast<double>(weights.rows * weights.length);
  const auto tiles = [&](gpu::Recording& recording, const gpu::BufferView& from, const gpu::BufferView& to) {
    recording.kernel("quant_mm_", suffix(x.scalar_type())).buffer(0, weights.tensor).buffer(1, from).buffer(2, to);
    recording.buffer(3, order).buffer(4, begins).bytes(5, params).work(flops * params.x_rows);
    recording.dispatch_threadgroups(
        {grid_side(ceil_div<int64_t>(length, QUANT_MM_COLUMNS)),
         grid_side(ceil_div<int64_t>(params.x_rows, QUANT_MM_ROWS)), grid_side(chosen ? experts + 1 : 1)},
        {QUANT_MM_THREADS});
  };
  gpu::record(result, [&](gpu::Recording& recording) {
    const gpu::BufferView from = gpu::view_of(input), to = gpu::view_of(result);
    if (chosen) {
      const QuantGroupsParams groups{.rows = params.x_rows, .experts = params.experts};
      recording.kernel("quant_groups").buffer(0, *chosen).buffer(1, order).buffer(2, begins).bytes(3, groups);
      recording.dispatch_threadgroups({grid_side(experts + 1)}, {32});
      return tiles(recording, from, to);
    }
    const auto piece_of = [&](const gpu::Piece& piece) {
      params.x_rows = grid_side(piece.count);
      tiles(recording, piece.of(from, x_length * x.element_size()), piece.of(to, length * x.element_size()));
    };
    gpu::in_pieces(recording, x_rows, {flops, 0}, piece_of, QUANT_MM_ROWS);
  });
}

bool takes_units(const QuantTuning& tuning, const Tensor& x, int64_t x_rows, const PackedRows& weights) {
  return tuning.unit_rows > 0 && x_rows > tuning.mv_rows && x_rows >= tuning.unit_rows && x.element_size() == 2 &&
         weights.length > 0 && gpu::multiplies_tensors(x);
}

void mul_units(const char* op, const Tensor& x, const PackedRows& weights, const QuantFormat& format, int64_t x_rows,
               const Tensor& result) {
  gpu::note_plan(op, "mul_units", [&] {
    return std::to_string(x_rows) + " rows of x: units that multiply tensors make tiles of " +
           std::to_string(QUANT_UNIT_ROWS) + "x" + std::to_string(QUANT_UNIT_COLUMNS) + ", of unpacked " + format.name;
  });
  if (result.numel() == 0) return;
  const Tensor input = as_contiguous(x);
  QuantUnitParams params{.row_bytes = static_cast<uint64_t>(weights.row_bytes),
                         .weights = grid_side(weights.rows),
                         .slices = grid_side(weights.length / QUANT_SLICE),
                         .x_rows = 0};
  const double flops = 2.0 * static_cast<double>(weights.rows * weights.length);
  gpu::record(result, [&](gpu::Recording& recording) {
    const gpu::BufferView from = gpu::view_of(input), to = gpu::view_of(result);
    const auto piece_of = [&](const gpu::Piece& piece) {
      params.x_rows = grid_side(piece.count);
      recording.kernel("quant_unit_", format.name, "_", suffix(x.scalar_type())).buffer(0, weights.tensor);
      recording.buffer(1, piece.of(from, weights.length * x.element_size()));
      recording.buffer(2, piece.of(to, weights.rows * x.element_size())).bytes(3, params);
      recording.work(flops * params.x_rows);
      recording.dispatch_threadgroups({grid_side(ceil_div<int64_t>(weights.rows, QUANT_UNIT_COLUMNS)),
                                       grid_side(ceil_div<int64_t>(params.x_rows, QUANT_UNIT_ROWS))},
                                      {QUANT_UNIT_THREADS});
    };
    gpu::in_pieces(recording, x_rows, {flops, 0}, piece_of, QUANT_UNIT_ROWS);
  });
}

Tensor quant_matmul(const Tensor& x, const Tensor& packed, int64_t type, bool transposed) {
  const char* const op = "quant_matmul";
  const QuantFormat& format = quant_format(op, type);
  const PackedRows weights = packed_rows(op, packed, format, 2);
  const int64_t rows = check_x(op, x, packed, weights.rows, weights.length, transposed);
  const QuantTuning& tuning = quant_tuning(x);
  if (!transposed && takes_units(tuning, x, rows, weights)) {
    const Tensor result = result_like(x, weights.rows);
    mul_units(op, x, weights, format, rows, result);
    return result;
  }
  if (tuning.torch && rows > tuning.mv_rows)
    return multiply_numbers(op, x, rows, transposed,
                            [&] { return quant_rows(packed, std::nullopt, type, x.scalar_type()); });
  const Tensor result = result_like(x, transposed ? weights.length : weights.rows);
  // Sums of no terms are mul_mm's: in mul_mv a simdgroup has a share of the terms.
  if (transposed || rows > tuning.mv_rows || weights.length == 0)
    mul_mm(op, x, weights, format, nullptr, rows, 1, transposed, result);
  else
    mul_mv(op, x, weights, format, nullptr, rows, 1, result);
  return result;
}

Tensor quant_matmul_experts(const Tensor& x, const Tensor& packed, const Tensor& experts, int64_t type,
                            bool transposed) {
  const char* const op = "quant_matmul_experts";
  const QuantFormat& format = quant_format(op, type);
  const PackedRows weights = packed_rows(op, packed, format, 3);
  check_x(op, x, packed, weights.rows, weights.length, transposed);
  const ChosenExperts chosen = check_experts(op, x, experts);
  const int64_t last = transposed ? weights.length : weights.rows;
  const Tensor result = new_tensor({{chosen.tokens, chosen.each, last}}, x.scalar_type(), x);
  check(weights.matrices > 0 || result.numel() == 0, "metalcore::", op, ": packed has no experts");
  // Where experts have few rows each, there is little to share.
  const bool few = chosen.results() <= quant_tuning(x).mv_rows * weights.matrices;
  if (few && !transposed && weights.length > 0)
    mul_mv(op, x, weights, format, &chosen.experts, chosen.results(), chosen.shared, result);
  else
    mul_mm(op, x, weights, format, &chosen.experts, chosen.results(), chosen.shared, transposed, result);
  return result;
}

}  // namespace
}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) {
  m.def("quant_matmul(Tensor x, Tensor packed, int type, bool transposed) -> Tensor");
  m.def("quant_matmul_experts(Tensor x, Tensor packed, Tensor experts, int type, bool transposed) -> Tensor");
}

METALCORE_KERNELS(m) {
  m.impl<&metalcore::quant_matmul>("quant_matmul");
  m.impl<&metalcore::quant_matmul_experts>("quant_matmul_experts");
}
