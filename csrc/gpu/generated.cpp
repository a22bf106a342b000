#include "generated.h"

#include <functional>
#include <map>
#include <mutex>
#include <shared_mutex>

namespace metalcore::gpu {
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
