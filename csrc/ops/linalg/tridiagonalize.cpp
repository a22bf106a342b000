// tridiagonalize(A, upper) -> (diagonal, beside, scales, reflectors, tau, phases), of symmetric float32 matrices or
// Hermitian complex64 ones, of any strides.
#include "tridiagonal.h"

#include "../../../kernels/linalg/tridiagonalize.h"

#include "../../gpu/cost.h"
#include "../../gpu/limits.h"
#include "../../gpu/tuning.h"
#include "matrices.h"

#include <algorithm>
#include <string>
#include <tuple>
#include <utility>

namespace metalcore {

const gpu::Table<TridiagonalTuning> tridiagonal_tuning(
    "tridiagonalize",
    {
        {"panels_above", &TridiagonalTuning::panels_above, {1, 2048}},
        {"panel_columns", &TridiagonalTuning::panel_columns, {4, TRIDIAGONALIZE_PANEL, 4}},
        {"column_threads", &TridiagonalTuning::column_threads, {0, 1 << 20}},
    },
    {{.family = "baseline"},
     {.family = "hopper", .panels_above = 1536, .panel_columns = 16, .column_threads = gpu::per_core(512)}});

namespace {

// The kernels' threads, each of which has four columns.
constexpr uint32_t kColumnThreads[] = {128, 256, 512};

uint32_t threads_for(uint32_t columns) {
  const uint32_t* threads = kColumnThreads;
  while (4 * *threads < columns) ++threads;
  return *threads;
}

// The work of one call.
class Reduction {
 public:
  Reduction(const Tensor& input, bool upper, const TridiagonalTuning& tuning)
      : tuning_(tuning),
        suffix_(complex_suffix(input)),
        parts_of_number_(is_complex(input) ? 2 : 1),
        n_(grid_side(input.size(-1))),
        pitch_(round_up<uint32_t>(n_, 4)),
        reflector_rows_(round_up<uint32_t>(parts_of_number_ * n_, reflector_block(parts_of_number_ * n_))),
        batch_(grid_side(matrix_shape(input.sizes()).batch)) {
    const auto floats = [&](std::initializer_list<int64_t> sizes) {
      return new_tensor(sizes, ScalarType::Float, input);
    };
    const auto numbers = [&](std::initializer_list<int64_t> sizes) {
      return new_tensor(sizes, input.scalar_type(), input);
    };
    const Matrices given = matrices(input);
    Tensor loaded = numbers({batch_, n_, pitch_});
    gpu::record(input, [&](gpu::Recording& recording) {
      const int64_t row = upper ? given.column_stride : given.row_stride;
      const int64_t column = upper ? given.row_stride : given.column_stride;
      load(recording, gpu::view_of(given.tensor), {given.batch_stride, row, column, n_, pitch_, tiles(), 0, upper},
           gpu::view_of(loaded), batch_);
    });
    auto [a, scales] = scaled(loaded);
    a_ = a;
    result_ = {floats({batch_, n_}),
               floats({batch_, n_ - 1}),
               scales,
               floats({batch_, reflector_rows_, parts_of_number_ * pitch_}),
               floats({batch_, reflector_rows_}),
               numbers({batch_, n_})};
    beside_ = parts_of_number_ == 1 ? result_.beside : numbers({batch_, n_ - 1});
    torch::stable::zero_(result_.reflectors);
    torch::stable::zero_(result_.tau);
    for (Tensor& products : products_) products = numbers({batch_, pitch_});
    if (!panels()) return;
    slots_ = ceil_div<uint32_t>(n_, TRIDIAGONALIZE_SQUARE) + 1;
    norms_ = TRIDIAGONALIZE_NEXT_ROWS / gpu::kSimdWidth * next_parts(0);
    w_ = floats({batch_, TRIDIAGONALIZE_PANEL, pitch_});
    torch::stable::zero_(w_);
    x_ = floats({batch_, pitch_});
    squares_ = floats({batch_, norms_, 2});
    parts_ = floats({batch_, slots_, pitch_});
    quadratic_ = floats({batch_, slots_ * (slots_ + 1) / 2});
    dots_ = floats({batch_, TRIDIAGONALIZE_PANEL, 2});
  }

