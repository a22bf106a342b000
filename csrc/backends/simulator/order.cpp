#include "order.h"

#include <algorithm>

namespace metalcore::simulator {

void Order::begin_group() {
  if (started_) ++group_;
  started_ = true;
  first_ = group_ * capacity_;
  barrier_ = {};
  for (auto& spaces : known_)
    for (auto& known : spaces) known.reset();
  for (Atomic* atomic : recent_) atomic->recent = false;
  recent_.clear();
}

bool Order::before(const Stamp& past, uint32_t thread, Space space) const {
  if (past.thread == thread) return true;
  if (group_of(past.thread) == group_) {
    if (past.time < barrier_[space]) return true;
    const uint32_t mine = index_in_group(thread), other = index_in_group(past.thread);
    if (mine / 32 == other / 32) {
      const auto& known = known_[mine / 32][space];
      if (known && past.time < known->until[mine % 32][other % 32]) return true;
    }
  }
  return !atomics_.empty() && before_by_atomics(past, thread, space);
}

void Order::barrier(uint32_t flags) {
  const uint64_t time = now();
  for (uint32_t space = 0; space < kSpaces; ++space)
    if (space == kExecution || flags >> space & 1) barrier_[space] = time;
  // Each thread of the group has now acquired what one thread had.
  for (Atomic* atomic : recent_) {
    atomic->group = {group_ + uint64_t{1}, time};
    atomic->recent = false;
  }
  recent_.clear();
}

void Order::simdgroup_barrier(uint32_t simdgroup, uint32_t lanes, uint32_t flags) {
  const uint64_t time = now();
  for (uint32_t space = 0; space < kSpaces; ++space) {
    if (space != kExecution && !(flags >> space & 1)) continue;
    auto& known = known_[simdgroup][space];
    if (!known) known = std::make_unique<Known>();
    uint64_t joined[32] = {};
    for (uint32_t lane = 0; lane < 32; ++lane)
      if (lanes >> lane & 1)
        for (uint32_t other = 0; other < 32; ++other)
          joined[other] = std::max(joined[other], known->until[lane][other]);
    for (uint32_t lane = 0; lane < 32; ++lane)
      if (lanes >> lane & 1) joined[lane] = time;
    for (uint32_t lane = 0; lane < 32; ++lane)
      if (lanes >> lane & 1) std::copy(std::begin(joined), std::end(joined), known->until[lane]);
  }
  const uint32_t first = first_ + simdgroup * 32;
  for (Atomic* atomic : recent_) {
    bool acquired = false;
    for (uint32_t lane = 0; lane < 32; ++lane) acquired |= (lanes >> lane & 1) && atomic->acquired.count(first + lane);
    if (!acquired) continue;
    for (uint32_t lane = 0; lane < 32; ++lane)
      if (lanes >> lane & 1) atomic->acquired[first + lane] = time;
  }
}

void Order::atomic(const void* address, uint32_t thread, uint32_t kind) {
  const uint64_t time = now();
  Atomic& atomic = atomics_[address];
  if (kind != msl_abi::kAtomicWrite) {
    atomic.acquired[thread] = time;
    if (!atomic.recent) recent_.push_back(&atomic);
    atomic.recent = true;
  }
  if (kind == msl_abi::kAtomicRead) return;
  atomic.released[thread] = time;
  atomic.barrier[group_] = barrier_;
  const uint32_t index = index_in_group(thread);
  if (const auto& known = known_[index / 32][kDevice])
    for (uint32_t lane = 0; lane < 32; ++lane)
      if (const uint64_t until = known->until[index % 32][lane]; until && lane != index % 32) {
        uint64_t& released = atomic.released[first_ + index / 32 * 32 + lane];
        released = std::max(released, until);
      }
}

bool Order::before_by_atomics(const Stamp& past, uint32_t thread, Space space) const {
  for (const auto& [address, atomic] : atomics_) {
    uint64_t acquired = 0;
    if (const auto own = atomic.acquired.find(thread); own != atomic.acquired.end()) acquired = own->second;
    if (atomic.group[0] == group_ + uint64_t{1}) acquired = std::max(acquired, atomic.group[1]);
    if (past.time >= acquired) continue;
    if (const auto own = atomic.released.find(past.thread); own != atomic.released.end() && past.time < own->second)
      return true;
    const auto barrier = atomic.barrier.find(group_of(past.thread));
    if (barrier != atomic.barrier.end() && past.time < barrier->second[space]) return true;
  }
  return false;
}

}  // namespace metalcore::simulator
