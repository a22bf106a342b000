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
#pragma once

#include "shadow.h"
#include "threadgroup.h"

#include <array>
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace metalcore::simulator {

// The indices of mem_flags::mem_device and mem_threadgroup, and of what every meeting of threads orders.
enum Space : uint32_t { kDevice = 0, kShared = 1, kExecution = 2, kSpaces = 3 };

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
