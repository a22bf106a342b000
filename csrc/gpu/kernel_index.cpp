#include "kernel_index.h"

#include <fstream>
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

}  // namespace metalcore::gpu
