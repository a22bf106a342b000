#include "watch.h"

#include "fault.h"
#include "process_wide.h"
#include "interpreter.h"
#include "threadgroup.h"
#include "trap.h"

#include "../../gpu/per_thread.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

namespace metalcore::simulator {

struct Watched {
  pthread_t thread;
  bool is_main = false;  // Python's handlers of signals run on it
  std::atomic<bool> wanted{false};
  std::atomic<Watched*> caller{nullptr};  // the thread whose dispatch it takes part in, perhaps itself
  std::atomic<int64_t> dispatch{0};       // that dispatch; 0 where there is none
  // As a caller: the dispatch that must end, why, when Python's handlers could run last, and how often Ctrl-C had been
  // pressed when the dispatch began.
  std::atomic<int64_t> ended{0};
  std::atomic<Verdict> why{Verdict::kGoOn};
  std::atomic<int64_t> asked{0};
  std::atomic<uint32_t> interrupts{0};
};

namespace {

using std::chrono::milliseconds;

constexpr milliseconds kTick(25), kSoon(2), kPatience(100), kIdle(1000);

int64_t nanoseconds(milliseconds time) { return std::chrono::nanoseconds(time).count(); }
int64_t now() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

// initial-exec: signal handlers read it.
__attribute__((tls_model("initial-exec"))) thread_local Watched* mine = nullptr;

std::atomic<int64_t> limit{-1};  // in nanoseconds; -1: the environment has not been read

int64_t to_limit(double seconds) {
  if (!(seconds >= 0) || seconds > 1e9)
    throw std::invalid_argument("metalcore: a timeout is a number of seconds from 0 (none) to 1e9");
  return static_cast<int64_t>(std::ceil(seconds * 1e9));
}

int64_t limit_of_environment() {
  const char* text = std::getenv("METALCORE_TIMEOUT");
  if (!text || !*text) return 0;
  char* end;
  const double seconds = std::strtod(text, &end);
  if (*end || !(seconds >= 0) || seconds > 1e9)
    throw std::invalid_argument("metalcore: METALCORE_TIMEOUT must be a number of seconds, got '" + std::string(text) +
                                "'");
  return to_limit(seconds);
}

int64_t current_limit() {
  int64_t found = limit.load(std::memory_order_relaxed);
  if (found < 0) limit.store(found = limit_of_environment(), std::memory_order_relaxed);
  return found;
}

// The thread that watches, and all threads that it may have to call.
class Watchman {
 public:
  void add(Watched* thread) {
    std::lock_guard lock(mutex_);
    threads_.push_back(thread);
  }
  void remove(Watched* thread) {
    std::lock_guard lock(mutex_);
    threads_.erase(std::remove(threads_.begin(), threads_.end(), thread), threads_.end());
  }

  // A dispatch has begun.
  void wake() {
    if (!asleep_.load(std::memory_order_seq_cst)) return;
    std::lock_guard lock(mutex_);
    if (started_) return wake_.notify_one();
    try {
      std::thread([this] { live(); }).detach();
      started_ = true;
    } catch (const std::system_error&) {  // the system has no more threads: the next dispatch asks again
    }
  }

 private:
  void live() {
    sigset_t every_signal;
    sigfillset(&every_signal);
    pthread_sigmask(SIG_BLOCK, &every_signal, nullptr);
    std::unique_lock lock(mutex_);
    asleep_.store(false, std::memory_order_relaxed);
    for (int64_t busy = now();;) {
      bool found = false;
      const milliseconds pause = watch(found);
      const int64_t time = now();
      if (found) busy = time;
      if (time - busy < nanoseconds(kIdle)) {
        lock.unlock();
        std::this_thread::sleep_for(pause);
        lock.lock();
        continue;
      }
      listen_to_interrupts(false);
      asleep_.store(true, std::memory_order_seq_cst);
      wake_.wait(lock, [&] {
        return std::any_of(threads_.begin(), threads_.end(),
                           [](const Watched* t) { return t->dispatch.load(std::memory_order_seq_cst) != 0; });
      });
      asleep_.store(false, std::memory_order_relaxed);
      busy = now();
    }
  }

  // Calls the threads that must stop or let handlers run; `found` is set where there is a dispatch. Returns the time
  // until the next look.
  milliseconds watch(bool& found) {
    milliseconds pause = kTick;
    bool listen = false;
    const int64_t time = now(), longest = limit.load(std::memory_order_relaxed);
    for (Watched* thread : threads_) {
      const int64_t dispatch = thread->dispatch.load(std::memory_order_seq_cst);
      Watched* caller = thread->caller.load(std::memory_order_acquire);
      if (!dispatch || !caller) continue;
      found = true;
      if (longest > 0 && time - dispatch > longest && caller->ended.load(std::memory_order_relaxed) != dispatch) {
        caller->why.store(Verdict::kTimedOut, std::memory_order_relaxed);
        caller->ended.store(dispatch, std::memory_order_release);
      }
      const bool lasts = time - dispatch > nanoseconds(kPatience);
      listen |= lasts && !caller->is_main;
      const bool ends = caller->ended.load(std::memory_order_relaxed) == dispatch;
      if (!ends && !(thread == caller && lasts && asks(*thread, time))) continue;
      thread->wanted.store(true, std::memory_order_release);
      pthread_kill(thread->thread, kPause);
      pause = kSoon;  // it may be where it cannot be paused
    }
    listen_to_interrupts(listen);
    return pause;
  }

