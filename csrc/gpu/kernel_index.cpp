#include "kernel_index.h"

#include <fstream>
#include <functional>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <sstream>
#include <stdexcept>

namespace metalcore::gpu {

KernelIndex::KernelIndex(const std::filesystem::path& library) : path_((library / "index").string()) {
  std::ifstream file(path_);
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string family;
    words >> family;
    for (std::string kernel; words >> kernel;) families_.emplace(kernel, family);
  }
  if (families_.empty()) throw std::runtime_error("metalcore: cannot read " + path_);
}

const std::string& KernelIndex::family(std::string_view kernel) const {
  const auto found = families_.find(kernel);
  if (found == families_.end())
    throw std::runtime_error("metalcore: there is no built-in kernel named '" + std::string(kernel) + "' in " + path_);
  return found->second;
}

namespace {

// It is never destroyed: kernels may still be dispatched while the process ends. References to its values stay valid.
struct Sources {
  std::shared_mutex mutex;
  std::map<std::string, std::string, std::less<>> by_kernel;
};

Sources& sources() {
  static auto* made = new Sources;
  return *made;
}

}  // namespace

void add_generated(std::string_view kernel, std::string_view source) {
  const std::unique_lock lock(sources().mutex);
  sources().by_kernel.emplace(kernel, source);
}

const std::string* generated_source(std::string_view kernel) {
  const std::shared_lock lock(sources().mutex);
  const auto found = sources().by_kernel.find(kernel);
  return found == sources().by_kernel.end() ? nullptr : &found->second;
}

}  // namespace metalcore::gpu
