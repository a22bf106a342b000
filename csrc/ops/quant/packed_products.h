// How products of packed weights and few rows of x are shared out, and the products of formats that describe
// themselves.
#pragma once

#include "../../../kernels/quant/quant.h"
#include "../common/common.h"
#include "formats.h"
#include "rows.h"

#include <optional>
#include <string>

namespace metalcore {

struct MvPlan {
  uint32_t x_rows;  // of a threadgroup: 1, 2 or 4, as in the kernels' names
  uint32_t simdgroups, group_rows;

  std::string kernel(const std::string& format) const;
  int64_t threadgroups(int64_t rows, int64_t all_x_rows) const;
  void note(const char* op, int64_t all_x_rows, const std::string& format) const;
};

MvPlan plan_mv(int64_t rows, int64_t length, int64_t x_rows, bool experts, const Tensor& on);

// How products by the matrix units are shared out, if the device takes them for so many rows of x in this dtype.
struct TilesPlan {
  uint32_t x_rows;  // of a threadgroup: 8 or 16, as in the kernels' names
  uint32_t simdgroups;

  std::string kernel(const std::string& format, ScalarType dtype) const;
  int64_t threadgroups(int64_t rows, int64_t all_x_rows) const;
  void note(const char* op, int64_t all_x_rows, const std::string& format) const;
};
std::optional<TilesPlan> plan_tiles(int64_t length, int64_t x_rows, const Tensor& x);

// The rows of x up to which the weights of a product are read as they are.
int64_t most_mv_rows(const Tensor& on);

// The products below take any `Weights` that have
//   packed, matrices, rows, length   as PackedRows has them
//   format(), kernel()               the format's name in plans, and in the names of kernels
//   row_bytes(), expert_bytes()      how far the next row and the next matrix are, in what the kernels count
//   rows_kernel                      what the names of kernels that make numbers of rows begin with
//   takes_tiles                      whether there are kernels for the matrix units
//   bytes(rows)                      of so many rows
//   bind(recording)                  binds the weights, and returns the first index behind them
//   bind_sizes(recording, at)        binds what else kernels read of several matrices, and returns the next index

// Rows as numbers: all of them, or those of the indices.
template <typename Weights>
Tensor numbers_of(const char* op, const Weights& weights, const MaybeTensor& rows, ScalarType dtype) {
  const RowsReader reader{.kernel = Weights::rows_kernel + weights.kernel(),
                          .format = weights.format(),
                          .packed = weights.packed,
                          .rows = weights.rows,
                          .length = weights.length,
                          .row_bytes = weights.row_bytes(),
                          .bind = [&](gpu::Recording& recording) { return weights.bind(recording); },
                          .bytes = [&](int64_t count) { return weights.bytes(count); }};
  return rows_as_numbers(op, reader, rows, dtype);
}

// `result` has `x_rows` rows. `chosen` are the experts of its rows, or nullptr.
template <typename Weights>
void mul_mv(const char* op, const Tensor& x, const Weights& weights, const ChosenExperts* chosen, int64_t x_rows,
            const Tensor& result) {
  const MvPlan plan = plan_mv(weights.rows, weights.length, x_rows, chosen != nullptr, x);
  const std::optional<TilesPlan> tiles =
      Weights::takes_tiles && !chosen ? plan_tiles(weights.length, x_rows, x) : std::nullopt;
  if (tiles)
    tiles->note(op, x_rows, weights.format());
  else
    plan.note(op, x_rows, weights.format());
  if (result.numel() == 0) return;
  const Tensor input = from_multiple_of_16(x);
  const int64_t groups = tiles ? tiles->threadgroups(weights.rows, x_rows) : plan.threadgroups(weights.rows, x_rows);
  const uint32_t simdgroups = tiles ? tiles->simdgroups : plan.simdgroups;
  gpu::record(result, [&](gpu::Recording& recording) {
    recording.kernel(tiles ? tiles->kernel(weights.kernel(), x.scalar_type()) : plan.kernel(weights.kernel()));
    const uint32_t at = weights.bind(recording);
    recording.buffer(at, input).buffer(at + 1, result).buffer(at + 2, result);
    recording.buffer(at + 3, chosen ? MaybeTensor(chosen->experts) : std::nullopt);
    recording.bytes(weights.bind_sizes(recording, at + 4),
                    QuantMvParams{.row_bytes = weights.row_bytes(),
                                  .expert_bytes = weights.expert_bytes(),
                                  .weights = grid_side(weights.rows),
                                  .slices = grid_side(weights.length / QUANT_SLICE),
                                  .x_rows = grid_side(x_rows),
                                  .shared = grid_side(chosen ? chosen->shared : 1),
                                  .experts = chosen ? grid_side(weights.matrices) : 0u,
                                  .group_rows = plan.group_rows,
                                  .dtype = quant_dtype(x.scalar_type())});
    recording.work(2.0 * static_cast<double>(x_rows * weights.rows * weights.length),
                   weights.bytes(weights.rows * (chosen ? x_rows : 1)));
    recording.dispatch_threadgroups({grid_side(groups)}, {32 * simdgroups});
  });
}

// x Wᵀ, or with `transposed` x W. Many rows of x are multiplied by weights as numbers.
template <typename Weights>
Tensor multiply(const char* op, const Tensor& x, const Weights& weights, bool transposed) {
  const int64_t x_rows = check_x(op, x, weights.packed, weights.rows, weights.length, transposed);
  const bool few =
      x_rows <= most_mv_rows(x) || (Weights::takes_tiles && plan_tiles(weights.length, x_rows, x).has_value());
  if (transposed || !few || weights.length == 0)
    return multiply_numbers(op, x, x_rows, transposed,
                            [&] { return numbers_of(op, weights, std::nullopt, x.scalar_type()); });
  const Tensor result = result_like(x, weights.rows);
  mul_mv(op, x, weights, nullptr, x_rows, result);
  return result;
}

// x Wᵀ with the matrix of its own expert for each row of the result.
template <typename Weights>
Tensor multiply_by_experts(const char* op, const Tensor& x, const Weights& weights, const Tensor& experts) {
  check_x(op, x, weights.packed, weights.rows, weights.length, false);
  const ChosenExperts chosen = check_experts(op, x, experts);
  const Tensor result = new_tensor({{chosen.tokens, chosen.each, weights.rows}}, x.scalar_type(), x);
  check((weights.matrices > 0 && weights.length > 0) || result.numel() == 0, "metalcore::", op,
        ": packed has no numbers");
  mul_mv(op, x, weights, &chosen, chosen.results(), result);
  return result;
}

}  // namespace metalcore
