#include "checker.h"

#include "library.h"
#include "fault.h"
#include "watch.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace metalcore::simulator {

namespace {

constexpr size_t kStackReserve = 32 * 1024;      // for the checker itself, which runs on the fibers' stacks
constexpr uint32_t kVariableGap = 4096;          // between threadgroup variables
constexpr uint32_t kArenaChecked = 1024 * 1024;  // all threadgroup variables, gaps included

bool writes(uint32_t kind) {
  return kind == msl_abi::kWrite || kind == msl_abi::kAtomic || kind == msl_abi::kAtomicWrite;
}
bool is_atomic(uint32_t kind) { return kind >= msl_abi::kAtomic; }

bool contains(const void* begin, size_t size, const char* address, uint32_t bytes) {
  const char* first = static_cast<const char*>(begin);
  return address >= first && address + bytes <= first + size;
}

}  // namespace

Checker::Checker(const Launch& launch, Threadgroup& group, uint32_t seed, const Garbage& garbage, uint64_t limit)
    : launch_(launch),
      garbage_(garbage),
      limit_(limit),
      map_(launch),
      grid_(make_grid(launch, map_.buffers())),
      segments_(launch.kernel.library->segments),
      group_(group),
      random_(seed),
      order_(grid_.group_size),
      shared_shadow_(group.arena(), kArenaChecked),
      written_(kArenaChecked),
      arrivals_(grid_.group_size),
      operations_(grid_.group_size),
      outer_(std::exchange(active_, this)) {
  group_.observer = this;
  group_.random = &random_;
  group_.memory_gap = kVariableGap;
}

Checker::~Checker() {
  group_.observer = nullptr;
  group_.random = nullptr;
  group_.memory_gap = 0;
  active_ = outer_;
}

void Checker::run() {
  group_.begin(launch_.kernel, grid_.dispatch);
  for (group_index_ = 0; group_index_ < grid_.groups; ++group_index_) {
    order_.begin_group();
    shared_shadow_.clear();
    std::fill(written_.begin(), written_.end(), false);
    group_.run(group_index_, group_index_ + 1, true);
    settle();
  }
}

bool Checker::wrote_the_same(const Checker& other) const {
  const auto &mine = map_.blocks(), &theirs = other.map_.blocks();
  for (size_t i = 0; i < mine.size(); ++i)
    for (const View* a : mine[i].views) {
      const auto at = a->original - mine[i].original;
      if (a->writable && a->size && std::memcmp(mine[i].result() + at, theirs[i].result() + at, a->size) != 0)
        return false;
    }
  return true;
}

// ---- accesses -------------------------------------------------------------------------------------------------------

void Checker::access(const char* address, uint32_t size, uint32_t kind, const void* caller) {
  const Lane* lane = Threadgroup::current();
  if (!copies(*lane, kind)) {
    settle();
    if (wanted()) Threadgroup::pause(static_cast<const char*>(caller));
  }
  const bool aligned = kind & msl_abi::kAligned;
  kind &= ~uint32_t{msl_abi::kAligned};
  const bool write = writes(kind);
  if (++accesses_ > limit_) fail("endless", pc_of(caller), lane->thread, "does not end");
  if (reinterpret_cast<char*>(__builtin_frame_address(0)) < lane->stack.base + kStackReserve)
    fail("stack overflow", pc_of(caller), lane->thread, "has too many or too large local variables");
  auto* target = const_cast<char*>(address);
  const bool is_misaligned = aligned && reinterpret_cast<uintptr_t>(address) % size && !allow_misaligned_;
  if (contains(lane->stack.base, Stacks::kSize, address, size)) {
    // No variable lives below the frame that makes the access.
    if (address < static_cast<const char*>(__builtin_frame_address(0))) out_of_bounds(address, size, write, caller);
    if (is_misaligned) misaligned(address, size, write, caller);
    return;
  }
  if (is_shared(address, size)) {
    shared_access(target, size, kind, caller);
    if (is_misaligned) misaligned(address, size, write, caller);
    return;
  }
  const Block* block = last_block_ && last_block_->contains(address) ? last_block_ : map_.find(address);
  if (!block) {
    if (!write && is_host_constant(address, size)) return lane_access(target, size, pc_of(caller));
    out_of_bounds(address, size, write, caller);
  }
  if (!allowed_in_buffer(*block, address, size, write)) out_of_bounds(address, size, write, caller);
  if (is_misaligned) misaligned(address, size, write, caller);
  if (!block->writable) return;
  if (block != last_block_) {
    auto& shadow = device_shadow_[block];
    if (!shadow) shadow = std::make_unique<Shadow>(block->copy, block->size);
    last_block_ = block;
    last_shadow_ = shadow.get();
  }
  record(target, size, kind, *last_shadow_, kDevice, caller);
}

