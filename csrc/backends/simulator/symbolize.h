// Finds the line of the user's source for an address in a library.
#pragma once

#include <cstdint>
#include <string>

namespace metalcore::simulator {

struct SourceLine {
  std::string file;  // empty where unknown
  uint32_t line = 0;
};

// Returns the line of the innermost frame that is not in metalcore's own headers. `offset` is relative to the library's
// load address. Answers are remembered. Needs addr2line or llvm-symbolizer; without them no line is known.
SourceLine find_line(const std::string& library, uintptr_t offset);

}  // namespace metalcore::simulator
