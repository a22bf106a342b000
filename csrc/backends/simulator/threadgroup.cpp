#include "threadgroup.h"

#include "watch.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

namespace metalcore::simulator {

using msl_abi::Exchange;
using msl_abi::kSimdWidth;
using msl_abi::Thread;
using msl_abi::Uint3;

namespace {

// A library that asks for more is stopped at once; between this and 32 KiB the sum is still found, to be told.
constexpr size_t kArena = 4 * 1024 * 1024;

// initial-exec: one load instead of a call to the loader in every barrier and SIMD operation.
__attribute__((tls_model("initial-exec"))) thread_local Lane* running = nullptr;

uint32_t lane_bit(const Lane* lane) { return 1u << lane->thread.lane; }

// Class c holds values whose exchange_stride is 4 << c.
uint32_t size_class(uint32_t size) { return size <= 4 ? 0 : 30 - static_cast<uint32_t>(__builtin_clz(size - 1)); }
uint32_t class_stride(uint32_t size_class) { return 4u << size_class; }
// Lanes at different lines may publish values of different sizes, so that each class has its own place.
uint32_t class_offset(uint32_t size_class) {
  return ((4u << size_class) - 4) * kSimdWidth + size_class * Simdgroup::kNobody;
}

uint32_t make_key(uint32_t line, uint32_t size_class) { return line << 3 | size_class; }

}  // namespace

Threadgroup::Threadgroup() : lanes_(new Lane[kMaximumThreads]) {
  void* memory = mmap(nullptr, kArena, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  arena_ = static_cast<char*>(memory);
  main_.group = plain_.group = this;
}

Threadgroup::~Threadgroup() { munmap(arena_, kArena); }

Lane* Threadgroup::current() { return running; }

void Threadgroup::begin(const KernelReference& kernel, const msl_abi::Dispatch& dispatch) {
  kernel_ = kernel.kernel;
  segments_ = &kernel.library->segments;
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

void Threadgroup::enter(Lane* lane) {
  try {
    Trap start;
    start.thread = lane->thread;
    if (wanted()) decide(start);
    switch_to(&main_, lane);
    while (Lane* paused = std::exchange(paused_, nullptr)) {
      decide(std::exchange(trap_, {}));
      switch_to(&main_, paused);
    }
    if (trap_.kind) throw fault_of(std::exchange(trap_, {}), *kernel_);
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
  } catch (...) {
    // The fibers stopped in the middle of a thread.
    prepared_ = 0;
    plain_prepared_ = false;
    throw;
  }
  if (memory_used_ > kMaximumThreadgroupMemory)
    throw std::runtime_error("metalcore: kernel '" + std::string(kernel_->name) + "' uses " +
                             std::to_string(memory_used_) + " bytes of threadgroup memory; Metal allows 32768");
}

// Throws where the dispatch does not go on.
void Threadgroup::decide(const Trap& at) {
  Trap trap = at;
  switch (look()) {
    case Verdict::kGoOn: return;
    case Verdict::kGiveUp: throw GivenUp();
    case Verdict::kTimedOut: trap.kind = Trap::kTimeout; break;
    case Verdict::kInterrupted: trap.kind = Trap::kInterrupt; break;
  }
  throw fault_of(trap, *kernel_);
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

// Plain loops have a fiber as well: what is below its stack is known, and it can be left from a signal handler.
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
      kernel_->run_row(dispatch_, &thread, size.x);
    }
}

void Threadgroup::prepare_lanes() {
  const Uint3 size = first_.threadgroup_size;
  const uint32_t count = (size_ + kSimdWidth - 1) / kSimdWidth;
  simdgroup_count_ = count;
  while (simdgroups_.size() < count) {
    // Growing moves the simdgroups; no lane is inside one now.
    simdgroups_.emplace_back();
    shape_ = {};
  }
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
      group->kernel_->run_thread(group->dispatch_, &lane->thread);
    } catch (...) {
      failure = std::current_exception();
    }
    if (failure) group->abandon(failure);
    group->leave(lane);
  }
}

