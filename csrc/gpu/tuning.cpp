#include "tuning.h"

#include "backend.h"
#include "recorder.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <utility>

namespace metalcore::gpu {

namespace {

// Tables name their families while the library is loaded, so that readers need no lock.
std::vector<std::string>& names() {
  static std::vector<std::string> known = {"baseline", kThisMachine};  // as the numbers of families
  return known;
}

// The usual numbers of cores: of a base M1 and its successors, which have 7 to 10, and of an H100 and an H200.
constexpr uint32_t kAppleCores = 8, kHopperCores = 132;

constexpr size_t kMostFamilies = 32;
struct Cores {
  std::array<std::atomic<uint32_t>, kMostFamilies> of;
  Cores() {
    for (std::atomic<uint32_t>& cores : of) cores = kAppleCores;
  }
};

constexpr Family kOwn = UINT32_MAX;  // each GPU's own
std::atomic<Family> chosen = kOwn;
std::atomic<uint64_t> version = 0;

// The devices for which values measured on this machine are in use.
struct MeasuredFor {
  const Backend* backend;
  std::string family;
};
std::atomic<const MeasuredFor*> measured_for = nullptr;
std::function<void(std::string_view)> measured_loader;

struct Lacking {
  std::mutex mutex;
  std::map<std::string, std::vector<std::string>> of;  // operators of PyTorch, by type of device
};
Lacking& lacking() {
  static Lacking operators;
  return operators;
}

std::vector<const AnyTable*>& tables() {
  static std::vector<const AnyTable*> all;
  return all;
}

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

// The family's own, whether or not something was measured. Newer GPUs of Apple's count as the newest known family.
Family known_family(std::string_view name) {
  Family family = find(name);
  if (family == kOwn && name.starts_with("apple")) family = find("apple10");
  return family == kOwn ? 0 : family;
}

// The GPU's cores, once it is known that there is one.
void count_cores(Backend& backend) {
  if (backend.counted_cores.load(std::memory_order_acquire)) return;
  const uint32_t cores = backend.cores();
  if (cores == 0) return;
  cores_of(known_family(backend.family())).store(cores, std::memory_order_relaxed);
  backend.counted_cores.store(true, std::memory_order_release);
}

Family family_of(Backend& backend) {
  count_cores(backend);
  if (!backend.asked_for_measured.load(std::memory_order_acquire)) {
    if (measured_loader) measured_loader(backend.device_type());
    backend.asked_for_measured.store(true, std::memory_order_release);
  }
  const std::string_view family = backend.family();
  const MeasuredFor* const measured = measured_for.load(std::memory_order_acquire);
  if (measured && measured->backend == &backend && measured->family == family) return kMeasuredHere;
  return known_family(family);
}

Backend& backend_named(std::string_view device_type) {
  Backend* const backend = find_backend(device_type);
  if (!backend)
    throw std::invalid_argument("metalcore: this build has no kernels for " + std::string(device_type) + " devices");
  return *backend;
}

}  // namespace

std::atomic<uint32_t>& cores_of(Family family) {
  static Cores cores;
  return cores.of.at(family);
}

const Table<Parallelism> parallelism("parallelism",
                                     // Scratch memory grows with it: 32 MiB for blocks of reflectors at the most.
                                     {{"fill_threadgroups", &Parallelism::fill_threadgroups, {1, 2048}}},
                                     {{.family = "baseline"},
                                      {.family = "hopper", .fill_threadgroups = per_core(2)},
                                      {.family = "simulator", .fill_threadgroups = 2}});

Family family_named(std::string_view name) {
  if (const Family known = find(name); known != kOwn) return known;
  names().emplace_back(name);
  const auto family = static_cast<Family>(names().size() - 1);
  if (name == "hopper") cores_of(family) = kHopperCores;
  return family;
}

bool multiplies_tensors(const Tensor& tensor) {
  Backend* const backend = backend_of(tensor);
  return !backend || backend->multiplies_tensors();
}
bool multiplies_held_tensors(const Tensor& tensor) {
  Backend* const backend = backend_of(tensor);
  return !backend || backend->multiplies_held_tensors();
}
uint32_t most_together(const Tensor& tensor) {
  if (Backend* const own = find_backend(device_type_of(tensor))) return own->most_together(tensor.get_device_index());
  Backend* const backend = backend_of(tensor);
  return backend ? backend->most_together(-1) : 1;
}

Family family_of(const Tensor& tensor) {
  const Family family = chosen.load(std::memory_order_relaxed);
  Backend* const backend = backend_of(tensor);
  if (family == kOwn) return backend ? family_of(*backend) : 0;
  if (backend) count_cores(*backend);
  return family;
}

void use_tuning(std::string_view family) {
  const Family found = family.empty() ? kOwn : find(family);
  if (found == kOwn && !family.empty())
    throw std::invalid_argument("no tuning for GPU family '" + std::string(family) + "'");
  chosen = found;
  ++version;
}

std::string chosen_tuning() {
  const Family family = chosen;
  return family == kOwn ? "" : names()[family];
}

std::vector<std::string> tuning_families() {
  std::vector<std::string> families = names();
  families.erase(families.begin() + kMeasuredHere);
  return families;
}

uint64_t tuning_version() { return version; }

AnyTable::AnyTable(std::string name) : name_(std::move(name)) { tables().push_back(this); }

void AnyTable::refuse(const std::string& field, const std::string& reason) const {
  throw std::invalid_argument(name_ + "." + field + ": " + reason);
}

int64_t legal_number(const Numbers& numbers, const Legal& legal) {
  if (numbers.size() == 1 && numbers[0] >= legal.lowest && numbers[0] <= legal.highest &&
      (numbers[0] - legal.lowest) % legal.step == 0)
    return numbers[0];
  std::string given;
  for (const int64_t number : numbers) given += (given.empty() ? "" : ", ") + std::to_string(number);
  throw std::invalid_argument("[" + given + "] is not one number from " + std::to_string(legal.lowest) + " to " +
                              std::to_string(legal.highest) +
                              (legal.step == 1 ? "" : " in steps of " + std::to_string(legal.step)));
}

std::vector<Tunable> tunables(std::string_view device_type) {
  const Family own = family_of(backend_named(device_type)), chosen_one = chosen;
  const Family family = chosen_one == kOwn ? own : chosen_one;
  std::vector<Tunable> all;
  for (const AnyTable* table : tables())
    for (Tunable& tunable : table->tunables(family))
      if ((tunable.legal.only_on.empty() || tunable.legal.only_on == device_type) &&
          !lacks(device_type, tunable.legal.calls))
        all.push_back(std::move(tunable));
  return all;
}

bool lacks(std::string_view device_type, std::string_view op) {
  const std::lock_guard<std::mutex> lock(lacking().mutex);
  const std::vector<std::string>& operators = lacking().of[std::string(device_type)];
  return std::find(operators.begin(), operators.end(), op) != operators.end();
}

void set_lacking(std::string_view device_type, std::vector<std::string> operators) {
  const std::lock_guard<std::mutex> lock(lacking().mutex);
  lacking().of[std::string(device_type)] = std::move(operators);
}

void use_measured(std::string_view device_type, std::string_view family, const std::vector<Measured>& values) {
  Backend& backend = backend_named(device_type);
  std::vector<std::function<void()>> publish;
  for (const AnyTable* table : tables()) publish.push_back(table->prepare(known_family(family), values, device_type));
  for (const Measured& value : values)
    if (std::none_of(tables().begin(), tables().end(), [&](const AnyTable* t) { return t->name() == value.table; }))
      throw std::invalid_argument(value.table + "." + value.field + ": there is no such table");
  for (const std::function<void()>& row : publish) row();
  static std::vector<std::unique_ptr<const MeasuredFor>> published;  // readers may still hold an older one
  published.push_back(std::make_unique<const MeasuredFor>(MeasuredFor{&backend, std::string(family)}));
  measured_for = values.empty() ? nullptr : published.back().get();
  backend.asked_for_measured = true;  // a file that is found later does not take their place
  ++version;
}

std::string gpu_family(std::string_view device_type) { return std::string(backend_named(device_type).family()); }

void set_measured_loader(std::function<void(std::string_view)> loader) { measured_loader = std::move(loader); }

}  // namespace metalcore::gpu
