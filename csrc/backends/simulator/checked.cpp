// Runs a dispatch in checking mode: the runtime that checking libraries are bound to, and the one or more runs of a
// dispatch.
#include "checker.h"
#include "process_wide.h"
#include "library.h"
#include "scratch.h"
#include "trap.h"
#include "watch.h"

#include <chrono>
#include <mutex>
#include <optional>

namespace metalcore::simulator {
namespace {

const msl_abi::Runtime runtime = {
    .version = msl_abi::kVersion,
    .self = normal_runtime()->self,
    .threadgroup_barrier =
        [](uint32_t flags, uint32_t line) {
          Checker::active()->synchronize(flags, __builtin_return_address(0));
          Threadgroup::barrier(line);
        },
    .simdgroup_barrier =
        [](uint32_t flags, uint32_t line) {
          Checker::active()->synchronize(flags, __builtin_return_address(0));
          Threadgroup::simdgroup_barrier(line);
        },
    .simd_exchange =
        [](const void* value, uint32_t size, uint32_t width, uint32_t line) {
          Checker::active()->synchronize(0, __builtin_return_address(0));
          return Threadgroup::exchange(value, size, width, line);
        },
    .threadgroup_memory =
        [](uint32_t site, uint32_t bytes, uint32_t alignment) {
          return Checker::active()->threadgroup_memory(site, bytes, alignment, __builtin_return_address(0));
        },
    .yield = &Threadgroup::yield,
    .space = &Threadgroup::space,
    .access =
        [](const void* address, uint32_t size, uint32_t kind, const void* caller) {
          // A library's own initialization and its host functions run outside of a dispatch.
          if (Checker* checker = Checker::active())
            checker->access(static_cast<const char*>(address), size, kind, caller);
        },
    .finding =
        [](const msl_abi::Finding* finding, const void* caller) {
          if (Checker* checker = Checker::active()) checker->found(*finding, caller);
        },
};

}  // namespace

const msl_abi::Runtime* checking_runtime() { return &runtime; }

namespace {

// Checked dispatches run one at a time, except that a signal handler may begin one in the middle of another.
struct Checked {
  std::recursive_timed_mutex mutex;
};

std::unique_lock<std::recursive_timed_mutex> take_turn(const Launch& launch, Watch& watch) {
  std::unique_lock lock(process_wide<Checked>().mutex, std::defer_lock);
  Trap interrupt;
  interrupt.kind = Trap::kInterrupt;
  while (!lock.try_lock_for(std::chrono::milliseconds(20)))
    if (wanted() && look() == Verdict::kInterrupted) throw fault_of(interrupt, launch.kernel);
  watch.restart();
  return lock;
}

// One run of the dispatch, and its end.
struct Run {
  Run(const Launch& launch, Threadgroup& group, const Garbage& garbage, uint64_t limit)
      : checker(launch, group, checking().seed, garbage, limit) {
    try {
      checker.run();
    } catch (const Fault& thrown) {
      if (is_impatience(thrown)) throw;
      fault = thrown;
    }
    checker.finish();
  }

  bool ended_as(const Run& other) const {
    if (fault || other.fault) return fault && other.fault && fault->message() == other.fault->message();
    return checker.wrote_the_same(other.checker);
  }

  Checker checker;
  std::optional<Fault> fault;
};

}  // namespace

// Some correct kernels read threadgroup memory that no thread has written, or lanes that are not active, and do not use
// what they read (lanes that a shorter reduction leaves out, for example). So such a read is a fault only where the
// outcome depends on it.
void execute_checked(const Launch& launch, Watch& watch) {
  const auto turn = take_turn(launch, watch);
  const Scratch scratch;
  Threadgroup& group = *scratch;
  catch_traps();
  const Run run(launch, group, {}, ~uint64_t{0});
  const auto depends_on = [&](uint32_t pc) {
    for (const unsigned char value : Garbage::kValues)
      if (!Run(launch, group, {value, pc}, 4 * run.checker.accesses() + 100000).ended_as(run)) return true;
    return false;
  };
  const auto& suspects = run.checker.garbage_reads();
  if (!suspects.empty() && depends_on(Garbage::kAnywhere)) {
    for (const auto& read : suspects)
      if (depends_on(read.pc)) throw run.checker.fault(read);
    throw run.checker.fault(suspects.front());
  }
  if (run.fault) throw *run.fault;
  run.checker.copy_back();
}

}  // namespace metalcore::simulator
