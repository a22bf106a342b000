// eigh_tridiagonal(d, e, compute_v) -> (L, V): eigenvalues and eigenvectors of symmetric tridiagonal float32 matrices.
#include "tridiagonal.h"

#include "../../../kernels/linalg/tridiagonal.h"

#include "../../gpu/cost.h"
#include "../../gpu/limits.h"
#include "../gemm/gemm.h"
#include "matrices.h"

#include <string>
#include <tuple>
#include <vector>

namespace metalcore {
namespace {

constexpr int64_t kMergeFloats = 2;  // of the kernels' struct TridiagonalMerge

struct DividePlan {
  uint32_t levels, leaf, padded;
};

DividePlan plan_divide(int64_t n) {
  DividePlan plan{0, grid_side(n), grid_side(n)};
  while (plan.leaf > TRIDIAGONAL_LEAF) plan.leaf = grid_side(ceil_div<int64_t>(n, int64_t{1} << ++plan.levels));
  plan.padded = plan.leaf << plan.levels;
  return plan;
}

std::string why_divide(int64_t n, const DividePlan& plan) {
  const std::string leaves = "leaves of " + std::to_string(plan.leaf) + " rows by QL";
  return times(n, n) + ": " +
         (plan.levels == 0 ? "a leaf by QL" : leaves + ", and " + std::to_string(plan.levels) + " levels of merges");
}

class Divided {
 public:
  Divided(const Tensor& d, const Tensor& e, int64_t batch, int64_t n, const DividePlan& plan)
      : plan_(plan),
        params_{grid_side(batch), grid_side(n), plan.padded, plan.leaf, plan.padded != n},
        d_(d),
        e_(e),
        diagonal_(numbers(1)),
        beside_(numbers(1)),
        scales_(new_tensor({batch}, ScalarType::Float, d)) {}

  void values(const Tensor& w) {
    params_.leaf = 0;
    // More threads take fewer steps, and have more work: of use where one thread per eigenvalue leaves cores idle.
    const int64_t threads = int64_t{params_.matrices} * params_.size;
    const uint32_t lanes = threads < int64_t{TRIDIAGONAL_THREADS} * gpu::parallelism(d_).fill_threadgroups ? 16 : 1;
    gpu::record(w, [&](gpu::Recording& recording) {
      split(recording);
      recording.kernel(lanes > 1 ? "tridiagonal_bisect_16" : "tridiagonal_bisect_1")
          .buffer(0, diagonal_)
          .buffer(1, beside_)
          .buffer(2, scales_);
      recording.buffer(3, w).bytes(4, params_);
      recording.work(32.0 * 8 * params_.matrices * params_.size * params_.size, 12.0 * elements());
      recording.dispatch_threadgroups({ceil_div<uint32_t>(lanes * params_.size, TRIDIAGONAL_THREADS), params_.matrices},
                                      {TRIDIAGONAL_THREADS});
    });
  }

  // A merge reads eigenvalues and eigenvectors from one of two tensors, and writes to the other. The last one writes to
  // the first, whose eigenvectors are q itself, unless they are padded.
  void eigenvectors(const Tensor& w, const Tensor& q) {
    const bool has_merges = plan_.levels > 0;
    const int64_t entries = elements() * plan_.padded;
    const Tensor full = params_.copies != 0 ? new_tensor({entries}, ScalarType::Float, d_) : q;
    const Tensor factor = has_merges ? new_tensor({entries}, ScalarType::Float, d_) : q;
    const Tensor eigenvectors[2] = {full, has_merges ? new_tensor({entries / 2}, ScalarType::Float, d_) : q};
    const Tensor values[2] = {numbers(1), numbers(1)};
    const Scratch scratch = scratch_for_merges();
    uint32_t from = plan_.levels % 2;
    gpu::record(w, [&](gpu::Recording& recording) {
      split(recording);
      leaves(recording, values[from], eigenvectors[from]);
    });
    for (uint32_t part = plan_.leaf; part < plan_.padded; part *= 2, from = 1 - from) {
      const TridiagonalMergeParams p{params_.matrices * (plan_.padded / (2 * part)), part, 2 * part};
      gpu::record(w, [&](gpu::Recording& recording) {
        merge(recording, p, scratch, values[from], eigenvectors[from], values[1 - from], factor);
      });
      multiply(eigenvectors[from], factor, eigenvectors[1 - from], 2 * int64_t{p.merges}, part);
    }
    gpu::record(w, [&](gpu::Recording& recording) {
      recording.kernel("tridiagonal_results").buffer(0, values[0]).buffer(1, scales_).buffer(2, full);
      recording.buffer(3, w).buffer(4, q).bytes(5, params_);
      recording.work(0, params_.copies != 0 ? 8.0 * static_cast<double>(entries) : 0);
      recording.dispatch_threadgroups({params_.size, params_.matrices}, {TRIDIAGONAL_THREADS});
    });
  }

