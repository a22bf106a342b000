// Who runs when: a lane gives up the processor in a barrier or a SIMD operation, and the next one is chosen by the
// rules in threadgroup.h.
#include "threadgroup.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace metalcore::simulator {

using msl_abi::Exchange;
using msl_abi::kSimdWidth;

namespace {

uint32_t lane_bit(const Lane* lane) { return 1u << lane->thread.lane; }

// Class c holds values whose exchange_stride is 4 << c.
uint32_t size_class_of(uint32_t size) { return size <= 4 ? 0 : 30 - static_cast<uint32_t>(__builtin_clz(size - 1)); }
uint32_t class_stride(uint32_t size_class) { return 4u << size_class; }
// Lanes at different lines may publish values of different sizes, so each class has its own place.
uint32_t class_offset(uint32_t size_class) {
  return ((4u << size_class) - 4) * kSimdWidth + size_class * Simdgroup::kNobody;
}

uint32_t make_key(uint32_t line, uint32_t size_class) { return line << 3 | size_class; }

Lane* fiber_lane() {
  Lane* lane = Threadgroup::current();
  if (!lane->simdgroup) throw std::logic_error("metalcore: a kernel that was translated as free of barriers met one");
  return lane;
}

}  // namespace

// ---- what a lane does -----------------------------------------------------------------------------------------------

// Hands over to a lane that can run; returns when this lane is released.
void Threadgroup::wait(Lane* lane) {
  Simdgroup* simdgroup = lane->simdgroup;
  const uint32_t runnable = simdgroup->runnable &= ~lane_bit(lane);
  Threadgroup* group = lane->group;
  Lane* to = runnable && !group->random ? &simdgroup->lanes[__builtin_ctz(runnable)] : group->next(simdgroup, lane);
  if (to != lane) switch_to(lane, to);
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
  const uint32_t index = lane->thread.lane, size_class = size_class_of(size), stride = class_stride(size_class);
  unsigned char* slot = simdgroup->slots[simdgroup->parity] + class_offset(size_class) + index * stride;
  switch (size) {  // a constant size needs no call of memcpy
    case 4: std::memcpy(slot, value, 4); break;
    case 8: std::memcpy(slot, value, 8); break;
    case 16: std::memcpy(slot, value, 16); break;
    default: std::memcpy(slot, value, size);
  }
  const uint32_t bit = 1u << index;
  simdgroup->published = (simdgroup->published & ~bit) | (simdgroup->parity << index);
  simdgroup->keys[index] = make_key(line, size_class);
  wait(lane);
  const uint32_t partners = width == kSimdWidth ? ~0u : 0xfu << (index & ~3u);
  return {simdgroup->values, stride, simdgroup->active & partners};
}

void Threadgroup::yield() {
  Lane* lane = running_;
  Simdgroup* simdgroup = lane->simdgroup;
  if (!simdgroup) return;
  Threadgroup* group = lane->group;
  // The lanes take turns: otherwise the same few would yield to each other forever.
  const uint32_t above = simdgroup->runnable & ~(lane_bit(lane) | (lane_bit(lane) - 1));
  if (above) return switch_to(lane, &simdgroup->lanes[__builtin_ctz(above)]);
  const uint32_t later = group->ready_ & ~((2u << simdgroup->index) - 1);
  const Simdgroup& other = group->simdgroups_[__builtin_ctz(later ? later : group->ready_)];
  Lane* to = &other.lanes[__builtin_ctz(other.runnable)];  // only a yield leaves a simdgroup that is ready
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

Lane* Threadgroup::pick(Simdgroup* simdgroup, Lane* preferred) {
  if (!random && preferred && preferred->simdgroup == simdgroup && (simdgroup->runnable & lane_bit(preferred)))
    return preferred;
  return &simdgroup->lanes[pick_bit(simdgroup->runnable)];
}

// Lets the lanes that wait in SIMD operations at the smallest line go on. Returns false where there are none.
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
  const uint32_t size_class = key & 7;
  if (observer) observer->simdgroup_meets(*simdgroup, lanes);
  if (size_class != Simdgroup::kNoValue) {
    const uint32_t parity = simdgroup->parity, stride = class_stride(size_class);
    unsigned char* values = simdgroup->slots[parity] + class_offset(size_class);
    // A lane's value is in the other buffer where others have had an operation since it published the value.
    for (uint32_t late = lanes & (simdgroup->published ^ (0u - parity)); late; late &= late - 1) {
      const uint32_t i = static_cast<uint32_t>(__builtin_ctz(late));
      std::memcpy(values + i * stride, simdgroup->slots[parity ^ 1] + class_offset(size_class) + i * stride, stride);
    }
    if (~lanes) clear_idle(*simdgroup, ~lanes, size_class);
    simdgroup->values = values;
    simdgroup->stride = stride;
    simdgroup->active = lanes;
    simdgroup->parity = parity ^ 1;
  }
  simdgroup->runnable = lanes;
  return true;
}

// Others read zeros from lanes that take no part. Where such a lane has already published a value at another line, the
// value moves to the other buffer first.
void Threadgroup::clear_idle(Simdgroup& simdgroup, uint32_t idle, uint32_t size_class) {
  const uint32_t parity = simdgroup.parity, stride = class_stride(size_class), offset = class_offset(size_class);
  const uint32_t waiting = idle & simdgroup.live & ~simdgroup.at_barrier;
  for (uint32_t early = waiting & ~(simdgroup.published ^ (0u - parity)); early; early &= early - 1) {
    const uint32_t i = static_cast<uint32_t>(__builtin_ctz(early));
    if ((simdgroup.keys[i] & 7) != size_class) continue;
    const uint32_t slot = offset + i * stride;
    std::memcpy(simdgroup.slots[parity ^ 1] + slot, simdgroup.slots[parity] + slot, stride);
    simdgroup.published ^= 1u << i;
  }
  while (idle) {
    const uint32_t first = static_cast<uint32_t>(__builtin_ctz(idle));
    const uint32_t count = static_cast<uint32_t>(__builtin_ctz(~(idle >> first)));  // neighbours that are idle
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

// Returns the lane to run when a lane of `simdgroup` waits. That lane is `preferred`: to go on with it needs no switch.
Lane* Threadgroup::next(Simdgroup* simdgroup, Lane* preferred) {
  for (;;) {
    if (simdgroup->runnable || release(simdgroup)) return pick(simdgroup, preferred);
    ready_ &= ~(1u << simdgroup->index);
    if (!ready_ && !open_barrier()) return &main_;
    if (!(ready_ >> simdgroup->index & 1) || random) simdgroup = &simdgroups_[pick_bit(ready_)];
  }
}

}  // namespace metalcore::simulator
