// Eigenvalues and Schur forms of general matrices.
#include "../../../kernels/linalg/eig.h"

#include "../../gpu/cost.h"
#include "../../gpu/limits.h"
#include "../../gpu/tuning.h"
#include "cpu_route.h"
#include "matrices.h"

#include <string>
#include <tuple>
#include <vector>

namespace metalcore {

// eig(A, compute_v) -> (L, V): complex eigenvalues and eigenvectors of general matrices, float32 or complex64, of any
// strides. Results are row-major, and V has no elements without compute_v.
namespace {

// Apple's regions are estimates. The QR sweeps of an n x n matrix have about 0.65 n² steps, each with two barriers of a
// threadgroup, for which 1 µs is assumed: 43 ms for n = 256 and 170 ms for n = 512. LAPACK (geev) needs about 25 n³
// flops, most of which wait for memory: about 40 ms and 250 ms on one core of an M1. A GPU works on a matrix per core
// at once, so that several matrices favour it. Above 512, the command buffer would take longer than 200 ms.
constexpr TorchRegions kSlowOnApple = {{.above = 256, .max_batch = 4}, {.above = 512}};

// Measured on an H200 beside PyTorch's op (MAGMA), which works on one matrix after the other.
constexpr TorchRegions kSlowOnHopper = {
    {.above = 127, .max_batch = 1}, {.above = 256, .max_batch = 2}, {.above = 480, .max_batch = 8}};

const gpu::Table<RouteTuning> eig_tuning("eig",
                                         {{"torch", &RouteTuning::torch, {.calls = "linalg_eig"}},
                                          {"cpu", &RouteTuning::cpu, {.only_on = "mps"}}},
                                         {{.family = "baseline"},
                                          {.family = "apple7", .cpu = kSlowOnApple},
                                          {.family = "apple8", .cpu = kSlowOnApple},
                                          {.family = "apple9", .cpu = kSlowOnApple},
                                          {.family = "apple10", .cpu = kSlowOnApple},
                                          {.family = "hopper", .torch = kSlowOnHopper}});

SizePlan plan_eig(int64_t n, int64_t batch, bool is_complex, bool compute_v, const RouteTuning& tuning) {
  const std::string name = is_complex ? "eig_complex" : "eig", values = compute_v ? "" : "_values";
  const uint32_t simdgroups = is_complex ? EIG_COMPLEX_SIMDGROUPS : EIG_SIMDGROUPS, threads = 32 * simdgroups;
  const char* const by_simdgroup = "QR sweeps by a simdgroup, in threadgroup memory";
  return plan_by_size(n, batch, " has no eigenvalues", tuning, true,
                      {{16, SizeVariant::simd, by_simdgroup, name + "_simd" + values + "_16", simdgroups, threads},
                       {32, SizeVariant::simd, by_simdgroup, name + "_simd" + values + "_32", simdgroups, threads},
                       {is_complex ? EIG_COMPLEX_BLOCK : EIG_BLOCK, SizeVariant::block,
                        "QR sweeps by a threadgroup, in its memory", name + "_block" + values, 1, EIG_BLOCK_THREADS},
                       {EIG_DEVICE, SizeVariant::device, "QR sweeps by a threadgroup, in device memory",
                        name + "_device" + values, 1, EIG_DEVICE_THREADS}});
}

// Arithmetic of all parts, as LAPACK's working notes count it: with the eigenvectors, or the values alone.
double eig_flops(int64_t n, bool is_complex, bool compute_v) {
  const auto size = static_cast<double>(n);
  return (is_complex ? 4.0 : 1.0) * (compute_v ? 27.0 : 11.0) * size * size * size;
}

}  // namespace

std::tuple<Tensor, Tensor> eig(const Tensor& input, bool compute_v) {
  const char* const name = compute_v ? "eig" : "eigvals";
  const bool is_complex = metalcore::is_complex(input);
  const MatrixShape s = check_square_of_numbers(name, input);
  const SizePlan plan = plan_eig(s.rows, s.batch, is_complex, compute_v, eig_tuning(input));
  gpu::note_plan("eig", name_of(plan.variant), [&] { return plan.why; });
  const auto complex = [&](const std::vector<int64_t>& sizes) {
    return new_tensor(sizes, ScalarType::ComplexFloat, input);
  };
  if (plan.variant == SizeVariant::torch || plan.variant == SizeVariant::cpu) {
    const bool on_cpu = plan.variant == SizeVariant::cpu;
    if (!compute_v) {
      auto [l] = on_cpu ? decompose_on_cpu<1>("aten::linalg_eigvals", input, Entries::all)
                        : call_torch<1>("aten::linalg_eigvals", "", input);
      return {l, complex({0})};
    }
    auto [l, v] = on_cpu ? decompose_on_cpu<2>("aten::linalg_eig", input, Entries::all)
                         : call_torch<2>("aten::linalg_eig", "", input);
    return {l, as_contiguous(v)};
  }
  const Tensor l = complex(batch_sizes(input, {s.rows}));
  const Tensor v = complex(compute_v ? batch_sizes(input, {s.rows, s.rows}) : std::vector<int64_t>{0});
  if (plan.variant == SizeVariant::empty) return {l, v};
  const Matrices a = matrices(input);
  const int64_t square = s.rows * s.rows, floats = is_complex ? 2 : 1;  // floats of a number
  const auto scratch = [&](bool wanted, int64_t count) {
    return new_tensor({wanted ? s.batch : 0, count}, ScalarType::Float, input);
  };
  const bool in_device_memory = plan.variant == SizeVariant::device;
  const Tensor z = scratch(compute_v, floats * square), x = scratch(compute_v, 2 * square),
               h = scratch(in_device_memory, floats * square);
  EigParams params{a.batch_stride, a.row_stride, a.column_stride, grid_side(s.batch), grid_side(s.rows)};
  gpu::record(a.tensor, [&](gpu::Recording& recording) {
    const gpu::Work each{eig_flops(s.rows, is_complex, compute_v),
                         ((compute_v ? 32.0 : 8.0) + 4.0 * static_cast<double>(floats)) * static_cast<double>(square)};
    gpu::in_pieces(recording, s.batch, each, [&](const gpu::Piece& piece) {
      const auto complex_of = [&](const Tensor& tensor, int64_t elements) {
        return piece.of(gpu::view_of(tensor), 8 * elements);
      };
      const gpu::BufferView matrices_of_piece = piece.of(gpu::view_of(a.tensor), 4 * floats * a.batch_stride);
      const auto optional = [&](bool wanted, const gpu::BufferView& view) { return wanted ? view : gpu::view_of(l); };
      params.matrices = grid_side(piece.count);
      recording.kernel(plan.kernel).buffer(0, matrices_of_piece).buffer(1, complex_of(l, s.rows));
      recording.buffer(2, optional(compute_v, complex_of(v, square)));
      recording.buffer(3, optional(compute_v, piece.of(z, floats * square)));
      recording.buffer(4, optional(compute_v, piece.of(x, 2 * square))).bytes(5, params);
      if (in_device_memory) recording.buffer(6, piece.of(h, floats * square));
      recording.work(piece.work.flops, piece.work.bytes);
      recording.dispatch_threadgroups({ceil_div(params.matrices, plan.matrices_per_threadgroup)}, {plan.threads});
    });
  });
  return {l, v};
}

// schur(A, sweeps) -> (T, Z): A = Z T Zᴴ of general matrices, float32 or complex64, of any strides. T is the Schur
// form, or without sweeps the Hessenberg form. T is row-major, and Z column-major.
namespace {

KernelPlan plan_schur(int64_t n, int64_t batch, bool is_complex) {
  const std::string size = times(n, n), name = is_complex ? "schur_complex" : "schur";
  const uint32_t simdgroups = is_complex ? EIG_COMPLEX_SIMDGROUPS : EIG_SIMDGROUPS;
  if (batch == 0 || n == 0) return {"empty", size + " has no entries", "", 0, 0};
  if (n <= 32)
    return {"simd", size + ": by a simdgroup, in threadgroup memory", name + "_simd", simdgroups, 32 * simdgroups};
  if (n <= (is_complex ? EIG_COMPLEX_BLOCK : EIG_BLOCK))
    return {"block", size + ": by a threadgroup, in its memory", name + "_block", 1, EIG_BLOCK_THREADS};
  return {"device", size + ": by a threadgroup, in device memory", name + "_device", 1, EIG_DEVICE_THREADS};
}

}  // namespace

std::tuple<Tensor, Tensor> schur(const Tensor& input, bool sweeps) {
  const bool is_complex = metalcore::is_complex(input);
  const MatrixShape s = check_square_of_numbers("schur", input);
  check(s.rows <= EIG_DEVICE, "metalcore::schur: A may have up to ", EIG_DEVICE, " rows, and has ", s.rows);
  const KernelPlan plan = plan_schur(s.rows, s.batch, is_complex);
  gpu::note_plan("schur", plan.variant, [&] { return plan.why; });
  const Tensor t = new_like(input), z = new_like(input);
  if (plan.threads == 0) return {t, transposed(z)};
  const Matrices a = matrices(input);
  SchurParams params{{a.batch_stride, a.row_stride, a.column_stride, 0, grid_side(s.rows)}, sweeps};
  gpu::record(a.tensor, [&](gpu::Recording& recording) {
    const auto entries = static_cast<double>(s.rows * s.rows), size = input.element_size() / 4.0;
    // Arithmetic as LAPACK's working notes count it: gehrd and orghr, and hseqr with Z.
    const double flops = size * size * (sweeps ? 25.0 : 14.0 / 3) * entries * static_cast<double>(s.rows);
    gpu::in_pieces(recording, s.batch, {flops, 12.0 * size * entries}, [&](const gpu::Piece& piece) {
      params.eig.matrices = grid_side(piece.count);
      recording.kernel(plan.kernel).buffer(0, piece.of(a.tensor, a.batch_stride));
      recording.buffer(1, piece.of(z, s.rows * s.rows)).buffer(2, piece.of(t, s.rows * s.rows)).bytes(3, params);
      recording.work(piece.work.flops, piece.work.bytes);
      recording.dispatch_threadgroups({ceil_div(params.eig.matrices, plan.matrices_per_threadgroup)}, {plan.threads});
    });
  });
  return {t, transposed(z)};
}

}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) {
  m.def("eig(Tensor A, bool compute_v) -> (Tensor, Tensor)");
  m.def("schur(Tensor A, bool sweeps) -> (Tensor, Tensor)");
}

METALCORE_KERNELS(m) {
  m.impl<&metalcore::eig>("eig");
  m.impl<&metalcore::schur>("schur");
}
