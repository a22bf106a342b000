// The places of an opened library in memory: its code, and the constants that instrumented code reads.
#pragma once

#include <cstddef>
#include <vector>

namespace metalcore::simulator {

class Segments {
 public:
  explicit Segments(const void* symbol_of_library);
  bool contain(const char* address, size_t size) const;
  bool is_code(const char* address) const;  // signal handlers may call it
  const char* base() const { return base_; }

 private:
  struct Range {
    const char *begin, *end;
    bool code;
  };
  const char* base_ = nullptr;
  std::vector<Range> ranges_;
};

}  // namespace metalcore::simulator