void Threadgroup::abandon(std::exception_ptr reason) {
  failure_ = std::move(reason);
  Lane* from = running;
  for (;;) switch_to(from, &main_);
}

bool Threadgroup::abandon(Trap trap, const char* address, ucontext_t& interrupted) {
  Lane* lane = running;
  if (!lane || lane == &lane->group->main_) return false;
  Threadgroup* group = lane->group;
  const char* base = lane->stack.base;
  if (trap.kind == Trap::kMemory && address >= base - Stacks::kGuard && address < base) trap.kind = Trap::kStack;
  trap.thread = lane->thread;
  trap.thread_known = lane->simdgroup != nullptr;
  group->trap_ = trap;
  running = &group->main_;
  group->main_.context.resume_after(interrupted);
  return true;
}

void Threadgroup::pause(const char* pc) {
  Lane* lane = running;
  if (!lane || lane == &lane->group->main_ || !lane->group->segments_->is_code(pc)) return;
  Threadgroup* group = lane->group;
  group->trap_.pc = pc;
  group->trap_.thread = lane->thread;
  group->trap_.thread_known = lane->simdgroup != nullptr;
  group->paused_ = lane;
  switch_to(lane, &group->main_);
}

inline void Threadgroup::switch_to(Lane* from, Lane* to) {
  running = to;
  Context::change(from->context, to->context);
}

// ---- what a lane does -----------------------------------------------------------------------------------------------

// Hands over to whoever can run; returns when this lane is released.
inline void Threadgroup::wait(Lane* lane) {
  Simdgroup* simdgroup = lane->simdgroup;
  const uint32_t runnable = simdgroup->runnable &= ~lane_bit(lane);
  Threadgroup* group = lane->group;
  Lane* to = runnable && !group->random ? &simdgroup->lanes[__builtin_ctz(runnable)] : group->next(simdgroup, lane);
  if (to != lane) switch_to(lane, to);
}

static Lane* fiber_lane() {
  Lane* lane = running;
  if (!lane->simdgroup) throw std::logic_error("metalcore: a kernel that was translated as free of barriers met one");
  return lane;
}

void Threadgroup::barrier(uint32_t line) {
  Lane* lane = fiber_lane();
  lane->barrier_line = line;
  lane->simdgroup->at_barrier |= lane_bit(lane);
  wait(lane);
}

void Threadgroup::simdgroup_barrier(uint32_t line) {
  Lane* lane = fiber_lane();
  lane->simdgroup->keys[lane->thread.lane] = make_key(line, Simdgroup::kNoValue);
  wait(lane);
}

Exchange Threadgroup::exchange(const void* value, uint32_t size, uint32_t width, uint32_t line) {
  Lane* lane = fiber_lane();
  Simdgroup* simdgroup = lane->simdgroup;
  const uint32_t index = lane->thread.lane, cls = size_class(size), stride = class_stride(cls);
  unsigned char* slot = simdgroup->slots[simdgroup->parity] + class_offset(cls) + index * stride;
  switch (size) {  // without a call for the usual sizes
    case 4: std::memcpy(slot, value, 4); break;
    case 8: std::memcpy(slot, value, 8); break;
    case 16: std::memcpy(slot, value, 16); break;
    default: std::memcpy(slot, value, size);
  }
  const uint32_t bit = 1u << index;
  simdgroup->published = (simdgroup->published & ~bit) | (simdgroup->parity << index);
  simdgroup->keys[index] = make_key(line, cls);
  wait(lane);
  const uint32_t partners = width == kSimdWidth ? ~0u : 0xfu << (index & ~3u);
  return {simdgroup->values, stride, simdgroup->active & partners};
}

