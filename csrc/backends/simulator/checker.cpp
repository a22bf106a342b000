#include "checker.h"

#include "process_wide.h"
#include "runtime.h"
#include "symbolize.h"
#include "trap.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <optional>

namespace metalcore::simulator {

using msl_abi::Thread;
using msl_abi::Uint3;

namespace {

constexpr size_t kStackReserve = 32 * 1024;        // for the checker itself, which runs on the fibers' stacks
constexpr uint32_t kVariableGap = 4096;            // between threadgroup variables
constexpr uint32_t kArenaChecked = 1024 * 1024;    // all of them, gaps included

thread_local Checker* active = nullptr;  // of the dispatch that this thread runs

bool writes(uint32_t kind) { return kind == msl_abi::kWrite || kind == msl_abi::kAtomic || kind == msl_abi::kAtomicWrite; }
// What must order a read of this memory before another thread's write.
Space read_space(Space space) { return space == kShared ? kExecution : space; }
bool is_atomic(uint32_t kind) { return kind >= msl_abi::kAtomic; }

std::string text(Uint3 p) {
  return "(" + std::to_string(p.x) + ", " + std::to_string(p.y) + ", " + std::to_string(p.z) + ")";
}

std::string plural(uint64_t count, const std::string& noun) {
  return std::to_string(count) + " " + noun + (count == 1 ? "" : "s");
}

bool overlaps(const void* begin, size_t size, const char* address, uint32_t bytes) {
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
      segments_(reinterpret_cast<const void*>(launch.kernel.library->abi)),
      group_(group),
      random_(seed),
      order_(grid_.group_size),
      shared_shadow_(group.arena(), kArenaChecked),
      written_(kArenaChecked),
      arrivals_(grid_.group_size) {
  group_.observer = this;
  group_.random = &random_;
  group_.memory_gap = kVariableGap;
  active = this;
}

Checker::~Checker() {
  group_.observer = nullptr;
  group_.random = nullptr;
  group_.memory_gap = 0;
  active = nullptr;
}

void Checker::run() {
  group_.begin(*launch_.kernel.kernel, grid_.dispatch);
  for (group_index_ = 0; group_index_ < grid_.groups; ++group_index_) {
    order_.begin_group();
    shared_shadow_.clear();
    std::fill(written_.begin(), written_.end(), false);
    group_.run(group_index_, group_index_ + 1, true);
    settle();
  }
}

bool Checker::wrote_the_same(const Checker& other) const {
  const auto& mine = map_.blocks();
  for (size_t i = 0; i < mine.size(); ++i)
    for (size_t k = 0; k < mine[i].views.size(); ++k) {
      const View *a = mine[i].views[k], *b = other.map_.blocks()[i].views[k];
      if (a->writable && a->size && std::memcmp(a->copy, b->copy, a->size) != 0) return false;
    }
  return true;
}

// ---- accesses -------------------------------------------------------------------------------------------------------

void Checker::access(const char* address, uint32_t size, uint32_t kind, const void* caller) {
  settle();
  const Lane* lane = Threadgroup::current();
  const bool write = writes(kind);
  if (++accesses_ > limit_) fail("endless", pc_of(caller), lane->thread, "does not end");
  if (reinterpret_cast<char*>(__builtin_frame_address(0)) < lane->stack.base + kStackReserve)
    fail("stack overflow", pc_of(caller), lane->thread, "has too many or too large local variables");
  auto* target = const_cast<char*>(address);
  if (overlaps(lane->stack.base, Stacks::kSize, address, size)) return;
  if (overlaps(group_.arena(), kArenaChecked, address, size)) return shared_access(target, size, kind, caller);
  const Block* block = last_block_ && last_block_->contains(address) ? last_block_ : map_.find(address);
  if (!block) {
    if (!write && is_host_constant(address, size)) return;
    out_of_bounds(address, size, write, caller);
  }
  if (!allowed_in_buffer(*block, address, size, write)) out_of_bounds(address, size, write, caller);
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

// What translated code and its headers read besides the kernel's own data.
bool Checker::is_host_constant(const char* address, uint32_t size) const {
  const auto& dispatch = grid_.dispatch;
  return segments_.contain(address, size) || overlaps(&dispatch, sizeof dispatch, address, size) ||
         overlaps(dispatch.buffers, sizeof(void*) * kMaximumBuffers, address, size) ||
         overlaps(dispatch.threadgroup_lengths, sizeof(uint32_t) * kMaximumBuffers, address, size) ||
         overlaps(checking_runtime(), sizeof(msl_abi::Runtime), address, size) ||
         overlaps(&group_.lane(0), sizeof(Lane) * group_.size(), address, size) ||
         overlaps(&group_.simdgroups()[0], sizeof(Simdgroup) * group_.simdgroup_count(), address, size);
}

void Checker::shared_access(char* address, uint32_t size, uint32_t kind, const void* caller) {
  bool inside = false;
  for (uint32_t i = 0; i < kSites && !inside; ++i)
    inside = group_.site(i).address && overlaps(group_.site(i).address, group_.site(i).bytes, address, size);
  if (!inside) out_of_bounds(address, size, writes(kind), caller);
  if (kind == msl_abi::kRead || kind == msl_abi::kAtomic || kind == msl_abi::kAtomicRead)
    for (uint32_t i = 0; i < size; ++i)
      if (!written_[static_cast<size_t>(address + i - group_.arena())]) read_garbage(address + i, pc_of(caller));
  record(address, size, kind, shared_shadow_, kShared, caller);
}

void Checker::read_garbage(char* address, uint32_t pc) {
  *address = garbage_.pc == Garbage::kAnywhere || garbage_.pc == pc ? garbage_.value : 0;
  for (const GarbageRead& known : garbage_reads_)
    if (known.pc == pc) return;
  garbage_reads_.push_back({pc, Threadgroup::current()->thread, describe_place(address)});
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
  is_pending_ = true;
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

// ---- races ----------------------------------------------------------------------------------------------------------

void Checker::check_read(Cell& cell, const Stamp& stamp, const char* address, Space space) {
  const auto ordered = [&](const Stamp& past) { return order_.before(past, stamp.thread, space); };
  const auto read_before = [&](const Stamp& past) { return order_.before(past, stamp.thread, read_space(space)); };
  const bool wrote_it_too = cell.write && (cell.write.thread == stamp.thread || cell.write.many);
  for (const Stamp* write : {&cell.write, &cell.other_write}) {
    if (!*write || !write->changed || (write->atomic && stamp.atomic) || ordered(*write)) continue;
    // A thread that wrote the same value as others reads its own.
    if (wrote_it_too && !write->atomic) continue;
    race({*write, true}, {stamp, false}, address);
  }
  Stamp &first = cell.read, &second = cell.other_read;
  if (first && !order_.same_group(first, stamp)) {
    cell.earlier_read = first;
    first = second = {};
  }
  if (!first || first.thread == stamp.thread || read_before(first)) {
    first = stamp;
  } else if (!second || second.thread == stamp.thread || read_before(second)) {
    second = stamp;
  } else if (order_.same_simdgroup(first, second)) {
    // A third thread: keep two of different simdgroups, or else the two latest.
    if (order_.same_simdgroup(second, stamp)) first = second;
    second = stamp;
  }
}

void Checker::check_write(Cell& cell, const Stamp& stamp, const char* address, Space space) {
  const auto ordered = [&](const Stamp& past) { return order_.before(past, stamp.thread, space); };
  const auto harmless = [&](const Stamp& past) { return !stamp.changed || (past.atomic && stamp.atomic); };
  for (const Stamp* write : {&cell.write, &cell.other_write})
    if (*write && !harmless(*write) && !ordered(*write)) race({*write, true}, {stamp, true}, address);
  for (Stamp* read : {&cell.earlier_read, &cell.read, &cell.other_read}) {
    if (!*read) continue;
    const bool read_before = order_.before(*read, stamp.thread, read_space(space));
    if (!harmless(*read) && !read_before) race({*read, false}, {stamp, true}, address);
    if (read_before) *read = {};
  }
  Stamp& other = cell.other_write;
  if (other && ordered(other)) other = {};
  const bool unordered = cell.write && !ordered(cell.write);
  const bool third = unordered && other && cell.write.thread != stamp.thread && other.thread != cell.write.thread;
  if (unordered && (!other || cell.write.changed)) other = cell.write;
  const bool many = unordered && (cell.write.many || third);
  cell.write = stamp;
  cell.write.many = many;
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
}

void Checker::barrier_opens(Threadgroup& group) {
  settle();
  // Of threads at different barriers, those at the smallest line are taken to be in the branch they should not be in.
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
             text(gone->thread.position_in_threadgroup) + " for one, will not reach: " +
             (group.size() - waiting == 1 ? "it has" : "they have") + " left the kernel",
         at_first->barrier_line);
  order_.barrier(arrival.flags);
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

// ---- faults ---------------------------------------------------------------------------------------------------------

uint32_t Checker::pc_of(const void* caller) const {
  return static_cast<uint32_t>(static_cast<const char*>(caller) - segments_.base() - 1);  // inside the call
}

Thread Checker::thread_of(uint32_t number) const {
  const uint32_t index = order_.index_in_group(number), group = order_.group_of(number);
  const Uint3 groups = grid_.dispatch.threadgroups_per_grid, size = grid_.dispatch.threads_per_threadgroup,
              all = grid_.dispatch.threads_per_grid;
  const Uint3 at = {group % groups.x, group / groups.x % groups.y, group / (groups.x * groups.y)};
  // Threadgroups at the grid's edge are smaller.
  const uint32_t x = std::min(size.x, all.x - at.x * size.x), y = std::min(size.y, all.y - at.y * size.y);
  Thread thread = {};
  thread.position_in_threadgroup = {index % x, index / x % y, index / (x * y)};
  thread.threadgroup_position = at;
  thread.position_in_grid = {at.x * size.x + index % x, at.y * size.y + index / x % y, at.z * size.z + index / (x * y)};
  return thread;
}

std::string Checker::describe_place(const char* address) const {
  if (overlaps(group_.arena(), kArenaChecked, address, 1)) {
    const Threadgroup::Site* best = nullptr;
    uint32_t best_site = 0;
    int64_t best_distance = 0;
    for (uint32_t i = 0; i < kSites; ++i) {
      const Threadgroup::Site& site = group_.site(i);
      if (!site.address) continue;
      const int64_t past = address - (site.address + site.bytes) + 1, ahead = site.address - address;
      const int64_t distance = std::max<int64_t>({past, ahead, 0});
      if (!best || distance < best_distance) best = &site, best_site = i, best_distance = distance;
    }
    if (!best) return "threadgroup memory";
    return "byte offset " + std::to_string(address - best->address) + " of " +
           (best_site >= kThreadgroupArguments ? "threadgroup argument " + std::to_string(best_site - kThreadgroupArguments)
                                               : "a threadgroup variable") +
           " of " + plural(best->bytes, "byte");
  }
  const View* view = map_.nearest(address);
  if (!view) return "no buffer";
  return "byte offset " + std::to_string(address - view->copy) + " of " + view->name + ", which has " +
         plural(view->size, "byte");
}

void Checker::out_of_bounds(const char* address, uint32_t size, bool write, const void* caller) {
  const Thread& thread = Threadgroup::current()->thread;
  const Block* block = map_.find(address);
  if (write && block && allowed_in_buffer(*block, address, size, false))
    fail("write to read-only memory", pc_of(caller), thread, "writes " + plural(size, "byte") + " at " + describe_place(address) +
                                                                 " and is const or constant");
  if (write && segments_.contain(address, size))
    fail("write to read-only memory", pc_of(caller), thread, "writes " + plural(size, "byte") + " to a program-scope constant");
  fail(write ? "out-of-bounds write" : "out-of-bounds read", pc_of(caller), thread,
       (write ? "writes " : "reads ") + plural(size, "byte") + " out of bounds, at " + describe_place(address));
}

void Checker::race(Access first, Access second, const char* address) {
  // Which of the two came first depends on the order of the threads. The one further down in the source is reported: in
  // code without a loop, the barrier is missing somewhere above it.
  const SourceLine first_line = find_line(launch_.kernel.library->path, first.stamp.pc);
  const SourceLine second_line = find_line(launch_.kernel.library->path, second.stamp.pc);
  const bool swap = first_line.file == second_line.file && first_line.line > second_line.line;
  const Access &subject = swap ? first : second, &object = swap ? second : first;
  const uint32_t line = (swap ? second_line : first_line).line;
  const Thread other = thread_of(object.stamp.thread);
  const bool same_group = order_.same_group(first.stamp, second.stamp);
  const std::string remedy = order_.same_simdgroup(first.stamp, second.stamp)
                                 ? "simdgroup_barrier or threadgroup_barrier that covers this memory"
                             : same_group ? "threadgroup_barrier that covers this memory"
                                          : "atomic operation";
  fail("race", subject.stamp.pc, thread_of(subject.stamp.thread),
       (subject.writes ? "writes what thread " : "reads what thread ") + text(other.position_in_threadgroup) +
           " of threadgroup " + text(other.threadgroup_position) + (object.writes ? " writes" : " reads") +
           (line ? " in line " + std::to_string(line) : std::string()) + ", with no " + remedy + " in between (" +
           describe_place(address) + ")");
}

Fault Checker::fault(const GarbageRead& read) const {
  return fault("uninitialized read", read.pc, read.thread,
               "reads threadgroup memory that no thread has written yet (" + read.place + ")", 0);
}

Fault Checker::fault(const char* kind, uint32_t pc, const Thread& thread, const std::string& what, uint32_t line) const {
  const SourceLine found = find_line(launch_.kernel.library->path, pc);
  if (!line) line = found.line;
  const std::string kernel = launch_.kernel.kernel->name;
  std::string where = "kernel '" + kernel + "'";
  if (line) where += ", " + (found.file.empty() ? "" : found.file + ":") + (found.file.empty() ? "line " : "") + std::to_string(line);
  const std::string message = where + ": " + kind + ": thread " + text(thread.position_in_threadgroup) + " of threadgroup " +
                              text(thread.threadgroup_position) + " " + what;
  return Fault(kind, kernel, found.file, line, thread, message);
}

void Checker::fail(const char* kind, uint32_t pc, const Thread& thread, const std::string& what, uint32_t line) {
  is_pending_ = false;
  const Fault fault = this->fault(kind, pc, thread, what, line);
  // On a fiber the group is left where it stands; after its end there is only the dispatch to leave.
  if (Threadgroup::current()->simdgroup) group_.abandon(std::make_exception_ptr(fault));
  throw fault;
}

// ---- the runtime of checking libraries ------------------------------------------------------------------------------

namespace {

const msl_abi::Runtime runtime = {
    .version = msl_abi::kVersion,
    .self = normal_runtime()->self,
    .threadgroup_barrier =
        [](uint32_t flags, uint32_t line) {
          active->synchronize(flags, __builtin_return_address(0));
          Threadgroup::barrier(line);
        },
    .simdgroup_barrier =
        [](uint32_t flags, uint32_t line) {
          active->synchronize(flags, __builtin_return_address(0));
          Threadgroup::simdgroup_barrier(line);
        },
    .simd_exchange =
        [](const void* value, uint32_t size, uint32_t width, uint32_t line) {
          active->synchronize(0, __builtin_return_address(0));
          return Threadgroup::exchange(value, size, width, line);
        },
    .threadgroup_memory =
        [](uint32_t site, uint32_t bytes, uint32_t alignment) {
          return active->threadgroup_memory(site, bytes, alignment, __builtin_return_address(0));
        },
    .yield = &Threadgroup::yield,
    .access =
        [](const void* address, uint32_t size, uint32_t kind, const void* caller) {
          // A library's own initialization and its host functions run outside of a dispatch.
          if (active) active->access(static_cast<const char*>(address), size, kind, caller);
        },
};

}  // namespace

const msl_abi::Runtime* checking_runtime() { return &runtime; }

// Threadgroups of checked dispatches, which run one at a time.
struct Checked {
  std::mutex mutex;
  Threadgroup group;
};

namespace {

// One run of the dispatch and how it ended.
struct Run {
  Run(const Launch& launch, Threadgroup& group, const Garbage& garbage, uint64_t limit)
      : checker(launch, group, checking().seed, garbage, limit) {
    try {
      checker.run();
    } catch (const Fault& thrown) {
      fault = thrown;
    }
  }

  bool ended_as(const Run& other) const {
    if (fault || other.fault) return fault && other.fault && fault->message() == other.fault->message();
    return checker.wrote_the_same(other.checker);
  }

  Checker checker;
  std::optional<Fault> fault;
};

}  // namespace

// Kernels read threadgroup memory that nobody has written and do not use what they find, in the lanes that a shorter
// reduction leaves out, for one. So a read of it is a fault where the outcome depends on what was there.
void execute_checked(const Launch& launch) {
  Checked& checked = process_wide<Checked>();
  std::lock_guard lock(checked.mutex);
  catch_traps();
  const Run run(launch, checked.group, {}, ~uint64_t{0});
  const auto depends_on = [&](uint32_t pc) {
    for (const unsigned char value : Garbage::kValues)
      if (!Run(launch, checked.group, {value, pc}, 4 * run.checker.accesses() + 100000).ended_as(run)) return true;
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
