#include "tuning.h"

#include "backend.h"
#include "recorder.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>

#include <atomic>
#include <stdexcept>

namespace metalcore::gpu {

namespace {

// Tables name their families while the library is loaded, so that readers need no lock.
std::vector<std::string>& names() {
  static std::vector<std::string> known = {"baseline"};
  return known;
}

constexpr Family kOwn = UINT32_MAX;  // each GPU's own
std::atomic<Family> chosen = kOwn;

Family find(std::string_view name) {
  for (size_t i = 0; i < names().size(); ++i)
    if (names()[i] == name) return static_cast<Family>(i);
  return kOwn;
}

// A tensor without memory has no GPU. The recorder says which one its plans are for.
Backend* backend_of(const Tensor& tensor) {
  if (Backend* backend = find_backend(device_type_of(tensor))) return backend;
  return Recorder::current() ? &Recorder::current()->backend() : nullptr;
}

}  // namespace

const Table<Parallelism> parallelism = {{.family = "baseline"},
                                        {.family = "hopper", .fill_threadgroups = 2 * 132},
                                        {.family = "simulator", .fill_threadgroups = 2}};

Family family_named(std::string_view name) {
  if (const Family known = find(name); known != kOwn) return known;
  names().emplace_back(name);
  return static_cast<Family>(names().size() - 1);
}

Family family_of(const Tensor& tensor) {
  const Family family = chosen.load(std::memory_order_relaxed);
  if (family != kOwn) return family;
  Backend* const backend = backend_of(tensor);
  const Family own = backend ? find(backend->family()) : 0;
  return own == kOwn ? 0 : own;
}

void use_tuning(std::string_view family) {
  const Family found = family.empty() ? kOwn : find(family);
  if (found == kOwn && !family.empty())
    throw std::invalid_argument("no tuning for GPU family '" + std::string(family) + "'");
  chosen = found;
}

std::string chosen_tuning() {
  const Family family = chosen;
  return family == kOwn ? "" : names()[family];
}

std::vector<std::string> tuning_families() { return names(); }

}  // namespace metalcore::gpu