void Threadgroup::yield() {
  Lane* lane = running;
  Simdgroup* simdgroup = lane->simdgroup;
  if (!simdgroup) return;
  Threadgroup* group = lane->group;
  // Round robin, or the same few lanes would yield to each other forever.
  const uint32_t above = simdgroup->runnable & ~(lane_bit(lane) | (lane_bit(lane) - 1));
  if (above) return switch_to(lane, &simdgroup->lanes[__builtin_ctz(above)]);
  const uint32_t later = group->ready_ & ~((2u << simdgroup->index) - 1);
  const Simdgroup& other = group->simdgroups_[__builtin_ctz(later ? later : group->ready_)];
  Lane* to = &other.lanes[__builtin_ctz(other.runnable)];  // a simdgroup that is ready has been left by a yield only
  if (to != lane) switch_to(lane, to);
}

void Threadgroup::leave(Lane* lane) {
  lane->simdgroup->live &= ~lane_bit(lane);
  wait(lane);
}

// ---- who runs next --------------------------------------------------------------------------------------------------

uint32_t Threadgroup::pick_bit(uint32_t mask) {
  if (random)
    for (uint32_t skip = (*random)() % static_cast<uint32_t>(__builtin_popcount(mask)); skip; --skip) mask &= mask - 1;
  return static_cast<uint32_t>(__builtin_ctz(mask));
}

inline Lane* Threadgroup::pick(Simdgroup* simdgroup, Lane* preferred) {
  if (!random && preferred && preferred->simdgroup == simdgroup && (simdgroup->runnable & lane_bit(preferred)))
    return preferred;
  return &simdgroup->lanes[pick_bit(simdgroup->runnable)];
}

// Lets the lanes that wait in SIMD operations at the smallest line go on. False where there are none.
bool Threadgroup::release(Simdgroup* simdgroup) {
  const uint32_t waiting = simdgroup->live & ~simdgroup->at_barrier;
  if (!waiting) return false;
  const uint32_t* keys = simdgroup->keys;
  uint32_t key = keys[__builtin_ctz(waiting)], lanes = waiting;
  uint32_t different = 0;
  for (uint32_t i = 0; i < kSimdWidth; ++i) different |= (keys[i] ^ key) & -(waiting >> i & 1);
  if (different) {
    for (uint32_t i = 0; i < kSimdWidth; ++i)
      if (waiting >> i & 1) key = std::min(key, keys[i]);
    lanes = 0;
    for (uint32_t i = 0; i < kSimdWidth; ++i)
      if (waiting >> i & 1 && keys[i] == key) lanes |= 1u << i;
  }
  const uint32_t cls = key & 7;
  if (observer) observer->simdgroup_meets(*simdgroup, lanes);
  if (cls != Simdgroup::kNoValue) {
    const uint32_t parity = simdgroup->parity, stride = class_stride(cls);
    unsigned char* values = simdgroup->slots[parity] + class_offset(cls);
    // Lanes that came before an operation of others in between left their values in the other buffer.
    for (uint32_t late = lanes & (simdgroup->published ^ (0u - parity)); late; late &= late - 1) {
      const uint32_t i = static_cast<uint32_t>(__builtin_ctz(late));
      std::memcpy(values + i * stride, simdgroup->slots[parity ^ 1] + class_offset(cls) + i * stride, stride);
    }
    if (~lanes) clear_idle(*simdgroup, ~lanes, cls);
    simdgroup->values = values;
    simdgroup->stride = stride;
    simdgroup->active = lanes;
    simdgroup->parity = parity ^ 1;
  }
  simdgroup->runnable = lanes;
  return true;
}

