// The errors that end a dispatch. A Fault ends it where checking mode finds something that Metal does not define, where
// the CPU stops the kernel (in any mode), where the kernel lasts too long, and where it is interrupted.
#pragma once

#include "host/kernel_abi.h"

#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <utility>

namespace metalcore::simulator {

class Fault : public std::runtime_error {
 public:
  // what() begins with this, so that a fault can be told from other errors where only its text arrives.
  static constexpr const char* kPrefix = "metalcore.simulator.KernelError: ";

  Fault(std::string kind, std::string kernel, std::string file, uint32_t line, const msl_abi::Thread& thread,
        const std::string& message)
      : std::runtime_error(kPrefix + message),
        kind(std::move(kind)),
        kernel(std::move(kernel)),
        file(std::move(file)),
        line(line),
        thread(thread) {}

  std::string message() const { return what() + std::char_traits<char>::length(kPrefix); }

  std::string kind;  // "out-of-bounds read", "race" …
  std::string kernel;
  std::string file;  // the name that the kernel's source gives itself; empty where unknown
  uint32_t line;     // 0 where unknown
  msl_abi::Thread thread;
};

// Thrown where a Python signal handler raised an exception while a kernel ran.
class Interrupted : public std::runtime_error {
 public:
  Interrupted(const std::string& message, std::function<void()> restore)
      : std::runtime_error(message), restore(std::move(restore)) {}

  std::function<void()> restore;  // sets Python's error indicator; with the GIL
};

// ---------------------------------------------------------------- wording that the messages share

inline std::string text(msl_abi::Uint3 p) {
  return "(" + std::to_string(p.x) + ", " + std::to_string(p.y) + ", " + std::to_string(p.z) + ")";
}

inline std::string plural(uint64_t count, const std::string& noun) {
  return std::to_string(count) + " " + noun + (count == 1 ? "" : "s");
}

}  // namespace metalcore::simulator
