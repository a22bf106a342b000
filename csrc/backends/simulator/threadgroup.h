// Runs one threadgroup at a time on one OS thread: its threads are fibers that switch to each other at barriers and
// SIMD operations. A Threadgroup is a worker's scratch: it runs one group after the other and keeps its fibers, stacks
// and threadgroup memory.
//
// Rules of scheduling (scheduler.cpp). A lane that waits hands over to a runnable lane of its simdgroup. When none is
// left, the lanes that wait in SIMD operations at the smallest line go on together, so that lanes of a divergent
// simdgroup meet again where their paths join. When all live lanes are at the threadgroup barrier or gone, the next
// simdgroup runs. When all live threads are at the barrier, it opens.
#pragma once

#include "context.h"
#include "host/kernel_abi.h"
#include "library.h"
#include "trap.h"

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <random>
#include <vector>

namespace metalcore::simulator {

class Threadgroup;
struct Simdgroup;

constexpr uint32_t kMaximumThreads = 1024;
constexpr uint32_t kMaximumThreadgroupMemory = 32 * 1024;
constexpr uint32_t kThreadgroupArguments = 64;  // sites from here on are [[threadgroup(i)]] arguments
constexpr uint32_t kSites = kThreadgroupArguments + 31;

struct Lane {
  Context context;
  Simdgroup* simdgroup = nullptr;  // null where threads run as a plain loop
  Threadgroup* group = nullptr;
  uint32_t barrier_line = 0;  // the line of the threadgroup barrier it waits at, or of the last one
  Stacks::Stack stack = {};
  msl_abi::Thread thread = {};
};

struct Simdgroup {
  // The size class of a value is 0 (up to 4 bytes) to 5 (up to 128 bytes); a SIMD operation may have no value.
  static constexpr uint32_t kNoValue = 6;
  static constexpr uint32_t kNobody = 128;  // bytes of zeros after the values of each class: those of no lane
  static constexpr uint32_t kSlots = (4 + 8 + 16 + 32 + 64 + 128) * msl_abi::kSimdWidth + kNoValue * kNobody;

  Lane* lanes = nullptr;
  uint32_t index = 0;
  // Masks of lanes. Live lanes that are neither runnable nor at the barrier wait in a SIMD operation.
  uint32_t live = 0, runnable = 0, at_barrier = 0;
  // The last SIMD operation: the lanes that took part, and where their values are.
  uint32_t active = 0;
  const unsigned char* values = nullptr;
  uint32_t stride = 0;
  // There are two buffers of values, so that a fast lane's next value does not replace one that others still read.
  uint32_t parity = 0;                      // the buffer in use now
  uint32_t published = 0;                   // per lane, the buffer its value is in
  uint32_t keys[msl_abi::kSimdWidth] = {};  // where each lane waits: line, then size class
  alignas(64) unsigned char slots[2][kSlots] = {};
};

// Checking mode is told of synchronizations by this.
class Observer {
 public:
  virtual ~Observer() = default;
  // All live threads are at a barrier; some may have left the kernel.
  virtual void barrier_opens(Threadgroup& group) = 0;
  virtual void simdgroup_meets(Simdgroup& simdgroup, uint32_t lanes) = 0;
};

class Threadgroup {
 public:
  Threadgroup();
  ~Threadgroup();

  // Begins a dispatch: threadgroup variables get new addresses.
  void begin(const KernelReference& kernel, const msl_abi::Dispatch& dispatch);
  // Runs the threadgroups with indices [begin, end), x fastest, to their end. Throws the error that stopped them.
  void run(uint64_t begin, uint64_t end, bool fibers);