  // A recording is submitted while the next one is made.
  Tridiagonal run() {
    uint32_t begin = 0;
    if (panels()) {
      record([&](gpu::Recording& recording) { next(recording, 0, 0); });
      for (; has_panel(begin); begin += tuning_.panel_columns)
        record([&](gpu::Recording& recording) { panel(recording, begin); });
      record([&](gpu::Recording& recording) {
        const TridiagonalLoadParams p{int64_t{n_} * pitch_, pitch_, 1, n_, pitch_, tiles(), 1, 0};
        load(recording, of_piece(a_), p, of_piece(a_), piece_.count);
      });
    }
    for (uint32_t first = begin; first < n_; first += kColumnsAtOnce)
      record([&](gpu::Recording& recording) {
        const uint32_t end = std::min(first + kColumnsAtOnce, n_);
        for (uint32_t column = first; column < end; ++column) single(recording, begin, column);
      });
    if (parts_of_number_ == 1) return result_;
    gpu::record(a_, [&](gpu::Recording& recording) {
      recording.kernel("tridiagonal_phases").buffer(0, beside_).buffer(1, result_.beside).buffer(2, result_.phases);
      recording.bytes(3, TridiagonalPhasesParams{n_}).dispatch_threadgroups({batch_}, {gpu::kSimdWidth});
    });
    return result_;
  }

 private:
  static constexpr uint32_t kColumnsAtOnce = 64;  // in a recording

  // Calls body(recording) for pieces of the batch.
  template <typename Body>
  void record(const Body& body) {
    const double entries = 1.0 * parts_of_number_ * n_ * n_;
    const gpu::Work largest{2 * entries * std::max<uint32_t>(panels() ? tuning_.panel_columns : 0, 3), 8 * entries};
    gpu::record(a_, [&](gpu::Recording& recording) {
      gpu::in_pieces(recording, batch_, largest, [&](const gpu::Piece& piece) {
        piece_ = piece;
        body(recording);
      });
    });
  }
  gpu::BufferView of_piece(const Tensor& tensor) const { return piece_.of(tensor, tensor.numel() / batch_); }
  // The threadgroups of the piece.
  static gpu::Size grid(int64_t threadgroups) { return {grid_side(threadgroups)}; }

  uint32_t tiles() const { return ceil_div<uint32_t>(pitch_, TRIDIAGONALIZE_TILE); }
  // Whether a panel begins at a column.
  bool has_panel(uint32_t begin) const {
    return parts_of_number_ == 1 && n_ - begin > std::max(tuning_.panel_columns, tuning_.panels_above);
  }
  bool panels() const { return has_panel(0); }
  uint32_t next_parts(uint32_t column) const {
    return std::max(1u, ceil_div<uint32_t>(n_ - column - 1, TRIDIAGONALIZE_NEXT_ROWS - 1));
  }

  void load(gpu::Recording& recording, const gpu::BufferView& from, const TridiagonalLoadParams& p,
            const gpu::BufferView& to, int64_t count) const {
    recording.kernel("tridiagonal_load" + suffix_).buffer(0, from).buffer(1, to).bytes(2, p);
    recording.dispatch_threadgroups(grid(count * p.tiles * p.tiles), {TRIDIAGONALIZE_THREADS});
  }

  void single(gpu::Recording& recording, uint32_t start, uint32_t column) const {
    const uint32_t remaining = n_ - column - 1, count = grid_side(piece_.count);  // rows, matrices
    const uint32_t threads = threads_for(n_ - column / 4 * 4);
    const uint32_t threadgroups = std::max<uint32_t>(tuning_.column_threads / threads, 1);
    const uint32_t rows = std::clamp<uint32_t>(ceil_div(remaining * count, threadgroups), 1, TRIDIAGONALIZE_ROWS);
    const uint32_t parts = std::max(1u, ceil_div(remaining, rows));
    const TridiagonalColumnParams p{n_, pitch_, reflector_rows_, start, column, parts, rows};
    recording.kernel("tridiagonal_column" + suffix_ + "_" + std::to_string(threads)).buffer(0, of_piece(a_));
    recording.buffer(1, of_piece(result_.reflectors))
        .buffer(2, of_piece(products_[column % 2]))
        .buffer(3, of_piece(products_[1 - column % 2]));
    recording.buffer(4, of_piece(result_.tau))
        .buffer(5, of_piece(result_.diagonal))
        .buffer(6, of_piece(beside_))
        .bytes(7, p);
    const double entries = 1.0 * parts_of_number_ * piece_.count * remaining * remaining;
    recording.work(6 * parts_of_number_ * entries, 8 * entries);
    recording.dispatch_threadgroups(grid(count * parts), {threads});
  }

