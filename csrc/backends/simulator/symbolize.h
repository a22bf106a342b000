// From an address in a library to the line of the user's source.
#pragma once

#include <cstdint>
#include <string>

namespace metalcore::simulator {

struct SourceLine {
  std::string file;  // empty where unknown
  uint32_t line = 0;
};

// `offset` is relative to the library's load address. The innermost frame that is not in metalcore's own headers.
// Remembers its answers. Needs addr2line or llvm-symbolizer; without them nothing is known.
SourceLine find_line(const std::string& library, uintptr_t offset);

}  // namespace metalcore::simulator