  // Services of the runtime, for the lane that runs now.
  static Lane* current() { return running_; }
  static void barrier(uint32_t line);
  static void simdgroup_barrier(uint32_t line);
  static msl_abi::Exchange exchange(const void* value, uint32_t size, uint32_t width, uint32_t line);
  static void yield();
  static msl_abi::Space space(const void* address);
  void* memory(uint32_t site, uint32_t bytes, uint32_t alignment);
  // Leaves the group for good: run() throws `reason`. It is called on a fiber and does not return.
  [[noreturn]] void abandon(std::exception_ptr reason);
  // Does the same in a signal handler, for the fiber that the signal interrupted, as the handler returns. Returns false
  // where the calling thread runs no kernel.
  static bool abandon(Trap trap, const char* address, ucontext_t& interrupted);
  // Leaves the running fiber until look() has told whether it goes on; `pc` is where it is. Returns at once where `pc`
  // is in the executor, not in the kernel. Signal handlers on the fiber's own stack may call it.
  static void pause(const char* pc);

  struct Site {
    char* address = nullptr;
    uint32_t bytes = 0;
  };
  const Site& site(uint32_t index) const { return sites_[index]; }
  char* arena() const { return arena_; }
  uint32_t memory_used() const { return memory_used_; }
  std::vector<Simdgroup>& simdgroups() { return simdgroups_; }
  uint32_t simdgroup_count() const { return simdgroup_count_; }
  Lane& lane(uint32_t index) { return lanes_[index]; }
  uint32_t size() const { return size_; }

  // Checking mode: `observer` is told of synchronizations, and the threads run in an order drawn from `random`.
  Observer* observer = nullptr;
  std::mt19937* random = nullptr;
  // Bytes between two threadgroup variables.
  uint32_t memory_gap = 0;

 private:
  void set_position(uint64_t index);
  void prepare_rows(uint64_t begin, uint64_t end);
  void prepare_lanes();
  void enter(Lane* lane);
  // Lets fibers run, `lane` first, until all threads have ended or the fibers are paused.
  void go_on(Lane* lane);
  void decide(const Trap& trap);
  static void rows(void* lane);
  void run_rows();
  static void fiber(void* lane);
  static void wait(Lane* lane);
  static void switch_to(Lane* from, Lane* to);
  void leave(Lane* lane);
  Lane* next(Simdgroup* simdgroup, Lane* preferred);
  Lane* pick(Simdgroup* simdgroup, Lane* preferred);
  bool release(Simdgroup* simdgroup);
  static void clear_idle(Simdgroup& simdgroup, uint32_t idle, uint32_t size_class);
  bool open_barrier();
  uint32_t pick_bit(uint32_t mask);

  // initial-exec makes this one load, where each barrier and SIMD operation would call the loader.
  __attribute__((tls_model("initial-exec"))) static inline constinit thread_local Lane* running_ = nullptr;

  KernelReference kernel_ = {};
  const msl_abi::Dispatch* dispatch_ = nullptr;
  msl_abi::Thread first_ = {};  // thread 0 of the group
  uint32_t size_ = 0;
  msl_abi::Uint3 shape_ = {};  // the shape that the lanes' numbers were made for

  std::unique_ptr<Lane[]> lanes_;
  std::vector<Simdgroup> simdgroups_;
  uint32_t simdgroup_count_ = 0;
  uint32_t ready_ = 0;     // simdgroups that can go on before the barrier opens
  uint32_t prepared_ = 0;  // lanes whose fiber waits for a thread to run
  Lane main_;              // the worker itself
  Lane plain_;             // runs the threads of a kernel without barriers one after the other
  bool plain_prepared_ = false;
  uint64_t next_ = 0, end_ = 0;  // the threadgroups that plain_ still has to run
  std::exception_ptr failure_;
  Trap trap_;
  Lane* paused_ = nullptr;
  Stacks stacks_;

  char* arena_ = nullptr;
  uint32_t memory_used_ = 0, memory_end_ = 0;
  Site sites_[kSites];
};

inline void Threadgroup::switch_to(Lane* from, Lane* to) {
  running_ = to;
  Context::change(from->context, to->context);
}

}  // namespace metalcore::simulator
