#include "pool.h"

#include "process_wide.h"
#include "scratch.h"
#include "trap.h"
#include "watch.h"

#include <sched.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <utility>

namespace metalcore::simulator {
namespace {

using Clock = std::chrono::steady_clock;

// How long an idle worker watches for the next job before it sleeps, and the least remaining work for which the caller
// wakes a worker that sleeps.
constexpr auto kSpin = std::chrono::microseconds(30);
constexpr auto kWorthWaking = std::chrono::microseconds(20);

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

uint32_t default_threads() {
  if (const char* text = std::getenv("OMP_NUM_THREADS"))
    if (const int count = std::atoi(text); count > 0) return static_cast<uint32_t>(count);
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return static_cast<uint32_t>(CPU_COUNT(&set));
  return std::max(1u, std::thread::hardware_concurrency());
}

std::atomic<uint32_t> threads{0};

struct Job {
  const std::function<void(Claim&)>* task = nullptr;
  std::atomic<uint64_t> next{0};
  uint64_t count = 0, piece = 1;
  Help::Dispatch dispatch;
  std::mutex failure_mutex;
  std::exception_ptr failure;

  void start(uint64_t total, uint64_t size, const std::function<void(Claim&)>& function) {
    task = &function;
    dispatch = Help::current();
    count = total;
    piece = size;
    failure = nullptr;
    next.store(0, std::memory_order_relaxed);
  }

  bool claim(uint64_t& begin, uint64_t& end) {
    begin = next.fetch_add(piece, std::memory_order_relaxed);
    if (begin >= count) return false;
    end = std::min(begin + piece, count);
    return true;
  }

  void work(Claim& claim) {
    try {
      (*task)(claim);
    } catch (const GivenUp&) {
    } catch (...) {
      fail(std::current_exception());
    }
  }

  void fail(std::exception_ptr reason) {
    next.store(count, std::memory_order_relaxed);
    give_up();
    std::lock_guard lock(failure_mutex);
    if (!failure) failure = reason;
  }
};

struct HelperClaim : Claim {
  explicit HelperClaim(Job& job) : job(job) {}
  bool operator()(uint64_t& begin, uint64_t& end) override { return job.claim(begin, end); }
  Job& job;
};

class Pool {
 public:
  // The caller holds this for the length of its job.
  std::atomic<bool> busy{false};
  Job job;

  // Starts workers until there are `helpers`, and waits until each has all memory that jobs need: when a worker joins
  // its first job, nobody knows. A thread that finds the pool busy starts them too, for its later jobs.
  void start(uint32_t helpers) {
    if (ready_.load(std::memory_order_acquire) >= helpers) return;
    std::unique_lock lock(mutex_);
    try {
      for (; started_ < helpers; ++started_) std::thread([this, index = started_] { live(index); }).detach();
    } catch (const std::system_error&) {  // the system has no more threads: fewer will do
    }
    wake_.wait(lock, [this] { return ready_.load(std::memory_order_relaxed) == started_; });
  }

  // Lets `helpers` workers join the job. Those that watch come by themselves.
  void open(uint32_t helpers) {
    limit_.store(helpers, std::memory_order_relaxed);
    state_.fetch_add(kGeneration | kOpen, std::memory_order_seq_cst);
  }

  void wake() {
    if (asleep_.load(std::memory_order_seq_cst) == 0) return;
    // A worker counts itself asleep under the mutex before it looks at the state for the last time.
    {
      std::lock_guard lock(mutex_);
    }
    wake_.notify_all();
  }

  // Lets no more workers join, and waits for those that have.
  void close() {
    state_.fetch_sub(kOpen, std::memory_order_acq_rel);
    for (uint32_t i = 0; state_.load(std::memory_order_acquire) & kJoined; ++i) {
      if (i < 2000)
        relax();
      else
        sched_yield();
      if (!wanted()) continue;
      try {
        look();  // a worker that is told to end says why
      } catch (...) {
        job.fail(std::current_exception());
      }
    }
  }

 private:
  // The bits of state_: the workers in the job, then whether more may join, then a count of jobs.
  static constexpr uint64_t kJoined = 0xffff, kOpen = 0x10000, kGeneration = 0x20000;

  bool joinable(uint64_t state, uint64_t last, uint32_t index) const {
    return (state & kOpen) && state / kGeneration != last && index < limit_.load(std::memory_order_relaxed);
  }

