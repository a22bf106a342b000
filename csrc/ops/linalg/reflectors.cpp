#include "reflectors.h"

#include "../../../kernels/linalg/reflectors.h"

#include <algorithm>

namespace metalcore {

namespace {

uint32_t tiles_of(uint32_t columns) { return ceil_div<uint32_t>(columns, REFLECTORS_COLUMNS); }

std::string kernel(const char* stem, uint32_t width) { return std::string(stem) + "_" + std::to_string(width); }

// Into how many parts rows are split, so that about `fill` threadgroups run. Sums over parts are added up by everyone who
// needs them, which limits their number.
struct Split {
  uint32_t parts, rows_each;
};
Split split(uint32_t rows, int64_t others, uint32_t fill) {
  constexpr uint32_t kMost = 64;
  const uint32_t wanted = static_cast<uint32_t>(ceil_div<int64_t>(fill, std::max<int64_t>(others, 1)));
  const uint32_t parts = std::clamp<uint32_t>(wanted, 1, std::min(kMost, ceil_div<uint32_t>(rows, 2 * REFLECTORS_ROWS)));
  const uint32_t each = round_up<uint32_t>(ceil_div(rows, parts), REFLECTORS_ROWS);
  return {ceil_div(rows, each), each};
}

}  // namespace

struct BlockReflectors::Part {
  const RowMajor& target;
  uint32_t from, to;
  uint32_t own;  // columns of V itself that go before them, in the products: all of the block's, or none
  bool transpose;

  uint32_t product_columns() const { return to - from + own; }

