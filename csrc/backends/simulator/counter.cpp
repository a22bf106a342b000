#include "counter.h"

#include "library.h"

#include <algorithm>
#include <cstring>

namespace metalcore::simulator {
namespace {

constexpr uint32_t kNoBuffer = 0xff, kNoBlock = ~0u;
constexpr uint32_t kLine = 128, kSector = 32, kBanks = 32;
constexpr uint32_t kLanes = msl_abi::kSimdWidth;

bool writes(uint32_t kind) {
  return kind == msl_abi::kWrite || kind == msl_abi::kAtomic || kind == msl_abi::kAtomicWrite;
}

}  // namespace

bool Cache::holds(uint64_t line) {
  Set& set = sets_[line % sets_.size()];
  const uint64_t tag = line + 1;
  const auto found = std::find(set.begin(), set.end(), tag);
  std::rotate(set.begin(), found == set.end() ? set.end() - 1 : found, found == set.end() ? set.end() : found + 1);
  const bool held = set.front() == tag;
  set.front() = tag;
  return held;
}

Counter::Counter(const Launch& launch, Threadgroup& group)
    : launch_(launch), group_(group), outer_(std::exchange(active_, this)) {
  for (uint32_t i = 0; i < launch.kernel.kernel->argument_count; ++i) {
    const msl_abi::Argument& argument = launch.kernel.kernel->arguments[i];
    if (argument.kind != msl_abi::kBuffer || argument.index >= kMaximumBuffers) continue;
    const Binding& binding = launch.buffers[argument.index];
    const bool constant = binding.kind == Binding::kBytes || binding.kind == Binding::kPointers;
    buffers_[argument.index].index = argument.index;
    if (!constant) buffers_[argument.index].bytes = binding.size;
    add_range(binding.address, binding.size, argument.index, constant);
    for (size_t j = 0; binding.kind == Binding::kPointers && j < binding.size / sizeof(void*); ++j) {
      add_range(static_cast<void* const*>(binding.address)[j], binding.spans[j], argument.index, false);
      buffers_[argument.index].bytes += binding.spans[j];
    }
  }
  group_.observer = this;
}

void Counter::add_range(const void* begin, size_t size, uint32_t buffer, bool constant) {
  const auto first = reinterpret_cast<uint64_t>(begin);
  uintptr_t allocation = first;
  if (!constant && device_functions().find_allocation && !device_functions().find_allocation(first, &allocation))
    allocation = first;
  if (size) ranges_.push_back({first, first + size, -allocation % kLine, static_cast<uint8_t>(buffer), constant});
}

Counter::~Counter() {
  undo();
  group_.observer = nullptr;
  active_ = outer_;
}

void Counter::begin_group(uint64_t index, const Grid& grid) {
  const msl_abi::Uint3 n = grid.dispatch.threadgroups_per_grid;
  if (!groups_begun_++) middle_index_ = index;
  size_ = grid.group_size;
  lanes_.assign(size_, {});
  traces_.resize((size_ + kLanes - 1) / kLanes);
  for (Cache& cache : caches_) cache.clear();
  const uint64_t steps[] = {1, n.x, uint64_t{n.x} * n.y};
  const uint32_t sizes[] = {n.x, n.y, n.z};
  for (auto& [number, runs] : runs_) {
    std::fill(runs.count.begin(), runs.count.end(), 0);
    std::fill(runs.parted.begin(), runs.parted.end(), 0);
    for (auto& next : runs.next) next.fill(kNoBlock);
  }
  neighbour_ = -1;
  for (int axis = 2; axis >= 0; --axis)
    if (groups_begun_ > 1 && groups_begun_ <= 4 && sizes[axis] > 1 && index == middle_index_ + steps[axis])
      neighbour_ = axis;
}

void Counter::end_group() {
  for (uint32_t i = 0; i < traces_.size(); ++i) settle(i);
  for (auto& [number, runs] : runs_) {
    Counts::Block& block = blocks_[number];
    for (uint32_t first = 0; first < size_; first += kLanes) {
      const uint32_t end = std::min(size_, first + kLanes);
      uint32_t most = 0;
      for (uint32_t i = first; i < end; ++i) {
        most = std::max(most, runs.count[i]);
        block.lanes += runs.count[i];
      }
      block.simdgroups += most;
      const uint64_t parted = static_cast<uint64_t>(__builtin_popcountll(runs.parted[first / kLanes]));
      block.parted += most > Runs::kFollowed ? parted * most / Runs::kFollowed : parted;
    }
  }
  for (uint32_t i = 0; i < kMaximumBuffers; ++i) {
    Lines& lines = read_[i];
    buffers_[i].read += lines.size();
    buffers_[i].written += written_[i].size();
    lines.insert(written_[i].begin(), written_[i].end());
    if (groups_begun_ == 1) middle_[i] = lines;
    if (neighbour_ >= 0 && !middle_[i].empty()) {
      const auto both =
          std::count_if(lines.begin(), lines.end(), [&](uint64_t line) { return middle_[i].count(line); });
      buffers_[i].shared[static_cast<size_t>(neighbour_)] =
          static_cast<double>(both) / static_cast<double>(middle_[i].size());
    }
    distinct_[i].insert(lines.begin(), lines.end());
    read_[i].clear();
    written_[i].clear();
  }
}

void Counter::block(uint32_t number) {
  ++events_;
  const uint32_t index = Threadgroup::current()->thread.index_in_threadgroup;
  LaneState& lane = lanes_[index];
  Runs& runs = runs_[number];
  if (runs.count.size() < size_) {
    runs.count.resize(size_);
    runs.parted.resize(traces_.size());
    runs.next.resize(traces_.size());
    for (auto& next : runs.next) next.fill(kNoBlock);
  }
  if (lane.block != kNoBlock) {
    Runs& left = runs_.find(lane.block)->second;
    if (const uint32_t run = left.count[index] - 1; run < Runs::kFollowed) {
      uint32_t& next = left.next[index / kLanes][run];
      if (next == kNoBlock) next = number;
      if (next != number) left.parted[index / kLanes] |= uint64_t{1} << run;
    }
  }
  ++runs.count[index];
  lane.block = number;
  lane.forget();
}

Counter::Found Counter::find(uint64_t address) const {
  for (const Range& range : ranges_)
    if (address >= range.begin && address < range.end)
      return {range.constant ? kConstantMemory : kDeviceMemory, range.buffer, range.moved};
  switch (Threadgroup::space(reinterpret_cast<const void*>(address))) {
    case msl_abi::Space::threadgroup: return {kThreadgroupMemory, kNoBuffer, 0};
    case msl_abi::Space::thread: return {kThreadMemory, kNoBuffer, 0};
    default: break;
  }
  const bool own = launch_.kernel.library->segments.contain(reinterpret_cast<const char*>(address), 1);
  return {own ? kConstantMemory : kDeviceMemory, kNoBuffer, 0};
}

void Counter::access(char* address, uint32_t size, uint32_t kind, uint32_t site) {
  ++events_;
  const auto [place, buffer, moved] = find(reinterpret_cast<uint64_t>(address));
  const uint64_t at = reinterpret_cast<uint64_t>(address) + moved;
  if (writes(kind) && place == kDeviceMemory) {
    before_.push_back({address, bytes_before_.size(), size});
    bytes_before_.insert(bytes_before_.end(), address, address + size);
  }
  const msl_abi::Thread& thread = Threadgroup::current()->thread;
  LaneState& lane = lanes_[thread.index_in_threadgroup];
  std::vector<Access>& trace = traces_[thread.simdgroup].accesses;
  // A GPU's compiler joins accesses to neighbours, as to a vector's components, to one of up to 16 bytes. It moves
  // loads over loads, and no load over a store.
  const size_t newest = lane.recent.front();
  if (newest < trace.size() && trace[newest].kind != kind) lane.forget();
  for (const size_t i : lane.recent) {
    if (i >= trace.size() || kind > msl_abi::kWrite) break;
    Access& earlier = trace[i];
    if (earlier.address + earlier.size == at && earlier.size + size <= 16 && earlier.place == place &&
        earlier.buffer == buffer) {
      earlier.size += size;
      return;
    }
  }
  std::rotate(lane.recent.begin(), lane.recent.end() - 1, lane.recent.end());
  lane.recent.front() = trace.size();
  trace.push_back({at, size, site, 0, static_cast<uint8_t>(thread.lane), place, buffer, static_cast<uint8_t>(kind)});
  if (trace.size() >= 1 << 20) settle(thread.simdgroup);
}

void Counter::simdgroup_meets(Simdgroup& simdgroup, uint32_t) { settle(simdgroup.index); }

void Counter::barrier_opens(Threadgroup&) {
  for (uint32_t i = 0; i < traces_.size(); ++i) settle(i);
}

// Puts together what the lanes of a simdgroup access at a time: a site's first accesses, its second ones …
void Counter::settle(uint32_t simdgroup) {
  std::vector<Access>& trace = traces_[simdgroup].accesses;
  if (trace.empty()) return;
  times_.clear();
  for (Access& access : trace) access.time = times_[uint64_t{access.site} << 8 | access.lane]++;
  std::stable_sort(trace.begin(), trace.end(), [](const Access& a, const Access& b) {
    return a.time != b.time ? a.time < b.time : a.site < b.site;
  });
  for (size_t first = 0, end; first < trace.size(); first = end) {
    for (end = first + 1;
         end < trace.size() && trace[end].site == trace[first].site && trace[end].time == trace[first].time;)
      ++end;
    add(trace.data() + first, trace.data() + end);
  }
  trace.clear();
  const uint32_t begin = simdgroup * kLanes;
  for (uint32_t i = begin; i < std::min(size_, begin + kLanes); ++i) lanes_[i].forget();
}

void Counter::add(const Access* first, const Access* last) {
  Counts::Site& site = sites_[first->site][first->place];
  ++site.simdgroups;
  site.lanes += static_cast<uint64_t>(last - first);
  for (const Access* a = first; a != last; ++a) site.bytes += a->size;
  if (first->place == kThreadMemory || first->place == kConstantMemory) return;
  const auto units = [&](uint32_t size) {
    std::vector<uint64_t>& found = units_;
    found.clear();
    for (const Access* a = first; a != last; ++a)
      for (uint64_t unit = a->address / size; unit <= (a->address + std::max(a->size, 1u) - 1) / size; ++unit)
        found.push_back(unit);
    std::sort(found.begin(), found.end());
    found.erase(std::unique(found.begin(), found.end()), found.end());
  };
  if (first->place == kThreadgroupMemory) {
    units(4);
    uint32_t uses[kBanks] = {}, most = 0;
    for (const uint64_t word : units_) most = std::max(most, ++uses[word % kBanks]);
    site.passes += most;
    return;
  }
  units(kSector);
  site.sectors += units_.size();
  units(kLine);
  site.lines += units_.size();
  for (const uint64_t line : units_) {
    for (size_t i = 0; i < caches_.size(); ++i) site.missed[i] += !caches_[i].holds(line);
    if (first->buffer != kNoBuffer) {
      if (first->kind != msl_abi::kWrite && first->kind != msl_abi::kAtomicWrite) read_[first->buffer].insert(line);
      if (writes(first->kind)) written_[first->buffer].insert(line);
    }
  }
}

void Counter::undo() {
  for (auto it = before_.rbegin(); it != before_.rend(); ++it)
    std::memcpy(it->address, bytes_before_.data() + it->offset, it->size);
  before_.clear();
  bytes_before_.clear();
}

Counts Counter::finish(const Grid& grid, uint64_t sampled) {
  undo();
  Counts counts;
  counts.path = launch_.kernel.library->path;
  counts.kernel = launch_.kernel.kernel->name;
  counts.threads = launch_.threads;
  counts.group = launch_.group;
  counts.groups = grid.groups;
  counts.sampled = sampled;
  counts.events = events_;
  counts.threadgroup_memory = group_.memory_used();
  counts.blocks.assign(blocks_.begin(), blocks_.end());
  counts.sites.assign(sites_.begin(), sites_.end());
  for (uint32_t i = 0; i < kMaximumBuffers; ++i)
    if (buffers_[i].bytes) {
      buffers_[i].distinct = distinct_[i].size();
      counts.buffers.push_back(buffers_[i]);
    }
  return counts;
}

}  // namespace metalcore::simulator