// What others read of lanes that take no part are zeros. Of these lanes, one that has published a value already, at
// another line, gets it back from the other buffer.
void Threadgroup::clear_idle(Simdgroup& simdgroup, uint32_t idle, uint32_t cls) {
  const uint32_t parity = simdgroup.parity, stride = class_stride(cls), offset = class_offset(cls);
  const uint32_t waiting = idle & simdgroup.live & ~simdgroup.at_barrier;
  for (uint32_t early = waiting & ~(simdgroup.published ^ (0u - parity)); early; early &= early - 1) {
    const uint32_t i = static_cast<uint32_t>(__builtin_ctz(early));
    if ((simdgroup.keys[i] & 7) != cls) continue;
    const uint32_t slot = offset + i * stride;
    std::memcpy(simdgroup.slots[parity ^ 1] + slot, simdgroup.slots[parity] + slot, stride);
    simdgroup.published ^= 1u << i;
  }
  while (idle) {
    const uint32_t first = static_cast<uint32_t>(__builtin_ctz(idle));
    const uint32_t count = static_cast<uint32_t>(__builtin_ctz(~(idle >> first)));  // of them in a row
    std::memset(simdgroup.slots[parity] + offset + first * stride, 0, count * stride);
    idle &= idle + (1u << first);
  }
}

bool Threadgroup::open_barrier() {
  uint32_t ready = 0;
  for (uint32_t i = 0; i < simdgroup_count_; ++i)
    if (simdgroups_[i].at_barrier) ready |= 1u << i;
  if (!ready) return false;
  if (observer) observer->barrier_opens(*this);
  for (uint32_t i = 0; i < simdgroup_count_; ++i) {
    simdgroups_[i].runnable = simdgroups_[i].at_barrier;
    simdgroups_[i].at_barrier = 0;
  }
  ready_ = ready;
  return true;
}

// The lane to run now that one of `simdgroup` waits; `preferred` is that lane, which costs no switch.
Lane* Threadgroup::next(Simdgroup* simdgroup, Lane* preferred) {
  for (;;) {
    if (simdgroup->runnable || release(simdgroup)) return pick(simdgroup, preferred);
    ready_ &= ~(1u << simdgroup->index);
    if (!ready_ && !open_barrier()) return &main_;
    if (!(ready_ >> simdgroup->index & 1) || random) simdgroup = &simdgroups_[pick_bit(ready_)];
  }
}

msl_abi::Space Threadgroup::space(const void* address) {
  const auto within = [at = static_cast<const char*>(address)](const char* begin, const char* end) {
    return begin <= at && at <= end;
  };
  const Lane* lane = running;
  if (!address) return msl_abi::Space::none;
  if (within(lane->group->arena_, lane->group->arena_ + kArena)) return msl_abi::Space::threadgroup;
  const bool own = within(static_cast<const char*>(lane->stack.base), static_cast<const char*>(lane->stack.top));
  return own ? msl_abi::Space::thread : msl_abi::Space::memory;
}

// ---- threadgroup memory ---------------------------------------------------------------------------------------------

void* Threadgroup::memory(uint32_t site, uint32_t bytes, uint32_t alignment) {
  if (site >= kSites)
    throw std::logic_error("metalcore: threadgroup variable number " + std::to_string(site) + " is out of range");
  Site& entry = sites_[site];
  if (entry.address && entry.bytes >= bytes) return entry.address;
  const auto align = [](uint64_t value, uint64_t to) { return (value + to - 1) & ~(to - 1); };
  const uint64_t to = std::max(alignment, 16u);
  const uint64_t used = align(memory_used_, alignment) + bytes;
  const uint64_t begin = align(memory_end_ + memory_gap, to);
  if (begin + bytes + memory_gap > kArena)
    throw std::runtime_error("metalcore: kernel '" + std::string(kernel_->name) + "' uses at least " +
                             std::to_string(used) + " bytes of threadgroup memory; Metal allows 32768");
  entry.address = arena_ + begin;
  entry.bytes = bytes;
  memory_used_ = static_cast<uint32_t>(used);
  memory_end_ = static_cast<uint32_t>(begin + bytes);
  return entry.address;
}

}  // namespace metalcore::simulator