bool Checker::allowed_in_buffer(const Block& block, const char* address, uint32_t size, bool write) const {
  for (const View* view : block.views)
    if ((view->writable || !write) && address >= view->copy && address + size <= view->copy + view->size) return true;
  return false;
}

// Translated code and its headers read these besides the kernel's own data.
bool Checker::is_host_constant(const char* address, uint32_t size) const {
  const auto& dispatch = grid_.dispatch;
  return segments_.contain(address, size) || contains(&dispatch, sizeof dispatch, address, size) ||
         contains(dispatch.buffers, sizeof(void*) * kMaximumBuffers, address, size) ||
         contains(dispatch.threadgroup_lengths, sizeof(uint32_t) * kMaximumBuffers, address, size) ||
         contains(checking_runtime(), sizeof(msl_abi::Runtime), address, size) ||
         contains(&group_.lane(0), sizeof(Lane) * group_.size(), address, size) ||
         contains(&group_.simdgroups()[0], sizeof(Simdgroup) * group_.simdgroup_count(), address, size);
}

bool Checker::is_shared(const char* address, uint32_t size) const {
  return contains(group_.arena(), kArenaChecked, address, size);
}

void Checker::shared_access(char* address, uint32_t size, uint32_t kind, const void* caller) {
  bool inside = false;
  for (uint32_t i = 0; i < kSites && !inside; ++i)
    inside = group_.site(i).address && contains(group_.site(i).address, group_.site(i).bytes, address, size);
  if (!inside) out_of_bounds(address, size, writes(kind), caller);
  if (kind == msl_abi::kRead || kind == msl_abi::kAtomic || kind == msl_abi::kAtomicRead)
    for (uint32_t i = 0; i < size; ++i)
      if (!written_[static_cast<size_t>(address + i - group_.arena())]) read_garbage(address + i, pc_of(caller));
  record(address, size, kind, shared_shadow_, kShared, caller);
}

bool Checker::is_garbage_known(uint32_t pc) const {
  return std::any_of(garbage_reads_.begin(), garbage_reads_.end(), [&](const auto& read) { return read.pc == pc; });
}

unsigned char Checker::garbage_at(uint32_t pc) const {
  return garbage_.pc == Garbage::kAnywhere || garbage_.pc == pc ? garbage_.value : 0;
}

void Checker::read_garbage(char* address, uint32_t pc) {
  *address = garbage_at(pc);
  if (is_garbage_known(pc)) return;
  const std::string what = "reads threadgroup memory that no thread has written yet (" + describe_place(address) + ")";
  garbage_reads_.push_back({pc, Threadgroup::current()->thread, "uninitialized read", what});
}

// The read may be of another lane's value in the last SIMD operation, or of the place of a value that was not
// published.
void Checker::lane_access(char* address, uint32_t size, uint32_t pc) {
  const Lane* lane = Threadgroup::current();
  const Simdgroup* simdgroup = lane->simdgroup;
  const auto offset = reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(simdgroup->values);
  if (!simdgroup->values || offset >= uint64_t{simdgroup->stride} * (msl_abi::kSimdWidth + 1)) return;
  const uint64_t other = offset / simdgroup->stride;
  if (other < msl_abi::kSimdWidth && simdgroup->active >> other & 1) return;
  std::memset(address, garbage_at(pc), size);
  if (is_garbage_known(pc)) return;
  const std::string who = other < msl_abi::kSimdWidth
                              ? "lane " + std::to_string(other) + " of its simdgroup, which takes no part here"
                              : "a lane that its simdgroup or quad does not have";
  const std::string what = ", and the outcome depends on it: Metal leaves it open, and Apple's GPUs give 0";
  garbage_reads_.push_back({pc, lane->thread, "inactive lane read", "takes the value of " + who + what});
}

void Checker::record(char* address, uint32_t size, uint32_t kind, Shadow& shadow, Space space, const void* caller) {
  const Lane* lane = Threadgroup::current();
  Stamp stamp = {};
  stamp.thread = order_.thread(*lane);
  stamp.pc = pc_of(caller);
  stamp.atomic = is_atomic(kind);
  if (stamp.atomic) order_.atomic(address, stamp.thread, kind);
  stamp.time = order_.now();
  if (!writes(kind)) {
    shadow.visit(address, size, [&](Cell& cell, const char* at, size_t) { check_read(cell, stamp, at, space); });
    return;
  }
  pending_.address = address;
  pending_.size = size;
  pending_.shadow = &shadow;
  pending_.space = space;
  pending_.stamp = stamp;
  pending_.before.assign(address, address + size);
  pending_.has_read = false;
  is_pending_ = true;
}

// GCC announces the two sides of an object's copy before it makes the copy: first the write, and then the read. So a
// read behind a write that has changed nothing yet may belong to it. No other thread may run between the two.
bool Checker::copies(const Lane& lane, uint32_t kind) {
  if (!is_pending_ || pending_.has_read || writes(kind & ~uint32_t{msl_abi::kAligned})) return false;
  if (pending_.stamp.atomic || pending_.stamp.thread != order_.thread(lane)) return false;
  pending_.has_read = std::memcmp(pending_.address, pending_.before.data(), pending_.size) == 0;
  return pending_.has_read;
}

