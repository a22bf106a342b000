#include "threadgroup.h"

#include "library.h"
#include "modes.h"
#include "watch.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

namespace metalcore::simulator {

using msl_abi::kSimdWidth;
using msl_abi::Thread;
using msl_abi::Uint3;

namespace {

// A kernel that asks for more is stopped at once. One that asks for more than 32 KiB runs on, so that the error can
// tell the sum.
constexpr size_t kArena = 4 * 1024 * 1024;

}  // namespace

Threadgroup::Threadgroup() : lanes_(new Lane[kMaximumThreads]) {
  void* memory = mmap(nullptr, kArena, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  arena_ = static_cast<char*>(memory);
  main_.group = plain_.group = this;
  simdgroups_.reserve(kMaximumThreads / kSimdWidth);  // pointers to them stay valid, and no kernel allocates later
}

Threadgroup::~Threadgroup() { munmap(arena_, kArena); }

void Threadgroup::begin(const KernelReference& kernel, const msl_abi::Dispatch& dispatch) {
  kernel_ = kernel;
  dispatch_ = &dispatch;
  memory_used_ = memory_end_ = 0;
  std::fill(std::begin(sites_), std::end(sites_), Site{});
}

void Threadgroup::run(uint64_t begin, uint64_t end, bool fibers) {
  if (fibers) {
    for (uint64_t index = begin; index < end; ++index) {
      set_position(index);
      prepare_lanes();
      enter(pick(&simdgroups_[pick_bit(ready_)], nullptr));
    }
  } else {
    prepare_rows(begin, end);
    enter(&plain_);
  }
}

void Threadgroup::go_on(Lane* lane) {
  const KernelFloats floats;
  switch_to(&main_, lane);
}

void Threadgroup::enter(Lane* lane) {
  try {
    Trap start;
    start.thread = lane->thread;
    if (wanted()) decide(start);
    go_on(lane);
    while (Lane* paused = std::exchange(paused_, nullptr)) {
      decide(std::exchange(trap_, {}));
      go_on(paused);
    }
    if (trap_.kind) throw fault_of(std::exchange(trap_, {}), kernel_);
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
  } catch (...) {
    // The fibers stopped in the middle of a thread, so that none is prepared.
    prepared_ = 0;
    plain_prepared_ = false;
    throw;
  }
  if (memory_used_ > kMaximumThreadgroupMemory)
    throw std::runtime_error("metalcore: " + describe(kernel_) + " uses " + std::to_string(memory_used_) +
                             " bytes of threadgroup memory; Metal allows 32768");
}

// Throws where the dispatch must not go on.
void Threadgroup::decide(const Trap& at) {
  Trap trap = at;
  switch (look()) {
    case Verdict::kGoOn: return;
    case Verdict::kGiveUp: throw GivenUp();
    case Verdict::kTimedOut: trap.kind = Trap::kTimeout; break;
    case Verdict::kInterrupted: trap.kind = Trap::kInterrupt; break;
  }
  throw fault_of(trap, kernel_);
}

void Threadgroup::set_position(uint64_t index) {
  const Uint3 groups = dispatch_->threadgroups_per_grid, threads = dispatch_->threads_per_grid,
              size = dispatch_->threads_per_threadgroup;
  const uint64_t plane = uint64_t{groups.x} * groups.y;
  const Uint3 at = {static_cast<uint32_t>(index % groups.x), static_cast<uint32_t>(index % plane / groups.x),
                    static_cast<uint32_t>(index / plane)};
  const Uint3 begin = {at.x * size.x, at.y * size.y, at.z * size.z};
  first_.position_in_grid = begin;
  first_.threadgroup_position = at;
  first_.threadgroup_size = {std::min(size.x, threads.x - begin.x), std::min(size.y, threads.y - begin.y),
                             std::min(size.z, threads.z - begin.z)};
  size_ = first_.threadgroup_size.x * first_.threadgroup_size.y * first_.threadgroup_size.z;
  first_.simdgroups = (size_ + kSimdWidth - 1) / kSimdWidth;
}

// Plain loops run on a fiber as well: it has a guard page below its stack, and a signal handler can leave it.
void Threadgroup::prepare_rows(uint64_t begin, uint64_t end) {
  next_ = begin;
  end_ = end;
  if (plain_prepared_) return;
  plain_.stack = stacks_.get(kMaximumThreads);
  plain_.context.prepare(plain_.stack.base, plain_.stack.top, &Threadgroup::rows, &plain_);
  plain_prepared_ = true;
}

void Threadgroup::rows(void* lane) {
  Threadgroup* group = static_cast<Lane*>(lane)->group;
  for (;;) {
    std::exception_ptr failure;
    try {
      for (; group->next_ < group->end_; ++group->next_) group->run_rows();
    } catch (...) {
      failure = std::current_exception();
    }
    if (failure) group->abandon(failure);
    switch_to(&group->plain_, &group->main_);
  }
}

void Threadgroup::run_rows() {
  set_position(next_);
  plain_.thread = first_;
  Thread& thread = plain_.thread;
  const Uint3 size = first_.threadgroup_size, begin = first_.position_in_grid;
  uint32_t index = 0;
  for (uint32_t z = 0; z < size.z; ++z)
    for (uint32_t y = 0; y < size.y; ++y, index += size.x) {
      thread.position_in_grid = {begin.x, begin.y + y, begin.z + z};
      thread.position_in_threadgroup = {0, y, z};
      thread.index_in_threadgroup = index;
      thread.lane = index % kSimdWidth;
      thread.simdgroup = index / kSimdWidth;
      kernel_.kernel->run_row(dispatch_, &thread, size.x);
    }
}

void Threadgroup::prepare_lanes() {
  const Uint3 size = first_.threadgroup_size;
  const uint32_t count = (size_ + kSimdWidth - 1) / kSimdWidth;
  simdgroup_count_ = count;
  while (simdgroups_.size() < count) simdgroups_.emplace_back();
  if (size.x != shape_.x || size.y != shape_.y || size.z != shape_.z) {
    for (uint32_t i = 0; i < size_; ++i) {
      Lane& lane = lanes_[i];
      lane.simdgroup = &simdgroups_[i / kSimdWidth];
      lane.group = this;
      lane.thread = first_;
      lane.thread.position_in_threadgroup = {i % size.x, i / size.x % size.y, i / (size.x * size.y)};
      lane.thread.index_in_threadgroup = i;
      lane.thread.lane = i % kSimdWidth;
      lane.thread.simdgroup = i / kSimdWidth;
    }
    shape_ = size;
  }
  for (; prepared_ < size_; ++prepared_) {
    Lane& lane = lanes_[prepared_];
    lane.stack = stacks_.get(prepared_);
    lane.context.prepare(lane.stack.base, lane.stack.top, &Threadgroup::fiber, &lane);
  }
  const Uint3 begin = first_.position_in_grid;
  for (uint32_t i = 0; i < size_; ++i) {
    Thread& thread = lanes_[i].thread;
    const Uint3 local = thread.position_in_threadgroup;
    thread.position_in_grid = {begin.x + local.x, begin.y + local.y, begin.z + local.z};
    thread.threadgroup_position = first_.threadgroup_position;
  }
  for (uint32_t i = 0; i < count; ++i) {
    Simdgroup& simdgroup = simdgroups_[i];
    const uint32_t lanes = std::min(kSimdWidth, size_ - i * kSimdWidth);
    simdgroup.lanes = &lanes_[i * kSimdWidth];
    simdgroup.index = i;
    simdgroup.live = simdgroup.runnable = lanes == 32 ? ~0u : (1u << lanes) - 1;
    simdgroup.at_barrier = 0;
  }
  ready_ = count == 32 ? ~0u : (1u << count) - 1;
}

void Threadgroup::fiber(void* argument) {
  Lane* lane = static_cast<Lane*>(argument);
  Threadgroup* group = lane->group;
  for (;;) {
    std::exception_ptr failure;
    try {
      group->kernel_.kernel->run_thread(group->dispatch_, &lane->thread);
    } catch (...) {
      failure = std::current_exception();
    }
    if (failure) group->abandon(failure);
    group->leave(lane);
  }
}

void Threadgroup::abandon(std::exception_ptr reason) {
  failure_ = std::move(reason);
  Lane* from = running_;
  for (;;) switch_to(from, &main_);
}

bool Threadgroup::abandon(Trap trap, const char* address, ucontext_t& interrupted) {
  Lane* lane = running_;
  if (!lane || lane == &lane->group->main_) return false;
  Threadgroup* group = lane->group;
  const char* base = lane->stack.base;
  if (trap.kind == Trap::kMemory && address >= base - Stacks::kGuard && address < base) trap.kind = Trap::kStack;
  trap.thread = lane->thread;
  trap.thread_known = lane->simdgroup != nullptr;
  group->trap_ = trap;
  running_ = &group->main_;
  group->main_.context.resume_after(interrupted);
  return true;
}

void Threadgroup::pause(const char* pc) {
  Lane* lane = running_;
  if (!lane || lane == &lane->group->main_ || !lane->group->kernel_.library->is_code_of_kernels(pc)) return;
  Threadgroup* group = lane->group;
  group->trap_.pc = pc;
  group->trap_.thread = lane->thread;
  group->trap_.thread_known = lane->simdgroup != nullptr;
  group->paused_ = lane;
  switch_to(lane, &group->main_);
}

msl_abi::Space Threadgroup::space(const void* address) {
  const auto within = [at = static_cast<const char*>(address)](const char* begin, const char* end) {
    return begin <= at && at <= end;
  };
  const Lane* lane = running_;
  if (!address) return msl_abi::Space::none;
  if (within(lane->group->arena_, lane->group->arena_ + kArena)) return msl_abi::Space::threadgroup;
  const bool own = within(static_cast<const char*>(lane->stack.base), static_cast<const char*>(lane->stack.top));
  return own ? msl_abi::Space::thread : msl_abi::Space::memory;
}

void* Threadgroup::memory(uint32_t site, uint32_t bytes, uint32_t alignment) {
  if (site >= kSites)
    throw std::logic_error("metalcore: threadgroup variable number " + std::to_string(site) + " is out of range");
  Site& entry = sites_[site];
  if (entry.address && entry.bytes >= bytes) return entry.address;
  const auto align = [](uint64_t value, uint64_t multiple) { return (value + multiple - 1) & ~(multiple - 1); };
  const uint64_t used = align(memory_used_, alignment) + bytes;
  const uint64_t begin = align(memory_end_ + memory_gap, std::max(alignment, 16u));
  if (begin + bytes + memory_gap > kArena)
    throw std::runtime_error("metalcore: " + describe(kernel_) + " uses at least " + std::to_string(used) +
                             " bytes of threadgroup memory; Metal allows 32768");
  entry.address = arena_ + begin;
  entry.bytes = bytes;
  memory_used_ = static_cast<uint32_t>(used);
  memory_end_ = static_cast<uint32_t>(begin + bytes);
  return entry.address;
}

namespace {

const msl_abi::Runtime runtime = {
    .version = msl_abi::kVersion,
    .self = [] { return static_cast<const msl_abi::Thread*>(&Threadgroup::current()->thread); },
    .threadgroup_barrier = [](uint32_t, uint32_t line) { Threadgroup::barrier(line); },
    .simdgroup_barrier = [](uint32_t, uint32_t line) { Threadgroup::simdgroup_barrier(line); },
    .simd_exchange = &Threadgroup::exchange,
    .threadgroup_memory =
        [](uint32_t site, uint32_t bytes, uint32_t alignment) {
          return Threadgroup::current()->group->memory(site, bytes, alignment);
        },
    .yield = &Threadgroup::yield,
    .space = &Threadgroup::space,
    .access = nullptr,
    .finding = nullptr,
};

}  // namespace

const msl_abi::Runtime* normal_runtime() { return &runtime; }

}  // namespace metalcore::simulator