 private:
  struct Scratch {
    Tensor sorted, sources, factors, poles, weights, rows, deflated, merges, eigenvalues, found, exact_weights, columns;
  };

  int64_t elements() const { return int64_t{params_.matrices} * plan_.padded; }
  Tensor numbers(int64_t each) const { return new_tensor({each * elements()}, ScalarType::Float, d_); }
  Scratch scratch_for_merges() const {
    const auto numbers = [&](int64_t each) { return this->numbers(plan_.levels > 0 ? each : 0); };
    return {numbers(5), numbers(3), numbers(2), numbers(1), numbers(1), numbers(4),
            numbers(4), numbers(1), numbers(2), numbers(1), numbers(1), numbers(4)};
  }

  void split(gpu::Recording& recording) const {
    recording.kernel("tridiagonal_split").buffer(0, d_).buffer(1, e_).buffer(2, diagonal_).buffer(3, beside_);
    recording.buffer(4, scales_).bytes(5, params_).work(0, 16.0 * static_cast<double>(elements()));
    recording.dispatch_threadgroups({params_.matrices}, {TRIDIAGONAL_THREADS});
  }

  void leaves(gpu::Recording& recording, const Tensor& values, const Tensor& eigenvectors) const {
    const uint32_t count = params_.matrices * (plan_.padded / plan_.leaf);
    const double rows = plan_.leaf;
    recording.kernel("tridiagonal_leaves").buffer(0, diagonal_).buffer(1, beside_).buffer(2, values);
    recording.buffer(3, eigenvectors)
        .bytes(4, params_)
        .work(6.0 * count * rows * rows * rows, 4.0 * count * rows * rows);
    recording.dispatch_threadgroups({ceil_div<uint32_t>(count, TRIDIAGONAL_LEAF_SIMDGROUPS)},
                                    {32 * TRIDIAGONAL_LEAF_SIMDGROUPS});
  }

  // Finds the eigenvalues of merges, and the factor of their eigenvectors.
  void merge(gpu::Recording& recording, const TridiagonalMergeParams& p, const Scratch& s, const Tensor& child_values,
             const Tensor& eigenvectors, const Tensor& values, const Tensor& factor) const {
    const double size = p.size, pairs = p.merges * size * size;
    recording.kernel("tridiagonal_deflate").buffer(0, child_values).buffer(1, eigenvectors).buffer(2, beside_);
    recording.buffer(3, s.sorted).buffer(4, s.sources).buffer(5, s.factors).buffer(6, s.poles).buffer(7, s.weights);
    recording.buffer(8, s.rows)
        .buffer(9, s.deflated)
        .buffer(10, s.merges)
        .bytes(11, p)
        .work(0, 100.0 * p.merges * size);
    recording.dispatch_threadgroups({p.merges}, {TRIDIAGONAL_DEFLATE_THREADS});

    const uint32_t threadgroups =
        grid_side(ceil_div<int64_t>(int64_t{p.merges} * p.size, TRIDIAGONAL_THREADS / gpu::kSimdWidth));
    gpu::in_pieces(recording, p.merges, {60.0 * size * size, 0}, [&](const gpu::Piece& piece) {
      TridiagonalMergeParams some = p;
      some.merges = grid_side(piece.count);
      const auto of = [&](const Tensor& tensor, int64_t elements) { return piece.of(tensor, elements); };
      recording.kernel("tridiagonal_roots").buffer(0, of(s.poles, p.size)).buffer(1, of(s.weights, p.size));
      recording.buffer(2, of(s.merges, kMergeFloats)).buffer(3, of(s.eigenvalues, 2 * int64_t{p.size}));
      recording.buffer(4, of(s.found, p.size)).bytes(5, some).work(piece.work.flops, 0);
      recording.dispatch_threadgroups(
          {grid_side(ceil_div<int64_t>(piece.count * p.size, TRIDIAGONAL_THREADS / gpu::kSimdWidth))},
          {TRIDIAGONAL_THREADS});
    });
    recording.kernel("tridiagonal_weights").buffer(0, s.poles).buffer(1, s.weights).buffer(2, s.merges);
    recording.buffer(3, s.eigenvalues).buffer(4, s.exact_weights).bytes(5, p).work(5 * pairs, 0);
    recording.dispatch_threadgroups({threadgroups}, {TRIDIAGONAL_THREADS});
    recording.kernel("tridiagonal_columns").buffer(0, s.poles).buffer(1, s.exact_weights).buffer(2, s.merges);
    recording.buffer(3, s.eigenvalues).buffer(4, s.found).buffer(5, s.deflated).buffer(6, values).buffer(7, s.columns);
    recording.bytes(8, p).work(8 * pairs, 0).dispatch_threadgroups({threadgroups}, {TRIDIAGONAL_THREADS});
    recording.kernel("tridiagonal_fill").buffer(0, s.poles).buffer(1, s.weights).buffer(2, s.exact_weights);
    recording.buffer(3, s.rows).buffer(4, s.columns).buffer(5, factor).bytes(6, p).work(4 * pairs, 4 * pairs);
    recording.dispatch_threadgroups({ceil_div<uint32_t>(p.size, TRIDIAGONAL_FILL_ROWS), p.merges},
                                    {TRIDIAGONAL_THREADS});
  }