void Checker::settle() {
  if (!is_pending_) return;
  is_pending_ = false;
  const Pending& p = pending_;
  p.shadow->visit(p.address, p.size, [&](Cell& cell, const char* at, size_t bytes) {
    Stamp stamp = p.stamp;
    const size_t offset = static_cast<size_t>(at - p.address);
    stamp.changed = std::memcmp(at, p.before.data() + offset, bytes) != 0;
    if (p.space == kShared)
      for (size_t i = 0; i < bytes; ++i) {
        auto written = written_[static_cast<size_t>(at + i - group_.arena())];
        if (!written) stamp.changed = 1;
        written = true;
      }
    check_write(cell, stamp, at, p.space);
  });
}

// ---- synchronization ------------------------------------------------------------------------------------------------

void Checker::synchronize(uint32_t flags, const void* caller) {
  settle();
  arrivals_[Threadgroup::current()->thread.index_in_threadgroup] = {flags, pc_of(caller)};
}

void Checker::simdgroup_meets(Simdgroup& simdgroup, uint32_t lanes) {
  settle();
  const uint32_t first = simdgroup.index * 32 + static_cast<uint32_t>(__builtin_ctz(lanes));
  order_.simdgroup_barrier(simdgroup.index, lanes, arrivals_[first].flags);
  compare_operations(simdgroup.index * 32, 32, 1);
}

// Threads that have met execute one operation, if any. Those of its whole scope have met: the next one has not begun.
void Checker::compare_operations(uint32_t begin, uint32_t count, int64_t met) {
  const uint32_t end = std::min<uint32_t>(begin + count, operations_.size());
  const Operation* first = nullptr;
  for (uint32_t i = begin; i < end; ++i) {
    Operation& operation = operations_[i];
    if (!operation.simdgroups) continue;
    if (first && (operation.simdgroups != first->simdgroups || operation.digest != first->digest))
      fail("divided scope", operation.pc, group_.lane(i).thread,
           "comes to another operation on tensors, or to the same one with other tensors, than thread " +
               text(group_.lane(uint32_t(first - operations_.data())).thread.position_in_threadgroup) +
               " of the same scope");
    if (!first) first = &operation;
  }
  for (uint32_t i = begin; i < end; ++i)
    if (operations_[i].simdgroups <= met) operations_[i] = {};
}

void Checker::barrier_opens(Threadgroup& group) {
  settle();
  // Where threads are at different barriers, those at the smallest line count as being in the wrong branch.
  const Lane *at_first = nullptr, *at_other = nullptr, *gone = nullptr;
  uint32_t waiting = 0;
  for (uint32_t i = 0; i < group.size(); ++i) {
    const Lane& lane = group.lane(i);
    if (!(lane.simdgroup->live >> lane.thread.lane & 1)) {
      if (!gone) gone = &lane;
      continue;
    }
    ++waiting;
    if (!at_first || lane.barrier_line < at_first->barrier_line) at_first = &lane;
  }
  for (uint32_t i = 0; i < group.size() && !at_other; ++i) {
    const Lane& lane = group.lane(i);
    if (lane.simdgroup->live >> lane.thread.lane & 1 && lane.barrier_line != at_first->barrier_line) at_other = &lane;
  }
  const Arrival& arrival = arrivals_[at_first->thread.index_in_threadgroup];
  if (at_other)
    fail("divergent barrier", arrival.pc, at_first->thread,
         "waits at a threadgroup_barrier while thread " + text(at_other->thread.position_in_threadgroup) +
             " of the same threadgroup waits at the one in line " + std::to_string(at_other->barrier_line),
         at_first->barrier_line);
  if (gone)
    fail("divergent barrier", arrival.pc, at_first->thread,
         "waits at a threadgroup_barrier that " + plural(group.size() - waiting, "thread") + " of its threadgroup, " +
             text(gone->thread.position_in_threadgroup) +
             " for one, will not reach: " + (group.size() - waiting == 1 ? "it has" : "they have") + " left the kernel",
         at_first->barrier_line);
  order_.barrier(arrival.flags);
  compare_operations(0, group.size(), INT64_MAX);
}

void* Checker::threadgroup_memory(uint32_t site, uint32_t bytes, uint32_t alignment, const void* caller) {
  settle();
  void* address = group_.memory(site, bytes, alignment);
  if (group_.memory_used() > kMaximumThreadgroupMemory)
    fail("threadgroup memory", pc_of(caller), Threadgroup::current()->thread,
         "this declaration brings the threadgroup memory to " + std::to_string(group_.memory_used()) +
             " bytes; Metal allows 32768");
  return address;
}

}  // namespace metalcore::simulator
