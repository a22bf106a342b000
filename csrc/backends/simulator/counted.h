// Counts what kernels do: a library of metalcore/estimates calls the executor at each basic block and before each
// access, for a sample of threadgroups. Memory is afterwards as it was before.
#pragma once

#include "launch.h"

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace metalcore::simulator {

// The kind with which a counting library tells of a block, beside those of msl_abi::AccessKind.
constexpr uint32_t kBlock = 16;

// The places of memory, as accesses are counted.
enum Place : uint32_t { kDeviceMemory, kConstantMemory, kThreadgroupMemory, kThreadMemory, kPlaces };

struct Counts {
  // A basic block of the program. A simdgroup runs it as often as the lane that runs it most.
  struct Block {
    uint64_t simdgroups = 0, lanes = 0;
    uint64_t parted = 0;  // how often the lanes of a simdgroup went different ways at its end
  };
  // An access of the program, to one place of memory.
  struct Site {
    uint64_t simdgroups = 0, lanes = 0, bytes = 0;
    uint64_t lines = 0, sectors = 0;      // of 128 and of 32 bytes that a simdgroup touches
    uint64_t passes = 0;                  // of threadgroup memory: how often a bank is used, at most, by a simdgroup
    std::array<uint64_t, 2> missed = {};  // lines that kCaches do not hold
  };
  struct Buffer {
    uint32_t index = 0;
    uint64_t bytes = 0;              // that are bound
    uint64_t read = 0, written = 0;  // lines, summed over the threadgroups of the sample
    uint64_t distinct = 0;           // lines that any threadgroup of the sample touches
    // The part of a threadgroup's lines that its neighbour along x, y and z touches too; -1 without a neighbour.
    std::array<double, 3> shared = {-1, -1, -1};
  };

  std::string path, kernel;
  msl_abi::Uint3 threads = {}, group = {};
  uint64_t groups = 0, sampled = 0, events = 0;
  uint32_t threadgroup_memory = 0;
  bool ran = false;  // the kernel also ran as a whole, so that its results are there
  std::vector<std::pair<uint32_t, Block>> blocks;
  std::vector<std::pair<uint32_t, std::array<Site, kPlaces>>> sites;
  std::vector<Buffer> buffers;
};
// Bytes of the first-level caches that counting models, one threadgroup at a time.
constexpr uint32_t kCaches[] = {8 * 1024, 64 * 1024};

struct Counting {
  bool on = false;
  uint64_t events = 0;  // of a dispatch: after so many, the threadgroup that runs is the sample's last
  uint64_t whole = 0;   // the most events of a dispatch that also runs as a whole
  std::string family;   // whose tuning rows plans take
  uint32_t cores = 0;   // of that GPU; 0 is the family's usual number
};
const Counting& counting();
// Begins or ends counting, for all threads. `compiler` is as set_compiler's, without the last two arguments.
void set_counting(const Counting& counting);
// What has been counted since the last call, a dispatch each, in order.
std::vector<Counts> take_counts();

// Counts a launch of a counting library. Returns whether the normal library should run it as a whole.
bool execute_counted(const Launch& launch);

const msl_abi::Runtime* counting_runtime();

}  // namespace metalcore::simulator
