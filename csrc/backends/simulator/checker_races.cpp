// Finds accesses that race, by the shadow of the memory and the order of the threads, and words the fault.
#include "checker.h"

#include "symbolize.h"
#include "text.h"

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

}  // namespace metalcore::simulator
