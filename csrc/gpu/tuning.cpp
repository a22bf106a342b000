#include "tuning.h"

#include <atomic>
#include <iterator>
#include <stdexcept>

namespace metalcore::gpu {

namespace {

// The first row serves every GPU that nobody has tuned for. On the simulator a thread is a fiber and a synchronization
// switches through all of them, so few threads with much work each are best.
constexpr Tuning kTable[] = {
    {.family = "baseline", .thread_row = 16, .simd_row = 512, .simd_rows = 8, .block_row = 16384, .looped_threads = 1024},
    {.family = "simulator", .thread_row = 32, .simd_row = 512, .simd_rows = 8, .block_row = 512, .looped_threads = 32},
};

const Tuning* find(std::string_view family) {
  for (const Tuning& row : kTable)
    if (row.family == family) return &row;
  return nullptr;
}

const Tuning& of_this_gpu() {
#ifdef METALCORE_SIMULATOR
  return *find("simulator");
#else
  return kTable[0];
#endif
}

std::atomic<const Tuning*> chosen = nullptr;

}  // namespace

const Tuning& tuning() {
  const Tuning* row = chosen.load(std::memory_order_relaxed);
  return row ? *row : of_this_gpu();
}

void use_tuning(std::string_view family) {
  const Tuning* row = family.empty() ? nullptr : find(family);
  if (!row && !family.empty()) throw std::invalid_argument("no tuning for GPU family '" + std::string(family) + "'");
  chosen = row;
}

std::vector<std::string> tuning_families() {
  std::vector<std::string> families;
  for (const Tuning& row : kTable) families.emplace_back(row.family);
  return families;
}

}  // namespace metalcore::gpu
