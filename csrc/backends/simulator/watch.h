// Ends dispatches that nobody waits for any longer: a handler of a signal raised in Python (Ctrl-C), or they have taken
// METALCORE_TIMEOUT seconds.
//
// One thread watches all dispatches. It wants to be heard by a thread that runs a kernel where that must stop, and now
// and then by the one that called for the dispatch, which then lets Python's handlers run. It says so in a flag, and
// sends a signal, whose handler leaves the kernel in the middle (Threadgroup::pause) for the worker's own context.
// There look() tells whether the kernel goes on where it was.
#pragma once

#include <atomic>
#include <cstdint>

namespace metalcore::simulator {

// What becomes of a dispatch.
enum class Verdict : uint8_t {
  kGoOn,
  kGiveUp,  // another thread knows why, and says so
  kTimedOut,
  kInterrupted,  // by Ctrl-C, while a thread that Python does not interrupt waits for the dispatch
};

// A thread as it is watched. Times are in nanoseconds; that of its beginning names a dispatch.
struct Watched;

// Thrown on a thread whose part in a dispatch nobody waits for.
struct GivenUp {};

// A dispatch, from beginning to end, on the thread that calls for it. May be nested: handlers of signals run kernels.
class Watch {
 public:
  Watch();  // throws Interrupted where a signal is waiting
  ~Watch();
  Watch(const Watch&) = delete;
  void restart();  // from here on it counts

 private:
  Watched* thread_;
  Watched* outer_caller_;
  int64_t outer_;
};

// The calling thread runs pieces of a dispatch of another one.
class Help {
 public:
  struct Dispatch {
    Watched* caller = nullptr;
    int64_t begun = 0;
  };
  static Dispatch current();  // what the calling thread takes part in
  explicit Help(const Dispatch& dispatch);
  ~Help();
  Help(const Help&) = delete;
};

// Whether look() has something to say to this thread. Costs a load; may be asked in a signal handler.
bool wanted();
// Not from a signal handler, nor on a fiber. Throws Interrupted where a handler of Python's raised.
Verdict look();
// Ends what the calling thread takes part in, on all threads.
void give_up();

// Seconds after which a dispatch is given up; 0 for never. METALCORE_TIMEOUT at first. Throws std::invalid_argument.
double timeout();
void set_timeout(double seconds);

}  // namespace metalcore::simulator