  static bool asks(const Watched& caller, int64_t time) {
    if (!caller.is_main) return interrupts() != caller.interrupts.load(std::memory_order_relaxed);
    return time - caller.asked.load(std::memory_order_relaxed) > nanoseconds(kPatience);
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<Watched*> threads_;
  std::atomic<bool> asleep_{true};
  bool started_ = false;
};

// Owns a thread's Watched, which the watchman of this process knows.
class Registration {
 public:
  ~Registration() {
    mine = nullptr;
    if (watchman_ == &process_wide<Watchman>()) watchman_->remove(&watched_);
  }
  Watched* get() {
    Watchman* watchman = &process_wide<Watchman>();
    if (watchman == watchman_) return &watched_;
    watched_.thread = pthread_self();
    watched_.is_main = gettid() == getpid();
    watchman->add(&watched_);
    watchman_ = watchman;  // the parent's or, in a forked child, a new one
    return mine = &watched_;
  }

 private:
  Watched watched_;
  Watchman* watchman_ = nullptr;
};

Watched* this_thread() { return gpu::per_thread<Registration>().get(); }

void take_part(Watched* thread, Watched* caller, int64_t dispatch) {
  thread->caller.store(caller, std::memory_order_release);
  thread->dispatch.store(dispatch, std::memory_order_seq_cst);
  thread->wanted.store(false, std::memory_order_relaxed);
}

// On Python's main thread it lets Python's handlers run; on another one it tells whether Ctrl-C ends the dispatch.
Verdict ask_python(Watched& caller) {
  caller.asked.store(now(), std::memory_order_relaxed);
  const int64_t dispatch = caller.dispatch.load(std::memory_order_relaxed);
  const auto end = [&](Verdict why) {
    caller.why.store(why, std::memory_order_relaxed);
    caller.ended.store(dispatch, std::memory_order_release);
    return why;
  };
  if (caller.is_main) {
    try {
      run_python_handlers();
    } catch (...) {
      end(Verdict::kGiveUp);
      throw;
    }
    caller.asked.store(now(), std::memory_order_relaxed);
    return Verdict::kGoOn;
  }
  const uint32_t pressed = interrupts();
  if (pressed == caller.interrupts.load(std::memory_order_relaxed)) return Verdict::kGoOn;
  caller.interrupts.store(pressed, std::memory_order_relaxed);
  return interrupts_raise() ? end(Verdict::kInterrupted) : Verdict::kGoOn;
}

}  // namespace

Watch::Watch() : thread_(this_thread()) {
  current_limit();
  int64_t begin = now();
  if (thread_->is_main && begin - thread_->asked.load(std::memory_order_relaxed) > nanoseconds(kPatience)) {
    thread_->asked.store(begin, std::memory_order_relaxed);
    run_python_handlers();
  }
  outer_caller_ = thread_->caller.load(std::memory_order_relaxed);
  outer_ = thread_->dispatch.load(std::memory_order_relaxed);
  restart();
  process_wide<Watchman>().wake();
}

Watch::~Watch() { take_part(thread_, outer_caller_, outer_); }

void Watch::restart() {
  if (!thread_->is_main) thread_->interrupts.store(interrupts(), std::memory_order_relaxed);
  take_part(thread_, thread_, now());
}

Help::Dispatch Help::current() {
  const Watched* thread = mine;
  return {thread->caller.load(std::memory_order_relaxed), thread->dispatch.load(std::memory_order_relaxed)};
}
Help::Help(const Dispatch& dispatch) { take_part(this_thread(), dispatch.caller, dispatch.begun); }
Help::~Help() { take_part(mine, nullptr, 0); }

bool wanted() { return mine && mine->wanted.load(std::memory_order_acquire); }

Verdict look() {
  Watched& thread = *mine;
  thread.wanted.store(false, std::memory_order_relaxed);
  Watched* caller = thread.caller.load(std::memory_order_relaxed);
  if (!caller) return Verdict::kGoOn;
  if (caller->ended.load(std::memory_order_acquire) == thread.dispatch.load(std::memory_order_relaxed))
    return caller->why.load(std::memory_order_relaxed);
  return caller == &thread ? ask_python(thread) : Verdict::kGoOn;
}

void give_up() {
  const Help::Dispatch current = Help::current();
  if (!current.caller || current.caller->ended.load(std::memory_order_acquire) == current.begun) return;
  current.caller->why.store(Verdict::kGiveUp, std::memory_order_relaxed);
  current.caller->ended.store(current.begun, std::memory_order_release);
}

double timeout() { return static_cast<double>(current_limit()) / 1e9; }
void set_timeout(double seconds) { limit.store(to_limit(seconds), std::memory_order_relaxed); }

}  // namespace metalcore::simulator
