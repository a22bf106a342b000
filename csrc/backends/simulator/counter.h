// What is counted of one dispatch, while the threads of a threadgroup at a time run on one thread.
#pragma once

#include "counted.h"
#include "threadgroup.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace metalcore::simulator {

// A cache of lines of 128 bytes with 8 ways, of which each forgets the line that was used the longest time ago.
class Cache {
 public:
  explicit Cache(uint32_t bytes) : sets_(bytes / (128 * kWays)) {}
  void clear() { std::fill(sets_.begin(), sets_.end(), Set{}); }
  bool holds(uint64_t line);  // and does afterwards

 private:
  static constexpr uint32_t kWays = 8;
  using Set = std::array<uint64_t, kWays>;  // the one used last comes first; 0 is none
  std::vector<Set> sets_;
};

class Counter final : public Observer {
 public:
  Counter(const Launch& launch, Threadgroup& group);
  ~Counter() override;
  // The counter of the dispatch that this thread runs; nullptr where it runs none.
  static Counter* active() { return active_; }

  void begin_group(uint64_t index, const Grid& grid);
  void end_group();
  Counts finish(const Grid& grid, uint64_t sampled);
  uint64_t events() const { return events_; }

  // The running kernel calls these.
  void block(uint32_t number);
  void access(char* address, uint32_t size, uint32_t kind, uint32_t site);

  void barrier_opens(Threadgroup& group) override;
  void simdgroup_meets(Simdgroup& simdgroup, uint32_t lanes) override;

 private:
  struct Access {
    uint64_t address;
    uint32_t size, site;
    uint32_t time;  // how often the lane has made this access since the simdgroup's trace began
    uint8_t lane, place, buffer, kind;
  };
  // What a simdgroup has accessed since its lanes last met.
  struct Trace {
    std::vector<Access> accesses;
  };
  struct LaneState {
    uint32_t block = ~0u;
    // Its last loads, or stores, in the trace, which the next may continue. Loads of several vectors take turns.
    std::array<size_t, 4> recent = kNothing;
    void forget() { recent = kNothing; }
    static constexpr std::array<size_t, 4> kNothing = {~size_t{0}, ~size_t{0}, ~size_t{0}, ~size_t{0}};
  };
  // A block's runs by each lane of the threadgroup, and by simdgroups the block that came after each of the first runs.
  struct Runs {
    static constexpr uint32_t kFollowed = 64;
    std::vector<uint32_t> count;
    std::vector<std::array<uint32_t, kFollowed>> next;
    std::vector<uint64_t> parted;  // bits of the runs after which lanes differed
  };
  struct Range {
    uint64_t begin, end;
    uint64_t moved;  // to an address at which the allocation that holds it begins with a line
    uint8_t buffer;
    bool constant;
  };

  void settle(uint32_t simdgroup);
  void add(const Access* first, const Access* last);
  void add_range(const void* begin, size_t size, uint32_t buffer, bool constant);
  // The place of an access, its buffer, and how far its address is moved.
  struct Found {
    uint8_t place, buffer;
    uint64_t moved;
  };
  Found find(uint64_t address) const;
  void undo();

  static inline constinit thread_local Counter* active_ = nullptr;
  const Launch& launch_;
  Threadgroup& group_;
  Counter* const outer_;
  std::vector<Range> ranges_;
  uint64_t events_ = 0;
  uint32_t size_ = 0;
  std::vector<LaneState> lanes_;
  std::vector<Trace> traces_;
  std::unordered_map<uint32_t, Runs> runs_;
  std::unordered_map<uint64_t, uint32_t> times_;  // of a lane's accesses at a site, in the trace that is being settled
  std::array<Cache, 2> caches_ = {Cache(kCaches[0]), Cache(kCaches[1])};

  using Lines = std::unordered_set<uint64_t>;
  std::array<Lines, kMaximumBuffers> read_, written_, distinct_, middle_;
  std::array<Counts::Buffer, kMaximumBuffers> buffers_;
  uint64_t middle_index_ = 0, groups_begun_ = 0;
  int neighbour_ = -1;  // the axis along which the threadgroup lies beside the first one

  std::unordered_map<uint32_t, Counts::Block> blocks_;
  std::unordered_map<uint32_t, std::array<Counts::Site, kPlaces>> sites_;

  // What undo() writes back.
  struct Before {
    char* address;
    uint64_t offset;
    uint32_t size;
  };
  std::vector<Before> before_;
  std::vector<char> bytes_before_;
  std::vector<uint64_t> units_;  // of add()
};

}  // namespace metalcore::simulator
