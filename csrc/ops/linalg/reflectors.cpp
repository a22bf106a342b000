#include "qr.h"

#include "../../../kernels/linalg/qr.h"

#include <algorithm>

namespace metalcore {

namespace {

uint32_t tiles_of(uint32_t columns) { return ceil_div<uint32_t>(columns, REFLECTORS_COLUMNS); }

std::string kernel(const char* stem, uint32_t width) { return std::string(stem) + "_" + std::to_string(width); }

// Splits rows into parts, so that up to `fill` threadgroups run: as many as a GPU runs at once. Each reader of a sum
// adds up all parts, which limits their number.
struct Split {
  uint32_t parts, rows_each;
};
Split split(uint32_t rows, int64_t threadgroups_per_part, uint32_t fill) {
  constexpr uint32_t kMostParts = 64;
  const uint32_t wanted = static_cast<uint32_t>(fill / std::max<int64_t>(threadgroups_per_part, 1));
  const uint32_t most = std::min(kMostParts, ceil_div<uint32_t>(rows, 2 * REFLECTORS_ROWS));
  const uint32_t parts = std::clamp<uint32_t>(wanted, 1, most);
  const uint32_t each = round_up<uint32_t>(ceil_div(rows, parts), REFLECTORS_ROWS);
  return {ceil_div(rows, each), each};
}

}  // namespace

struct BlockReflectors::TargetPart {
  const RowMajor& target;
  uint32_t begin, end;
  bool own;  // the products begin with V's own columns
  bool transpose;
};

BlockReflectors::BlockReflectors(const RowMajor& v, const Tensor& tau, uint32_t batch, uint32_t count, uint32_t columns)
    : v_(v),
      tau_(tau),
      batch_(batch),
      count_(count),
      width_(width_of(count)),
      fill_(gpu::parallelism(v.tensor).fill_threadgroups) {
  factors_ = new_tensor({blocks(), batch, width_, width_}, ScalarType::Float, v.tensor);
  // split() makes at most this many threadgroups, for a block or for all V. Each has its part of the products.
  const int64_t threadgroups = fill_ + std::max(int64_t{tiles_of(columns)}, int64_t{blocks()}) * batch;
  products_ = new_tensor({threadgroups, width_, REFLECTORS_COLUMNS}, ScalarType::Float, v.tensor);
}

uint32_t BlockReflectors::width_of(uint32_t count) {
  return count <= REFLECTORS_NARROW ? REFLECTORS_NARROW : REFLECTORS_WIDE;
}

ReflectorRange BlockReflectors::block(uint32_t index) const {
  return {index * width_, std::min(width_, count_ - index * width_)};
}

gpu::BufferView BlockReflectors::factor_of(uint32_t block) const {
  gpu::BufferView view = gpu::view_of(factors_);
  const size_t bytes = size_t{block} * batch_ * width_ * width_ * sizeof(float);
  return {view.storage, view.offset + bytes, view.span - bytes, view.tensor};
}

ReflectorsParams BlockReflectors::params(ReflectorRange first_block, uint32_t blocks, const TargetPart& part) const {
  const auto [first, width] = first_block;
  const uint32_t end = std::min(first + width * blocks, count_), skip = part.own ? width : 0;
  const uint32_t columns = skip + part.end - part.begin;
  return {.rows = v_.rows,
          .columns = v_.columns,
          .first = first,
          .width = width,
          .blocks = blocks,
          .count = end,
          .target_columns = part.target.columns,
          .target_first = part.begin,
          .target_end = part.end,
          .product_columns = columns,
          .skip = skip,
          .slabs = split(v_.rows - first, int64_t{tiles_of(columns)} * batch_ * blocks, fill_).parts,
          .tiles = 0,
          .parts = 0,
          .part_rows = 0,
          .transpose = part.transpose};
}

// `columns` are all columns of the products, or only those of the update.
void BlockReflectors::dispatch(gpu::Recording& recording, uint32_t index, ReflectorsParams p, uint32_t columns) const {
  const int64_t threadgroups_per_part = int64_t{tiles_of(columns)} * batch_ * p.blocks;
  const Split rows = split(p.rows - p.first, threadgroups_per_part, fill_);
  p.tiles = tiles_of(columns);
  p.parts = rows.parts;
  p.part_rows = rows.rows_each;
  const double entries = 1.0 * batch_ * p.blocks * (p.rows - p.first);
  recording.work(2 * entries * p.width * columns, 4 * entries * (p.width + 2.0 * columns));
  recording.bytes(index, p).dispatch_threadgroups({grid_side(threadgroups_per_part * p.parts)}, {REFLECTORS_THREADS});
}

void BlockReflectors::products(gpu::Recording& recording, const ReflectorsParams& p, uint32_t kernel_width,
                               const Tensor& target) const {
  recording.kernel(kernel("reflectors_products", kernel_width)).buffer(0, v_.tensor).buffer(1, target);
  dispatch(recording.buffer(2, products_), 3, p, p.product_columns);
}

void BlockReflectors::make_factors(gpu::Recording& recording, const ReflectorsParams& p, uint32_t block) const {
  recording.kernel(kernel("reflectors_factor", width_))
      .buffer(0, products_)
      .buffer(1, tau_)
      .buffer(2, factor_of(block));
  recording.bytes(3, ReflectorsFactorParams{batch_, p.first, width_, p.blocks, count_, p.slabs, p.product_columns});
  recording.dispatch_threadgroups({grid_side(int64_t{batch_} * p.blocks)}, {REFLECTORS_THREADS});
}

void BlockReflectors::update(gpu::Recording& recording, const ReflectorsParams& p, uint32_t kernel_width,
                             const gpu::BufferView& t, const Tensor& target) const {
  if (p.target_first == p.target_end) return;
  recording.kernel(kernel("reflectors_apply", kernel_width)).buffer(0, v_.tensor).buffer(1, t).buffer(2, products_);
  dispatch(recording.buffer(3, target), 4, p, p.target_end - p.target_first);
}

void BlockReflectors::factor_all(gpu::Recording& recording) const {
  const ReflectorsParams p = params({0, width_}, blocks(), {v_, 0, 0, true, false});
  products(recording, p, width_, v_.tensor);
  make_factors(recording, p, 0);
}

void BlockReflectors::factor_and_update(gpu::Recording& recording, uint32_t block) const {
  const ReflectorRange range = this->block(block);
  const ReflectorsParams p = params(range, 1, {v_, range.first + range.width, v_.columns, true, true});
  products(recording, p, width_, v_.tensor);
  make_factors(recording, p, block);
  update(recording, p, width_, factor_of(block), v_.tensor);
}

void BlockReflectors::apply(gpu::Recording& recording, uint32_t block, const RowMajor& target, uint32_t begin,
                            uint32_t end, bool transpose) const {
  const ReflectorsParams p = params(this->block(block), 1, {target, begin, end, false, transpose});
  products(recording, p, width_, target.tensor);
  update(recording, p, width_, factor_of(block), target.tensor);
}

void BlockReflectors::apply_narrow(gpu::Recording& recording, ReflectorRange range, const Tensor& t, uint32_t begin,
                                   uint32_t end) const {
  if (begin == end) return;
  const ReflectorsParams p = params(range, 1, {v_, begin, end, false, true});
  products(recording, p, REFLECTORS_NARROW, v_.tensor);
  update(recording, p, REFLECTORS_NARROW, gpu::view_of(t), v_.tensor);
}

void BlockReflectors::apply_all(gpu::Recording& recording, const RowMajor& target, bool transpose) const {
  for (uint32_t i = 0; i < blocks(); ++i)
    apply(recording, transpose ? i : blocks() - 1 - i, target, 0, target.columns, transpose);
}

}  // namespace metalcore
