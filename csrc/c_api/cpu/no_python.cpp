// Takes the place of csrc/backends/simulator/interpreter.cpp: a C program has no signal handlers of
// Python's, and nothing compiles kernels in it. Generated kernels of programs lie in METALCORE_GENERATED_DIR, where
// `python -m metalcore program prepare` has put what it compiled.
#include "../../backends/simulator/interpreter.h"

#include <cstdlib>
#include <filesystem>
#include <stdexcept>

namespace metalcore::simulator {

void run_python_handlers() {}
void listen_to_interrupts(bool) {}
uint32_t interrupts() { return 0; }
bool interrupts_raise() { return false; }

std::string compile_counting(std::string_view, const std::string&) {
  throw std::logic_error("metalcore: libmetalcore does not count");
}

std::string compile_kernel(std::string_view kernel, const std::string& family, bool checking, bool) {
  const std::string name(kernel);
  if (!family.empty()) throw std::runtime_error("metalcore: the build has left out the kernels of " + family);
  const bool is_name =
      name.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_") == name.npos;
  if (const char* folder = std::getenv("METALCORE_GENERATED_DIR"); folder && *folder && is_name) {
    const auto path = std::filesystem::path(folder) / (checking ? "checking" : "normal") / (name + ".so");
    std::error_code error;
    if (std::filesystem::exists(path, error)) return path.string();
  }
  throw std::invalid_argument("metalcore: kernel '" + name.substr(0, 80) +
                              "' was generated, and the CPU runs what `python -m metalcore program prepare` compiled: "
                              "METALCORE_GENERATED_DIR must be the folder that it filled");
}

}  // namespace metalcore::simulator
