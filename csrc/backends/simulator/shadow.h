// The memory of the race detector: who touched each byte last. Shadow only stores this; the checker has the rules.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace metalcore::simulator {

// One access. Time 0 means that there was none.
struct Stamp {
  uint32_t thread;  // numbered over the dispatch in the order threadgroups run
  uint32_t pc;      // offset in the library
  uint64_t time : 56;
  uint64_t atomic : 1;
  uint64_t changed : 1;  // a write that left other bytes than it found
  uint64_t many : 1;     // further threads wrote the same value without order

  explicit operator bool() const { return time != 0; }
};

// The history of a few bytes. It is enough to find a race with any later access:
// - the last write, and the last by another thread that is not ordered before it (atomics; writes of equal values);
// - the last read of an earlier threadgroup, and reads by two threads of the current one, from different simdgroups
//   where possible: the thread that writes next is at most one of the two.
struct Cell {
  Stamp write, other_write;
  Stamp earlier_read, read, other_read;
};

class Shadow {
 public:
  Shadow(const char* base, size_t size) : base_(base), pages_((size + kPage - 1) / kPage) {}

  // Calls use(cell, address, bytes) for each cell of [address, address + size), which must lie in this memory.
  template <typename Use>
  void visit(const char* address, size_t size, Use use) {
    size_t at = static_cast<size_t>(address - base_);
    for (const size_t end = at + size; at < end;) {
      Page& page = pages_[at / kPage];
      const size_t stop = end < (at / kPage + 1) * kPage ? end : (at / kPage + 1) * kPage;
      page.refine(at | stop);
      const size_t bytes = size_t{1} << page.shift;
      for (; at < stop; at += bytes) use(page.cells[at % kPage >> page.shift], base_ + at, bytes);
    }
  }

  void clear() {
    for (Page& page : pages_) page = {};
  }

 private:
  static constexpr size_t kPage = 1024;

  // A cell for each 4 bytes, until an access of less splits them.
  struct Page {
    uint32_t shift = 2;
    std::unique_ptr<Cell[]> cells;

    void refine(size_t bounds) {
      if (!cells) cells = std::make_unique<Cell[]>(kPage >> shift);
      const uint32_t wanted = bounds & 1 ? 0 : bounds & 2 ? 1 : 2;
      if (wanted >= shift) return;
      auto finer = std::make_unique<Cell[]>(kPage >> wanted);
      for (size_t i = 0; i < kPage >> wanted; ++i) finer[i] = cells[i << wanted >> shift];
      cells = std::move(finer);
      shift = wanted;
    }
  };

  const char* base_;
  std::vector<Page> pages_;
};

}  // namespace metalcore::simulator
