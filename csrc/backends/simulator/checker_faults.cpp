// Faults of a checked dispatch: where in the program, by which thread, at which byte of what.
#include "checker.h"

#include "symbolize.h"
#include "text.h"

#include <algorithm>

namespace metalcore::simulator {

using msl_abi::Thread;
using msl_abi::Uint3;

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
    return "byte offset " + std::to_string(address - best->address) + " of " + what + " of " +
           plural(best->bytes, "byte");
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
    fail("write to read-only memory", pc_of(caller), thread,
         "writes " + plural(size, "byte") + " at " + describe_place(address) + " and is const or constant");
  if (write && segments_.contain(address, size))
    fail("write to read-only memory", pc_of(caller), thread,
         "writes " + plural(size, "byte") + " to a program-scope constant");
  fail(write ? "out-of-bounds write" : "out-of-bounds read", pc_of(caller), thread,
       (write ? "writes " : "reads ") + plural(size, "byte") + " out of bounds, at " + describe_place(address));
}

Fault Checker::fault(const GarbageRead& read) const {
  return fault(read.kind, read.pc, read.thread, read.what, 0);
}

Fault Checker::fault(const char* kind, uint32_t pc, const Thread& thread, const std::string& what,
                     uint32_t line) const {
  const SourceLine found = find_line(launch_.kernel.library->path, pc);
  if (!line) line = found.line;
  const std::string kernel = launch_.kernel.kernel->name;
  std::string where = "kernel '" + kernel + "'";
  if (line) where += ", " + (found.file.empty() ? "line " : found.file + ":") + std::to_string(line);
  const std::string message = where + ": " + kind + ": thread " + text(thread.position_in_threadgroup) +
                              " of threadgroup " + text(thread.threadgroup_position) + " " + what;
  return Fault(kind, kernel, found.file, line, thread, message);
}

void Checker::fail(const char* kind, uint32_t pc, const Thread& thread, const std::string& what, uint32_t line) {
  is_pending_ = false;
  const Fault fault = this->fault(kind, pc, thread, what, line);
  // On a fiber the group is left where it stands; after its end there is only the dispatch to leave.
  if (Threadgroup::current()->simdgroup) group_.abandon(std::make_exception_ptr(fault));
  throw fault;
}

}  // namespace metalcore::simulator