  // Makes what a job needs of its thread. Returns false where the system has no memory for it.
  static bool prepare() {
    try {
      const Help help({});
      catch_traps();
      const Scratch scratch;
      return true;
    } catch (const std::bad_alloc&) {
      return false;
    }
  }

  void live(uint32_t index) {
    const bool able = prepare();
    {
      std::lock_guard lock(mutex_);
      ready_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    if (!able) return;  // fewer will do
    uint64_t last = 0;  // the generation of the job that this worker did last
    for (;;) {
      uint64_t state = await(index, last);
      if (!state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) continue;
      last = state / kGeneration;
      {
        const Help help(job.dispatch);
        HelperClaim claim(job);
        job.work(claim);
      }
      state_.fetch_sub(1, std::memory_order_release);
    }
  }

  uint64_t await(uint32_t index, uint64_t last) {
    const auto until = Clock::now() + kSpin;
    do {
      for (int i = 0; i < 64; ++i) {
        const uint64_t state = state_.load(std::memory_order_acquire);
        if (joinable(state, last, index)) return state;
        relax();
      }
    } while (Clock::now() < until);
    std::unique_lock lock(mutex_);
    asleep_.fetch_add(1, std::memory_order_seq_cst);
    uint64_t state;
    wake_.wait(lock, [&] { return joinable(state = state_.load(std::memory_order_seq_cst), last, index); });
    asleep_.fetch_sub(1, std::memory_order_relaxed);
    return state;
  }

  uint32_t started_ = 0;            // the mutex guards it
  std::atomic<uint32_t> ready_{0};  // those of them that are prepared, or cannot be
  std::atomic<uint32_t> limit_{0}, asleep_{0};
  std::atomic<uint64_t> state_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
};

// The caller's claim. After its first piece it knows how long the rest will take, and whether to wake workers for it.
struct CallerClaim : Claim {
  CallerClaim(Pool& pool, bool wide) : pool(pool), decided(wide) {
    if (wide) pool.wake();
  }
  bool operator()(uint64_t& begin, uint64_t& end) override {
    if (!decided) {
      const auto now = Clock::now();
      if (pieces++) {
        const uint64_t done = pool.job.next.load(std::memory_order_relaxed);
        const uint64_t remaining = done < pool.job.count ? (pool.job.count - done) / pool.job.piece : 0;
        if ((now - start) / (pieces - 1) * static_cast<int64_t>(remaining) > kWorthWaking) {
          pool.wake();
          decided = true;
        }
      } else {
        start = now;
      }
    }
    return pool.job.claim(begin, end);
  }
  Pool& pool;
  bool decided;
  int64_t pieces = 0;
  Clock::time_point start;
};

void run_alone(uint64_t count, const std::function<void(Claim&)>& task) {
  struct : Claim {
    bool operator()(uint64_t& begin, uint64_t& end) override {
      begin = 0;
      end = std::exchange(count, 0);
      return end > 0;
    }
    uint64_t count = 0;
  } claim;
  claim.count = count;
  task(claim);
}

}  // namespace

uint32_t num_threads() {
  uint32_t count = threads.load(std::memory_order_relaxed);
  if (!count) threads.store(count = default_threads(), std::memory_order_relaxed);
  return count;
}

void set_num_threads(uint32_t count) { threads.store(std::max(count, 1u), std::memory_order_relaxed); }

void parallel(uint64_t count, uint64_t piece, bool wide, const std::function<void(Claim&)>& task) {
  const uint64_t pieces = (count + piece - 1) / piece;
  const auto workers = static_cast<uint32_t>(std::min<uint64_t>(pieces, num_threads()));
  if (workers < 2) return run_alone(count, task);
  Pool& shared = process_wide<Pool>();
  shared.start(workers - 1);
  if (shared.busy.exchange(true, std::memory_order_acquire)) return run_alone(count, task);
  shared.job.start(count, piece, task);
  shared.open(workers - 1);
  CallerClaim claim(shared, wide);
  shared.job.work(claim);
  shared.close();
  const std::exception_ptr failure = std::exchange(shared.job.failure, nullptr);
  shared.busy.store(false, std::memory_order_release);
  if (failure) std::rethrow_exception(failure);
}

}  // namespace metalcore::simulator