  // The eigenvectors of each part by its rows of the factor. Parts and factors lie one after the other.
  static void multiply(const Tensor& parts, const Tensor& factor, const Tensor& result, int64_t count, int64_t part) {
    GemmProblem problem{.rows = part, .columns = 2 * part, .terms = part};
    problem.a = {part, 1, begins_aligned(parts)};
    problem.b = {2 * part, 1, begins_aligned(factor)};
    problem.batch = {{count, part * part, 2 * part * part, 0}};
    gemm_into("matmul", problem, {parts, factor, std::nullopt, std::nullopt, std::nullopt}, 0, 1.0, 0.0, result);
  }

  const DividePlan plan_;
  TridiagonalParams params_;
  const Tensor &d_, &e_;
  const Tensor diagonal_, beside_, scales_;
};

}  // namespace

std::tuple<Tensor, Tensor> eigh_tridiagonal(const Tensor& diagonal, const Tensor& off_diagonal, bool compute_v) {
  const char* const op = "eigh_tridiagonal";
  check_float32(op, "d", diagonal);
  check_float32(op, "e", off_diagonal);
  check_same_device(op, "e", off_diagonal, diagonal);
  std::vector<int64_t> sizes = sizes_of(diagonal), expected = sizes;
  if (!sizes.empty()) --expected.back();
  check(!sizes.empty() && sizes.back() > 0 && sizes_of(off_diagonal) == expected, "metalcore::", op,
        ": d and e must be (*, n) and (*, n - 1), not ", shape_text(diagonal), " and ", shape_text(off_diagonal));
  const int64_t n = sizes.back(), batch = diagonal.numel() / n;
  check(n <= TRIDIAGONAL_MOST, "metalcore::", op, ": matrices may have up to ", TRIDIAGONAL_MOST, " rows, not ", n);
  const Tensor w = new_like(diagonal);
  sizes.push_back(n);
  if (!compute_v) sizes = {0};
  const Tensor q = new_tensor({sizes.data(), sizes.size()}, ScalarType::Float, diagonal);
  const DividePlan plan = plan_divide(n);
  const bool is_empty = w.numel() == 0;
  gpu::note_plan(
      op,
      is_empty          ? "empty"
      : !compute_v      ? "bisection"
      : plan.levels > 0 ? "merges"
                        : "leaf",
      [&] { return compute_v ? why_divide(n, plan) : times(n, n) + ": bisection, one or 16 threads per eigenvalue"; });
  if (is_empty) return {w, q};
  const Tensor d = as_contiguous(diagonal), e = as_contiguous(off_diagonal);
  Divided divided(d, e, batch, n, plan);
  if (compute_v)
    divided.eigenvectors(w, q);
  else
    divided.values(w);
  return {w, q};
}

}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) {
  m.def("eigh_tridiagonal(Tensor d, Tensor e, bool compute_v) -> (Tensor, Tensor)");
}

METALCORE_KERNELS(m) { m.impl<&metalcore::eigh_tridiagonal>("eigh_tridiagonal"); }
