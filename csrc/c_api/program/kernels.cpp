#include "kernels.h"

#include "generated.h"

#include "../../gpu/kernel_index.h"
#include "../kernels_folder.h"

#include <filesystem>
#include <fstream>
#include <map>
#include <stdexcept>

namespace metalcore::c_api {
namespace {

namespace fs = std::filesystem;

const gpu::KernelIndex& index() {
  static const gpu::KernelIndex read(kernels_folder());
  return read;
}

// By family: lib/digests.
const std::map<std::string, std::string>& digests() {
  static const auto read = [] {
    std::map<std::string, std::string> found;
    std::ifstream file(fs::path(kernels_folder()) / "digests");
    for (std::string family, digest; file >> family >> digest;) found.emplace(family, digest);
    return found;
  }();
  return read;
}

bool is_builtin(const std::string& kernel) { return index().families().count(kernel) > 0; }

}  // namespace

Kernels::Kernels(const Json& builtin, const Json& generated, std::string_view device_type)
    : builtin_(builtin.object()), generated_(generated.object()) {
  for (size_t i = 0; i < builtin.keys.size(); ++i) {
    const std::string& kernel = builtin.keys[i];
    if (!is_builtin(kernel)) throw std::runtime_error("this metalcore has no kernel '" + kernel + "'");
    const auto known = digests().find(index().family(kernel));
    if (known == digests().end() || known->second != builtin.items[i].string())
      throw std::runtime_error("kernel '" + kernel + "' is another one in this metalcore: save the program with it");
  }
  for (size_t i = 0; i < generated.keys.size(); ++i) {
    if (is_builtin(generated.keys[i]))
      throw std::runtime_error("a generated kernel has the name of '" + generated.keys[i] + "'");
    add_generated(generated.keys[i], generated.items[i], device_type);
  }
}

void Kernels::require(const std::string& kernel) const {
  if (!builtin_.find(kernel) && !generated_.find(kernel))
    throw std::runtime_error("the file does not say which kernel '" + kernel.substr(0, 80) + "' is");
}

}  // namespace metalcore::c_api
