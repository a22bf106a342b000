// Counts what dispatches allocate once their like has run. Threads that did not run a threadgroup the first time run
// one now, since the kernel waits until as many threads as possible are in it. Linked with count_allocations.c and the
// library's objects. Prints the allocations of each case.
#include "launch.h"
#include "library.h"
#include "pool.h"
#include "threadgroup.h"

#include "host/kernel_abi.h"

#include <sched.h>

#include <atomic>
#include <barrier>
#include <cstdint>
#include <cstdio>
#include <mutex>
#include <thread>
#include <vector>

extern "C" size_t allocations_so_far(void);

namespace {

namespace simulator = metalcore::simulator;

std::atomic<uint32_t> running{0}, expected{0};
std::atomic<bool> held{false};

// Ends when `expected` threadgroups have begun.
void meet(const msl_abi::Dispatch*, const msl_abi::Thread* thread) {
  if (thread->index_in_threadgroup) return;
  ++running;
  while (running < expected) sched_yield();
}

void hold(const msl_abi::Dispatch*, const msl_abi::Thread* thread) {
  if (thread->index_in_threadgroup) return;
  ++running;
  while (held) sched_yield();
}

constexpr msl_abi::Kernel kKernels[] = {
    {"meet", msl_abi::kSynchronizes, 0, nullptr, 0, meet, nullptr},
    {"hold", msl_abi::kSynchronizes, 0, nullptr, 0, hold, nullptr},
};
constexpr msl_abi::Library kAbi = {msl_abi::kVersion, 2, kKernels, [](const msl_abi::Runtime*) {}, 0, nullptr, nullptr};

void run(const msl_abi::Kernel& kernel, uint32_t groups, uint32_t group_size) {
  static const simulator::Library library = {"", "", &kAbi, 0, simulator::Segments(&kAbi)};
  simulator::Launch launch;
  launch.kernel = {&library, &kernel};
  launch.threads = {groups * group_size, 1, 1};
  launch.group = {group_size, 1, 1};
  simulator::execute(launch);
}

// The threadgroups do not wait, and are so small that the caller most often has run them all before a worker comes.
void run_briefly(uint32_t groups) {
  expected = 0;
  run(kKernels[0], groups, 1);
}

// Each threadgroup has a thread of the host to itself, and as many threads as a threadgroup can have.
void run_together(uint32_t groups) {
  running = 0;
  expected = groups;
  run(kKernels[0], groups, simulator::kMaximumThreads);
}

size_t with_workers() {
  constexpr uint32_t kThreads = 6;
  simulator::set_num_threads(kThreads);
  run_briefly(kThreads);
  const size_t before = allocations_so_far();
  run_together(kThreads);
  return allocations_so_far() - before;
}

// Threads of the program dispatch one after the other, then all at once.
size_t with_threads() {
  constexpr uint32_t kThreads = 8;
  simulator::set_num_threads(1);
  std::mutex turn;
  std::barrier step(kThreads + 1);
  std::vector<std::thread> threads;
  for (uint32_t i = 0; i < kThreads; ++i)
    threads.emplace_back([&] {
      {
        std::lock_guard lock(turn);
        run_briefly(1);
      }
      step.arrive_and_wait();
      step.arrive_and_wait();
      run(kKernels[0], 1, simulator::kMaximumThreads);
      step.arrive_and_wait();
    });
  step.arrive_and_wait();
  running = 0;
  expected = kThreads;
  const size_t before = allocations_so_far();
  step.arrive_and_wait();
  step.arrive_and_wait();
  const size_t count = allocations_so_far() - before;
  for (std::thread& thread : threads) thread.join();
  return count;
}

// Another thread has the workers during the first dispatch, and the second one gets them.
size_t with_busy_workers() {
  constexpr uint32_t kThreads = 10;  // more than in the other cases
  simulator::set_num_threads(kThreads);
  running = 0;
  held = true;
  std::thread holder([] { run(kKernels[1], 2, 1); });
  while (!running) sched_yield();
  run_briefly(kThreads);
  held = false;
  holder.join();
  const size_t before = allocations_so_far();
  run_together(kThreads);
  return allocations_so_far() - before;
}

}  // namespace

int main() {
  std::printf("workers: %zu\n", with_workers());
  std::printf("threads: %zu\n", with_threads());
  std::printf("busy workers: %zu\n", with_busy_workers());
  return 0;
}
