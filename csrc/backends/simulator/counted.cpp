#include "counted.h"

#include "../../gpu/tuning.h"
#include "counter.h"
#include "scratch.h"
#include "trap.h"

#include <algorithm>
#include <iterator>
#include <mutex>
#include <numeric>
#include <utility>

namespace metalcore::simulator {
namespace {

struct State {
  std::recursive_mutex mutex;  // one dispatch is counted at a time
  Counting counting;
  std::vector<Counts> counts;
  uint32_t replaced_cores = 0;  // the number of the family's cores before; 0 where it was not replaced
};

State& state() {
  static State* made = new State;  // kernels may still run while the process ends
  return *made;
}

const msl_abi::Runtime runtime = {
    .version = msl_abi::kVersion,
    .self = normal_runtime()->self,
    .threadgroup_barrier = normal_runtime()->threadgroup_barrier,
    .simdgroup_barrier = normal_runtime()->simdgroup_barrier,
    .simd_exchange = normal_runtime()->simd_exchange,
    .threadgroup_memory = normal_runtime()->threadgroup_memory,
    .yield = normal_runtime()->yield,
    .space = normal_runtime()->space,
    .access =
        [](const void* address, uint32_t size, uint32_t kind, const void* site) {
          Counter* counter = Counter::active();
          if (!counter) return;  // a library's own initialization runs outside of a dispatch
          if (kind == kBlock)
            counter->block(size);
          else
            counter->access(static_cast<char*>(const_cast<void*>(address)), size, kind,
                            static_cast<uint32_t>(reinterpret_cast<uintptr_t>(site)));
        },
    .finding = nullptr,
};

// The limit of events does not end a sample before it has this many threadgroups.
constexpr uint64_t kNeighbours = 4;

// The threadgroups to count, the most telling first: one in the middle with its neighbours along x, y and z, and then
// others that lie evenly, each in the middle of a gap.
std::vector<uint64_t> order_of_sample(const Grid& grid) {
  const msl_abi::Uint3 n = grid.dispatch.threadgroups_per_grid;
  const uint64_t steps[] = {1, n.x, uint64_t{n.x} * n.y};
  const uint32_t counts[] = {n.x, n.y, n.z};
  uint64_t middle = 0;
  for (int axis = 0; axis < 3; ++axis) middle += steps[axis] * ((counts[axis] - 1) / 2);
  std::vector<uint64_t> order = {middle};
  for (int axis = 0; axis < 3; ++axis)
    if (counts[axis] > 1) order.push_back(middle + steps[axis]);
  // The others are multiples of the golden section, which lie evenly at each length. A large grid gives every stride-th
  // threadgroup.
  constexpr uint64_t kMost = 1 << 16;
  const uint64_t stride = (grid.groups - 1) / kMost + 1, count = (grid.groups - 1) / stride + 1;
  uint64_t step = count * 618 / 1000 + 1;
  while (std::gcd(step, count) != 1) ++step;
  const size_t first = order.size();
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t index = i * step % count * stride;
    if (std::find(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(first), index) ==
        order.begin() + static_cast<std::ptrdiff_t>(first))
      order.push_back(index);
  }
  return order;
}

}  // namespace

const msl_abi::Runtime* counting_runtime() { return &runtime; }

const Counting& counting() { return state().counting; }

void set_counting(const Counting& counting) {
  State& s = state();
  std::lock_guard lock(s.mutex);
  if (s.replaced_cores) gpu::cores_of(gpu::family_named(s.counting.family)) = std::exchange(s.replaced_cores, 0);
  s.counting = counting;
  if (counting.cores) s.replaced_cores = gpu::cores_of(gpu::family_named(counting.family)).exchange(counting.cores);
}

std::vector<Counts> take_counts() {
  std::lock_guard lock(state().mutex);
  return std::exchange(state().counts, {});
}

bool execute_counted(const Launch& launch) {
  if (!launch.threads.x || !launch.threads.y || !launch.threads.z) return true;
  validate(launch);
  State& s = state();
  std::lock_guard lock(s.mutex);
  void* buffers[kMaximumBuffers];
  for (uint32_t i = 0; i < kMaximumBuffers; ++i) buffers[i] = launch.buffers[i].address;
  const Grid grid = make_grid(launch, buffers);
  const Scratch scratch;
  Threadgroup& group = *scratch;
  catch_traps();
  Counter counter(launch, group);
  group.begin(launch.kernel, grid.dispatch);
  uint64_t sampled = 0;
  for (const uint64_t index : order_of_sample(grid)) {
    if (sampled >= kNeighbours && counter.events() > s.counting.events) break;
    counter.begin_group(index, grid);
    group.run(index, index + 1, true);
    counter.end_group();
    ++sampled;
  }
  Counts counts = counter.finish(grid, sampled);
  const double events =
      static_cast<double>(counts.events) / static_cast<double>(sampled) * static_cast<double>(grid.groups);
  counts.ran = events <= static_cast<double>(s.counting.whole);
  const bool ran = counts.ran;
  s.counts.push_back(std::move(counts));
  return ran;
}

}  // namespace metalcore::simulator
