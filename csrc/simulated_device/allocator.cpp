#include "allocator.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/Exception.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <unordered_set>

#include "queue.h"

namespace metalcore::simulated_device {
namespace {

// The figures about memory that torch.mps and torch.accelerator report.
class Account {
 public:
  void add(size_t bytes) {
    const size_t now = current_ += bytes;
    total_ += bytes;
    size_t peak = peak_;
    while (now > peak && !peak_.compare_exchange_weak(peak, now)) {
    }
  }
  void subtract(size_t bytes) { current_ -= bytes; }
  void restart_total() { total_ = current_.load(); }
  void restart_peak() { peak_ = current_.load(); }
  size_t current() const { return current_; }

  c10::CachingAllocator::Stat stat() const {
    c10::CachingAllocator::Stat stat;
    stat.current = static_cast<int64_t>(current_.load());
    stat.peak = static_cast<int64_t>(peak_.load());
    stat.allocated = static_cast<int64_t>(total_.load());
    stat.freed = stat.allocated - stat.current;
    return stat;
  }

 private:
  std::atomic<size_t> current_{0}, peak_{0}, total_{0};
};

Account account;
std::atomic<size_t> limit{SIZE_MAX};

// The blocks that are allocated now. The object is never destroyed: tensors may outlive the process's static objects.
struct Live {
  std::mutex mutex;
  std::multimap<uintptr_t, size_t> blocks;  // two tensors may have adopted the same CPU storage
};

Live& live() {
  static Live* made = new Live;
  return *made;
}

// One piece of device memory. It is allocated here, or lent by a CPU storage that stays alive with it.
struct Block {
  void* address;
  size_t bytes;
  c10::StorageImpl* lender;
};

void release_block(void* context) {
  auto* block = static_cast<Block*>(context);
  if (block->lender) {
    c10::raw::intrusive_ptr::decref(block->lender);
  } else {
    c10::free_cpu(block->address);
  }
  delete block;
}

c10::DataPtr make_block(void* address, size_t bytes, c10::StorageImpl* lender) {
  account.add(bytes);
  {
    const std::lock_guard<std::mutex> lock(live().mutex);
    live().blocks.emplace(reinterpret_cast<uintptr_t>(address), bytes);
  }
  const auto free = [](void* context) {
    auto* block = static_cast<Block*>(context);
    account.subtract(block->bytes);
    {
      const std::lock_guard<std::mutex> lock(live().mutex);
      live().blocks.erase(live().blocks.find(reinterpret_cast<uintptr_t>(block->address)));
    }
    if (!queue || !queue->freed(block->address, &release_block, block)) release_block(block);
  };
  c10::DataPtr made(address, new Block{address, bytes, lender}, free, kDevice);
  if (queue) queue->allocated(address, bytes);
  return made;
}

class DeviceAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    TORCH_CHECK(bytes <= limit && account.current() <= limit - bytes,
                "MPS backend out of memory (MPS allocated: ", account.current(), " bytes, max allowed: ", limit.load(),
                " bytes). Tried to allocate ", bytes, " bytes on the simulated device.");
    return make_block(bytes ? c10::alloc_cpu(bytes) : nullptr, bytes, nullptr);
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {}  // nothing is cached
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0] = stats.reserved_bytes[0] = stats.active_bytes[0] = account.stat();
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override { account.restart_total(); }
  void resetPeakStats(c10::DeviceIndex) override { account.restart_peak(); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) {  // virtual since torch 2.10
    const size_t total = physical_memory();
    return {total - std::min(total, account.current()), total};
  }
};

std::mutex pinned_mutex;
std::unordered_set<const void*> pinned;

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* address = c10::alloc_cpu(bytes);
    if (address) {
      const std::lock_guard<std::mutex> lock(pinned_mutex);
      pinned.insert(address);
    }
    return {address, address, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }

 private:
  static void release(void* address) {
    {
      const std::lock_guard<std::mutex> lock(pinned_mutex);
      pinned.erase(address);
    }
    c10::free_cpu(address);
  }
};

}  // namespace

c10::Allocator* device_allocator() {
  static DeviceAllocator allocator;
  return &allocator;
}

c10::Allocator* pinned_allocator() {
  static PinnedAllocator allocator;
  return &allocator;
}

bool is_pinned(const void* address) {
  const std::lock_guard<std::mutex> lock(pinned_mutex);
  return pinned.count(address) != 0;
}

c10::DataPtr adopt(c10::StorageImpl* cpu) {
  void* address = cpu->nbytes() ? cpu->mutable_data() : nullptr;
  c10::raw::intrusive_ptr::incref(cpu);
  return make_block(address, cpu->nbytes(), cpu);
}

size_t find_allocation(uintptr_t address, uintptr_t* begin) {
  const std::lock_guard<std::mutex> lock(live().mutex);
  auto after = live().blocks.upper_bound(address);
  if (after == live().blocks.begin()) return 0;
  const auto& [first, bytes] = *--after;
  *begin = first;
  return address < first + bytes ? bytes : 0;
}

void range_of_allocations(uintptr_t* low, uintptr_t* high) {
  const std::lock_guard<std::mutex> lock(live().mutex);
  const auto& blocks = live().blocks;
  *low = blocks.empty() ? 0 : blocks.begin()->first;
  *high = blocks.empty() ? 0 : blocks.rbegin()->first + blocks.rbegin()->second;
}

size_t allocated_bytes() { return account.current(); }

size_t physical_memory() {
  static const size_t bytes = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

void set_memory_fraction(double fraction) {
  limit = fraction > 0 ? static_cast<size_t>(fraction * static_cast<double>(physical_memory())) : SIZE_MAX;
}

}  // namespace metalcore::simulated_device