  ReflectorsParams params(const RowMajor& v, Reflectors of, uint32_t batch, uint32_t fill) const {
    const uint32_t rows = v.rows - of.first;
    const Split slabs = split(rows, int64_t{tiles_of(product_columns())} * batch, fill);
    const Split spans = split(rows, int64_t{tiles_of(to - from)} * batch, fill);
    return {.rows = v.rows,
            .columns = v.columns,
            .first = of.first,
            .width = of.width,
            .target_columns = target.columns,
            .target_first = from,
            .target_end = to,
            .tiles = 0,
            .slabs = slabs.parts,
            .slab_rows = slabs.rows_each,
            .own = own,
            .product_columns = product_columns(),
            .skip = own,
            .spans = spans.parts,
            .span_rows = spans.rows_each,
            .transpose = transpose};
  }
};

BlockReflectors::BlockReflectors(const RowMajor& v, const Tensor& tau, uint32_t batch, uint32_t count, uint32_t columns,
                                 const gpu::Tuning& tuning)
    : v_(v), tau_(tau), batch_(batch), count_(count), width_(width_of(count)), fill_(tuning.fill_threadgroups) {
  factors_ = new_tensor({blocks(), batch, width_, width_}, ScalarType::Float, v.tensor);
  // split() makes at most this many threadgroups, each with its part of the products.
  const int64_t groups = fill_ + int64_t{tiles_of(columns)} * batch;
  products_ = new_tensor({groups, width_, REFLECTORS_COLUMNS}, ScalarType::Float, v.tensor);
}

uint32_t BlockReflectors::width_of(uint32_t count) {
  return count <= REFLECTORS_NARROW ? REFLECTORS_NARROW : REFLECTORS_WIDE;
}

Reflectors BlockReflectors::block(uint32_t index) const {
  return {index * width_, std::min(width_, count_ - index * width_)};
}

gpu::BufferView BlockReflectors::factor_of(uint32_t block) const {
  gpu::BufferView view = gpu::view_of(factors_);
  const size_t bytes = size_t{block} * batch_ * width_ * width_ * sizeof(float);
  return {view.storage, view.offset + bytes, view.span - bytes};
}

BlockReflectors::Part BlockReflectors::own_columns(Reflectors of, uint32_t from, uint32_t to) const {
  return {v_, from, to, of.width, true};
}

void BlockReflectors::products(gpu::Encoder& encoder, Reflectors of, uint32_t kernel_width, const Part& part) const {
  ReflectorsParams p = part.params(v_, of, batch_, fill_);
  p.tiles = tiles_of(p.product_columns);
  encoder.kernel(kernel("reflectors_products", kernel_width)).buffer(0, v_.tensor).buffer(1, part.target.tensor);
  encoder.buffer(2, products_).bytes(3, p);
  encoder.dispatch_threadgroups({grid_side(int64_t{p.tiles} * p.slabs * batch_)}, {REFLECTORS_THREADS});
}

void BlockReflectors::make_factor(gpu::Encoder& encoder, uint32_t block, const Part& part) const {
  const Reflectors of = this->block(block);
  const ReflectorsParams p = part.params(v_, of, batch_, fill_);
  encoder.kernel(kernel("reflectors_factor", width_)).buffer(0, products_).buffer(1, tau_);
  encoder.buffer(2, factor_of(block));
  encoder.bytes(3, ReflectorsFactorParams{of.first, of.width, count_, p.slabs, p.product_columns});
  encoder.dispatch_threadgroups({batch_}, {REFLECTORS_THREADS});
}

void BlockReflectors::update(gpu::Encoder& encoder, Reflectors of, uint32_t kernel_width, const gpu::BufferView& t,
                             const Part& part) const {
  if (part.from == part.to) return;
  ReflectorsParams p = part.params(v_, of, batch_, fill_);
  p.tiles = tiles_of(part.to - part.from);
  encoder.kernel(kernel("reflectors_apply", kernel_width)).buffer(0, v_.tensor).buffer(1, t).buffer(2, products_);
  encoder.buffer(3, part.target.tensor).bytes(4, p);
  encoder.dispatch_threadgroups({grid_side(int64_t{p.tiles} * p.spans * batch_)}, {REFLECTORS_THREADS});
}

void BlockReflectors::factor(gpu::Encoder& encoder, uint32_t block) const {
  const Reflectors of = this->block(block);
  const uint32_t end = of.first + of.width;
  const Part part = own_columns(of, end, end);
  products(encoder, of, width_, part);
  make_factor(encoder, block, part);
}

void BlockReflectors::factor_and_update(gpu::Encoder& encoder, uint32_t block) const {
  const Reflectors of = this->block(block);
  const Part part = own_columns(of, of.first + of.width, v_.columns);
  products(encoder, of, width_, part);
  make_factor(encoder, block, part);
  update(encoder, of, width_, factor_of(block), part);
}

void BlockReflectors::apply(gpu::Encoder& encoder, uint32_t block, const RowMajor& target, uint32_t from, uint32_t to,
                            bool transpose) const {
  const Part part{target, from, to, 0, transpose};
  products(encoder, this->block(block), width_, part);
  update(encoder, this->block(block), width_, factor_of(block), part);
}

void BlockReflectors::apply_narrow(gpu::Encoder& encoder, Reflectors of, const Tensor& t, uint32_t from,
                                   uint32_t to) const {
  if (from == to) return;
  const Part part{v_, from, to, 0, true};
  products(encoder, of, REFLECTORS_NARROW, part);
  update(encoder, of, REFLECTORS_NARROW, gpu::view_of(t), part);
}

void BlockReflectors::factor_all(gpu::Encoder& encoder) const {
  for (uint32_t i = 0; i < blocks(); ++i) factor(encoder, i);
}

void BlockReflectors::apply_all(gpu::Encoder& encoder, const RowMajor& target, bool transpose) const {
  for (uint32_t i = 0; i < blocks(); ++i)
    apply(encoder, transpose ? i : blocks() - 1 - i, target, 0, target.columns, transpose);
}

std::vector<Step> BlockReflectors::steps(uint32_t rows, uint32_t batch, uint32_t count, uint32_t columns,
                                         const gpu::Tuning& tuning) {
  const uint32_t width = width_of(count);
  const int64_t groups = int64_t{tiles_of(columns)} * batch;
  const uint32_t parts = split(rows, groups, tuning.fill_threadgroups).parts;
  return {{kernel("reflectors_products", width), {grid_side(groups * parts)}, {REFLECTORS_THREADS}},
          {kernel("reflectors_apply", width), {grid_side(groups * parts)}, {REFLECTORS_THREADS}}};
}

}  // namespace metalcore
