// The history of a checked dispatch: who touched each byte last, and which events are ordered before which.
#pragma once

#include "threadgroup.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <unordered_map>
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

// The memory of the race detector: who touched each byte last. Shadow only stores this; the checker has the rules.
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

// The indices of mem_flags::mem_device and mem_threadgroup, and of what every meeting of threads orders.
enum Space : uint32_t { kDevice = 0, kShared = 1, kExecution = 2, kSpaces = 3 };

// The order of events in a checked dispatch. Threadgroups run one after the other, and each thread runs until it waits.
// Every event has a time. An access is ordered before the running thread's next one if
// - the same thread made it, or
// - a threadgroup_barrier whose flags cover that memory has opened since, or
// - a simdgroup_barrier with such flags, in which both took part, directly or through others, or
// - it is a read of threadgroup memory, and its thread and the running one have met in any barrier or SIMD operation
//   since. (Flags say which writes others see; a thread that has met others has finished its reads, and kernels in use
//   rely on that with mem_none. Reads of device memory take longer, so a barrier must cover them like writes.) Or
// - it was followed by an atomic operation of its thread (or of one it is ordered before), and the running thread, or
//   one ordered before it, has since used the same atomic. Atomics are taken as acquiring and releasing: Metal's are
//   relaxed, and kernels pair them with barriers.
class Order {
 public:
  explicit Order(uint32_t threads_per_group) : capacity_(threads_per_group), known_(kMaximumThreads / 32) {}

  void begin_group();
  uint64_t now() { return ++time_; }
  uint32_t thread(const Lane& lane) const { return first_ + lane.thread.index_in_threadgroup; }
  uint32_t group_of(uint32_t thread) const { return thread / capacity_; }
  uint32_t index_in_group(uint32_t thread) const { return thread % capacity_; }

  bool same_group(const Stamp& a, const Stamp& b) const { return group_of(a.thread) == group_of(b.thread); }
  bool same_simdgroup(const Stamp& a, const Stamp& b) const {
    return same_group(a, b) && index_in_group(a.thread) / 32 == index_in_group(b.thread) / 32;
  }

  // Whether `past` is ordered before what `thread` does now. For a read of threadgroup memory, `space` is kExecution.
  bool before(const Stamp& past, uint32_t thread, Space space) const;

  void barrier(uint32_t flags);
  void simdgroup_barrier(uint32_t simdgroup, uint32_t lanes, uint32_t flags);
  // A load acquires, a store releases, a read-modify-write does both.
  void atomic(const void* address, uint32_t thread, uint32_t kind);

 private:
  struct Known {
    uint64_t until[32][32];  // [lane][other]: events of `other` before this time are ordered before those of `lane`
  };
  struct Atomic {
    std::unordered_map<uint32_t, uint64_t> released;  // by thread: its events before this time
    // By group: the events of its threads before this time.
    std::unordered_map<uint32_t, std::array<uint64_t, kSpaces>> barrier;
    std::unordered_map<uint32_t, uint64_t> acquired;  // by thread
    std::array<uint64_t, 2> group = {};               // the current group's number and when a barrier passed it on
    bool recent = false;                              // it is in recent_
  };
  bool before_by_atomics(const Stamp& past, uint32_t thread, Space space) const;

  uint32_t capacity_;
  uint32_t group_ = 0, first_ = 0;
  bool started_ = false;
  uint64_t time_ = 0;
  std::array<uint64_t, kSpaces> barrier_ = {};
  std::vector<std::array<std::unique_ptr<Known>, kSpaces>> known_;
  std::unordered_map<const void*, Atomic> atomics_;
  std::vector<Atomic*> recent_;  // used by this group since its last barrier
};

}  // namespace metalcore::simulator