  TridiagonalPanelParams panel_params(uint32_t panel, uint32_t column, uint32_t after) const {
    return {n_,     pitch_, reflector_rows_,
            panel,  column, ceil_div<uint32_t>(n_ - after / 4 * 4, TRIDIAGONALIZE_SQUARE),
            slots_, 0,      norms_};
  }

  // Binds what both kernels of a column read and write; `entries` gets a number of each column.
  void bind(gpu::Recording& recording, const Tensor& entries, const TridiagonalPanelParams& p) const {
    recording.buffer(0, of_piece(a_)).buffer(1, of_piece(result_.reflectors)).buffer(2, of_piece(w_));
    recording.buffer(3, of_piece(x_)).buffer(4, of_piece(squares_)).buffer(5, of_piece(parts_));
    recording.buffer(6, of_piece(quadratic_)).buffer(7, of_piece(dots_)).buffer(8, of_piece(result_.tau));
    recording.buffer(9, of_piece(entries)).bytes(10, p);
  }

  void panel(gpu::Recording& recording, uint32_t begin) const {
    const uint32_t end = begin + tuning_.panel_columns;
    for (uint32_t column = begin; column < end; ++column) {
      multiply(recording, begin, column);
      next(recording, begin, column + 1);
    }
    const uint32_t first = end / 4 * 4, side = ceil_div<uint32_t>(n_ - first, TRIDIAGONALIZE_UPDATE_TILE);
    const TridiagonalUpdateParams p{n_, pitch_, reflector_rows_, begin, end, first, side};
    recording.kernel("tridiagonal_update")
        .buffer(0, of_piece(a_))
        .buffer(1, of_piece(result_.reflectors))
        .buffer(2, of_piece(w_))
        .bytes(3, p);
    const double entries = 0.5 * piece_.count * (n_ - first) * (n_ - first);
    recording.work(4 * entries * tuning_.panel_columns, 8 * entries);
    recording.dispatch_threadgroups(grid(piece_.count * side * (side + 1) / 2), {TRIDIAGONALIZE_UPDATE_THREADS});
  }

  void next(gpu::Recording& recording, uint32_t panel, uint32_t column) const {
    TridiagonalPanelParams p = panel_params(panel, column, column);
    p.parts = next_parts(column);
    p.norms = p.parts * (TRIDIAGONALIZE_NEXT_ROWS / gpu::kSimdWidth);
    bind(recording.kernel("tridiagonal_next"), result_.diagonal, p);
    const double rows = 1.0 * piece_.count * (n_ - column), terms = p.squares + 4.0 * (column - panel);
    recording.work(2 * rows * terms, 4 * rows * terms);
    recording.dispatch_threadgroups(grid(piece_.count * p.parts), {TRIDIAGONALIZE_NEXT_ROWS * TRIDIAGONALIZE_SLICES});
  }

  void multiply(gpu::Recording& recording, uint32_t panel, uint32_t column) const {
    TridiagonalPanelParams p = panel_params(panel, column, column + 1);
    p.parts = column - panel + p.squares * (p.squares + 1) / 2;
    p.norms = next_parts(column) * (TRIDIAGONALIZE_NEXT_ROWS / gpu::kSimdWidth);
    bind(recording.kernel("tridiagonal_multiply"), result_.beside, p);
    const double entries = 0.5 * piece_.count * (n_ - column) * (n_ - column);
    recording.work(4 * entries, 4 * entries);
    recording.dispatch_threadgroups(grid(piece_.count * p.parts), {TRIDIAGONALIZE_SQUARE_THREADS});
  }

  const TridiagonalTuning& tuning_;
  const std::string suffix_;
  const uint32_t parts_of_number_;  // 2 for complex ones
  uint32_t n_, pitch_, reflector_rows_, batch_;
  uint32_t slots_ = 0, norms_ = 0;
  gpu::Piece piece_{};
  Tensor a_, products_[2], beside_;
  Tridiagonal result_;
  Tensor w_, x_, squares_, parts_, quadratic_, dots_;  // of panels
};

}  // namespace

Tridiagonal tridiagonalize(const Tensor& input, bool upper) {
  return Reduction(input, upper, tridiagonal_tuning(input)).run();
}

}  // namespace metalcore
