// Finds accesses that race, by the shadow of the memory and the order of the threads, and words the faults of a checked
// dispatch: the place in the program, the thread, and the byte of which memory.
#include "checker.h"
#include "fault.h"
#include "symbolize.h"

#include <algorithm>

namespace metalcore::simulator {
namespace {

// The space whose order decides whether a read of this memory comes before another thread's write.
Space read_space(Space space) { return space == kShared ? kExecution : space; }

}  // namespace

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
    // This is a third thread: keep two of different simdgroups, or else the two latest.
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

void Checker::race(Access first, Access second, const char* address) {
  // The order of the threads decides which of the two came first. The fault names the one further down in the source:
  // in code without a loop, the barrier is missing somewhere above it.
  const SourceLine first_line = find_line(launch_.kernel.library->path, first.stamp.pc);
  const SourceLine second_line = find_line(launch_.kernel.library->path, second.stamp.pc);
  const bool swap = first_line.file == second_line.file && first_line.line > second_line.line;
  const Access &subject = swap ? first : second, &object = swap ? second : first;
  const uint32_t line = (swap ? second_line : first_line).line;
  const msl_abi::Thread other = thread_of(object.stamp.thread);
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

using msl_abi::Thread;
using msl_abi::Uint3;

namespace {
constexpr uintptr_t kNullPages = 64 * 1024;
}

uint32_t Checker::pc_of(const void* caller) const {
  return static_cast<uint32_t>(static_cast<const char*>(caller) - segments_.base() - 1);  // inside the call instruction
}

Thread Checker::thread_of(uint32_t number) const {
  const uint32_t index = order_.index_in_group(number), group = order_.group_of(number);
  const Uint3 groups = grid_.dispatch.threadgroups_per_grid, size = grid_.dispatch.threads_per_threadgroup,
              threads = grid_.dispatch.threads_per_grid;
  const Uint3 at = {group % groups.x, group / groups.x % groups.y, group / (groups.x * groups.y)};
  // Threadgroups at the grid's edge are smaller.
  const uint32_t x = std::min(size.x, threads.x - at.x * size.x), y = std::min(size.y, threads.y - at.y * size.y);
  Thread thread = {};
  thread.position_in_threadgroup = {index % x, index / x % y, index / (x * y)};
  thread.threadgroup_position = at;
  thread.position_in_grid = {at.x * size.x + index % x, at.y * size.y + index / x % y, at.z * size.z + index / (x * y)};
  return thread;
}

namespace {

// Returns "element 12 of 8 of buffer 'x', 16 bytes after its end"; bytes where it is no whole number of elements.
std::string describe(int64_t offset, size_t size, uint32_t element, const std::string& name) {
  const auto bytes = static_cast<int64_t>(size);
  const bool whole = element > 1 && offset % element == 0 && bytes % element == 0;
  std::string text = (whole ? "element " : "byte ") + std::to_string(whole ? offset / element : offset) + " of " +
                     std::to_string(whole ? bytes / element : bytes) + " of " + name;
  if (offset < 0) text += ", " + plural(static_cast<uint64_t>(-offset), "byte") + " before its start";
  if (offset == bytes) text += ", right after its end";
  if (offset > bytes) text += ", " + plural(static_cast<uint64_t>(offset - bytes), "byte") + " after its end";
  return text;
}

}  // namespace

// Returns "" where the address is near no memory that the kernel was given.
std::string Checker::describe_place(const char* address) const {
  if (is_shared(address, 1)) {
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
    const std::string what = best_site >= kThreadgroupArguments
                                 ? "threadgroup argument " + std::to_string(best_site - kThreadgroupArguments)
                                 : "a threadgroup variable";
    return describe(address - best->address, best->bytes, 1, what);
  }
  const View* view = map_.nearest(address);
  return view ? describe(address - view->copy, view->size, view->element, view->name) : "";
}

void Checker::out_of_bounds(const char* address, uint32_t size, bool write, const void* caller) {
  const Lane& lane = *Threadgroup::current();
  const Block* block = map_.find(address);
  const std::string place = describe_place(address), what = plural(size, "byte");
  if (write && block && allowed_in_buffer(*block, address, size, false))
    fail("write to read-only memory", pc_of(caller), lane.thread,
         "writes " + what + " at " + place + ", which is const or constant");
  if (write && segments_.contain(address, size))
    fail("write to read-only memory", pc_of(caller), lane.thread, "writes " + what + " to a program-scope constant");
  const bool is_private = address >= lane.stack.base - Stacks::kGuard && address < lane.stack.top + Stacks::kGuard;
  const char* kind = write ? "out-of-bounds write" : "out-of-bounds read";
  fail(kind, pc_of(caller), lane.thread,
       (write ? "writes " : "reads ") + what +
           (reinterpret_cast<uintptr_t>(address) < kNullPages ? " through a null pointer"
            : !place.empty()                                  ? " out of bounds, at " + place
            : is_private                                      ? " out of bounds, beyond the thread's own variables"
                                                              : " at an address that is in no buffer and near none"));
}

void Checker::misaligned(const char* address, uint32_t size, bool write, const void* caller) {
  const std::string place = describe_place(address);
  fail("misaligned access", pc_of(caller), Threadgroup::current()->thread,
       (write ? "writes " : "reads ") + plural(size, "byte") + " at " + (place.empty() ? "an address" : place) +
           " that is no multiple of " + std::to_string(size));
}

// ---- findings of the compiler's checks ------------------------------------------------------------------------------

void Checker::found(const msl_abi::Finding& finding, const void* caller) {
  settle();
  const Thread& thread = Threadgroup::current()->thread;
  if (finding.kind == msl_abi::Finding::kOperation) {
    operations_[thread.index_in_threadgroup] = {finding.index, finding.count, pc_of(caller)};
    return;
  }
  std::string type = finding.type;
  if (type.size() > 1 && type.front() == '\'') type = type.substr(1, type.size() - 2);
  const std::string of_type = type.empty() ? "" : " (" + type + ")";
  const auto fail = [&](const char* kind, const std::string& what) { this->fail(kind, pc_of(caller), thread, what); };
  using msl_abi::Finding;
  switch (finding.kind) {
    case Finding::kIndex:
      fail("out-of-bounds index",
           "uses index " + std::to_string(finding.index) + " of " + plural(finding.count, "element") + of_type);
    case Finding::kReadBeyond: fail("out-of-bounds read", "reads a " + type + " beyond a variable's end");
    case Finding::kWriteBeyond: fail("out-of-bounds write", "writes a " + type + " beyond a variable's end");
    case Finding::kDivision: fail("integer division by zero", "divides an integer by zero, or the smallest one by -1");
    case Finding::kNoReturn: fail("trap", "reaches the end of a function that returns a value");
    case Finding::kSlice:
      fail("out-of-bounds slice", "makes a slice that reaches " + std::to_string(finding.index) +
                                      ", where a dimension has " + plural(finding.count, "element"));
    case Finding::kUnwritten:
      fail("unwritten element", "uses element " + std::to_string(finding.index) + " of the " +
                                    plural(finding.count, "element") +
                                    " that it has of a cooperative tensor, which nothing has written");
    case Finding::kScope:
      fail("divided scope", "is at an operation on tensors, to which " + std::to_string(finding.index) + " of the " +
                                plural(finding.count, "thread") + " of its scope come");
    case Finding::kStop: fail("trap", "ends the program, by abort() or the like");
    default: fail("trap", "reaches code that must not be reached");
  }
}

Fault Checker::fault(const GarbageRead& read) const { return fault(read.kind, read.pc, read.thread, read.what, 0); }

Fault Checker::fault(const char* kind, uint32_t pc, const Thread& thread, const std::string& what,
                     uint32_t line) const {
  const SourceLine found = find_line(launch_.kernel.library->path, pc);
  if (!line) line = found.line;
  const std::string kernel = launch_.kernel.kernel->name;
  std::string where = describe(launch_.kernel);
  if (line) where += ", " + (found.file.empty() ? "line " : found.file + ":") + std::to_string(line);
  const std::string message = where + ": " + kind + ": thread " + text(thread.position_in_threadgroup) +
                              " of threadgroup " + text(thread.threadgroup_position) + " " + what;
  return Fault(kind, kernel, found.file, line, thread, message);
}

void Checker::fail(const char* kind, uint32_t pc, const Thread& thread, const std::string& what, uint32_t line) {
  is_pending_ = false;
  const Fault fault = this->fault(kind, pc, thread, what, line);
  // On a fiber the whole group is abandoned where it stands; after the group's end an exception is enough.
  if (Threadgroup::current()->simdgroup) group_.abandon(std::make_exception_ptr(fault));
  throw fault;
}

}  // namespace metalcore::simulator
