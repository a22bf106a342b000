#include "kernels_folder.h"

#include "error.h"

#include <dlfcn.h>

#include <cstdlib>
#include <filesystem>

namespace metalcore::c_api {
namespace {

namespace fs = std::filesystem;

std::string folder() {
  if (const char* chosen = std::getenv("METALCORE_LIBRARY_DIR"); chosen && *chosen) return chosen;
  Dl_info info;
  if (!dladdr(reinterpret_cast<const void*>(&kernels_folder), &info) || !info.dli_fname) return "";
  char* const real = realpath(info.dli_fname, nullptr);  // links may lead to it
  const fs::path library = real ? real : info.dli_fname;
  std::free(real);
  return library.parent_path().string();
}

}  // namespace

const std::string& kernels_folder() {
  static const std::string found = folder();
  return found;
}

void require_kernels() {
  static const bool found = [] {
    std::error_code error;
    if (!fs::exists(fs::path(kernels_folder()) / "index", error))
      throw Error(METALCORE_NO_KERNELS, "there are no kernels in '" + kernels_folder() +
                                            "'; METALCORE_LIBRARY_DIR can name the folder metalcore/lib");
    return true;
  }();
  static_cast<void>(found);
}

}  // namespace metalcore::c_api
