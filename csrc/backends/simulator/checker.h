// Checking mode runs one dispatch on the calling thread. Its library calls the checker before each load and store.
#pragma once

#include "fault.h"
#include "memory_map.h"
#include "order.h"
#include "threadgroup.h"

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

namespace metalcore::simulator {

// The bytes that a read without a meaning in Metal finds: a read of threadgroup memory that no thread has written, or
// of a lane that takes no part in a SIMD operation. They are zeros, or another value at one place of the program or at
// all places.
struct Garbage {
  static constexpr uint32_t kAnywhere = ~0u;
  // Repeated, they make a large positive and a large negative finite number of each type.
  static constexpr unsigned char kValues[] = {0x7b, 0xfb};
  unsigned char value = 0;
  uint32_t pc = kAnywhere;
};

class Checker final : public Observer {
 public:
  // The first read of garbage at a place of the program.
  struct GarbageRead {
    uint32_t pc;
    msl_abi::Thread thread;
    const char* kind;
    std::string what;
  };

  // The kernel counts as endless after `limit` accesses.
  Checker(const Launch& launch, Threadgroup& group, uint32_t seed, const Garbage& garbage, uint64_t limit);
  ~Checker() override;
  // The checker of the dispatch that this thread runs; nullptr where it runs none.
  static Checker* active() { return active_; }
  void run();
  void finish() { map_.finish(); }  // afterwards the arguments are as they were before the run
  void copy_back() const { map_.copy_back(); }

  uint64_t accesses() const { return accesses_; }
  const std::vector<GarbageRead>& garbage_reads() const { return garbage_reads_; }
  Fault fault(const GarbageRead& read) const;
  // Whether this run and another one of the dispatch left the same bytes in the memory that the kernel may write.
  bool wrote_the_same(const Checker& other) const;

  // The running kernel calls these; `caller` is the address that the call returns to.
  void access(const char* address, uint32_t size, uint32_t kind, const void* caller);
  void found(const msl_abi::Finding& finding, const void* caller);
  void* threadgroup_memory(uint32_t site, uint32_t bytes, uint32_t alignment, const void* caller);
  // Called before a barrier: the last access has happened by then.
  void synchronize(uint32_t flags, const void* caller);

  void barrier_opens(Threadgroup& group) override;
  void simdgroup_meets(Simdgroup& simdgroup, uint32_t lanes) override;

 private:
  // A write is judged when it has happened, at the next event: a write that leaves the bytes as they were is no race.
  struct Pending {
    char* address = nullptr;
    uint32_t size = 0;
    Shadow* shadow = nullptr;
    Space space = kDevice;
    Stamp stamp = {};
    std::vector<char> before;
    bool has_read = false;  // a read came between the announcement and now
  };

  struct Access {
    const Stamp& stamp;
    bool writes;
  };

  bool allowed_in_buffer(const Block& block, const char* address, uint32_t size, bool write) const;
  bool is_host_constant(const char* address, uint32_t size) const;
  bool is_shared(const char* address, uint32_t size) const;
  void shared_access(char* address, uint32_t size, uint32_t kind, const void* caller);
  void lane_access(char* address, uint32_t size, uint32_t pc);
  bool is_garbage_known(uint32_t pc) const;
  unsigned char garbage_at(uint32_t pc) const;
  void read_garbage(char* address, uint32_t pc);
  void record(char* address, uint32_t size, uint32_t kind, Shadow& shadow, Space space, const void* caller);
  void check_read(Cell& cell, const Stamp& stamp, const char* address, Space space);
  void check_write(Cell& cell, const Stamp& stamp, const char* address, Space space);
  bool copies(const Lane& lane, uint32_t kind);
  void compare_operations(uint32_t begin, uint32_t count, int64_t met);
  void settle();

  [[noreturn]] void out_of_bounds(const char* address, uint32_t size, bool write, const void* caller);
  [[noreturn]] void misaligned(const char* address, uint32_t size, bool write, const void* caller);
  [[noreturn]] void race(Access first, Access second, const char* address);
  [[noreturn]] void fail(const char* kind, uint32_t pc, const msl_abi::Thread& thread, const std::string& what,
                         uint32_t line = 0);
  Fault fault(const char* kind, uint32_t pc, const msl_abi::Thread& thread, const std::string& what,
              uint32_t line) const;
  msl_abi::Thread thread_of(uint32_t number) const;
  std::string describe_place(const char* address) const;
  uint32_t pc_of(const void* caller) const;

  static inline constinit thread_local Checker* active_ = nullptr;
  const Launch& launch_;
  const Garbage garbage_;
  const bool allow_misaligned_ = checking().misaligned;
  const uint64_t limit_;
  uint64_t accesses_ = 0;
  std::vector<GarbageRead> garbage_reads_;
  MemoryMap map_;
  Grid grid_;
  const Segments& segments_;
  Threadgroup& group_;
  std::mt19937 random_;
  Order order_;
  uint64_t group_index_ = 0;
  std::unordered_map<const Block*, std::unique_ptr<Shadow>> device_shadow_;
  Shadow shared_shadow_;
  std::vector<bool> written_;  // per byte of threadgroup memory
  const Block* last_block_ = nullptr;
  Shadow* last_shadow_ = nullptr;
  Pending pending_;
  bool is_pending_ = false;
  struct Arrival {
    uint32_t flags = 0, pc = 0;
  };
  std::vector<Arrival> arrivals_;  // per thread of the group, the barrier it is at
  // An operation on tensors that a thread of the group has come to; none has 0 simdgroups.
  struct Operation {
    int64_t simdgroups = 0;
    uint64_t digest = 0;
    uint32_t pc = 0;
  };
  std::vector<Operation> operations_;  // per thread
  Checker* const outer_;  // the checker that a signal handler interrupted to begin this one; may be nullptr
};

}  // namespace metalcore::simulator
