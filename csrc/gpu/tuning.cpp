#include "tuning.h"

#ifdef METALCORE_MPS
#include "../backends/mps/encoder.h"
#endif
#ifdef METALCORE_SIMULATOR
#include "../backends/simulator/launch.h"
#endif

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>

#include <atomic>
#include <iterator>
#include <stdexcept>

namespace metalcore::gpu {

namespace {

// The first row serves every GPU that nobody has tuned for. On the simulator the threads of a simdgroup are fibers that
// switch at every exchange, while a thread by itself runs as plain vector code: there a thread takes a row of any
// length. In checking mode the simulator plans as a GPU does, so that what is checked is what a GPU runs.
constexpr Tuning kTable[] = {
    {.family = "baseline",
     .thread_row = 16,
     .simd_row = 512,
     .simd_rows = 8,
     .block_row = 16384,
     .looped_threads = 1024},
    {.family = "nvidia",
     .thread_row = 16,
     .simd_row = 512,
     .simd_rows = 8,
     .block_row = 16384,
     .looped_threads = 1024,
     .row_threads = 132 * 1024,
     .qr_torch = {{.above = 3071, .most = 1}},
     .qr_torch_rows = 32768,
     .householder_product_torch = {{.above = 128, .most = 1}},
     .ormqr_torch = {{.up_to = 32, .most = 1}, {.above = 128, .most = 1}},
     .fill_threadgroups = 2 * 132,
     .cholesky_torch = {{.above = 1023, .most = 1}},
     .lu_torch = {{.above = 768, .most = 1}, {.above = 1536, .most = 3}, {.above = 768, .least = 160}},
     .lu_solve_torch = {{.above = 32, .most = 4}},
     .triangular_torch = {{.above = 63, .most = 1}},
     .triangular_vector_torch = {{.above = 511, .most = 1}},
     .eigh_torch = {{.above = 512, .most = 4}, {.above = 1024}},
     .syrk_torch = {{.above = 0}}},
    {.family = "simulator",
     .thread_row = UINT32_MAX,
     .simd_row = 0,
     .simd_rows = 1,
     .block_row = 0,
     .looped_threads = 32,
     .fill_threadgroups = 2,
     .adamw_vectors = false},
};

const Tuning* find(std::string_view family) {
  for (const Tuning& row : kTable)
    if (row.family == family) return &row;
  return nullptr;
}

const Tuning& of_gpu(bool cuda) {
  if (cuda) return *find("nvidia");
#if defined(METALCORE_MPS)
  static const Tuning* const tuned = find(mps::gpu_family());
  if (tuned) return *tuned;
#elif defined(METALCORE_SIMULATOR)
  if (!simulator::checking().on) return *find("simulator");
#endif
  return kTable[0];
}

std::atomic<const Tuning*> chosen = nullptr;

}  // namespace

const Tuning& tuning(const Tensor& on) {
  const Tuning* row = chosen.load(std::memory_order_relaxed);
  if (row) return *row;
  int32_t type = -1;
  aoti_torch_get_device_type(on.get(), &type);
  return of_gpu(type == aoti_torch_device_type_cuda());
}

const Tuning& tuning(std::string_view device_type) {
  const Tuning* row = chosen.load(std::memory_order_relaxed);
  return row ? *row : of_gpu(device_type == "cuda");
}

void use_tuning(std::string_view family) {
  const Tuning* row = family.empty() ? nullptr : find(family);
  if (!row && !family.empty()) throw std::invalid_argument("no tuning for GPU family '" + std::string(family) + "'");
  chosen = row;
}

const char* chosen_tuning() {
  const Tuning* row = chosen;
  return row ? row->family : "";
}

std::vector<std::string> tuning_families() {
  std::vector<std::string> families;
  for (const Tuning& row : kTable) families.emplace_back(row.family);
  return families;
}

}  // namespace metalcore::gpu
