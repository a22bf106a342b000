// Ends dispatches that nobody waits for any longer: a Python signal handler raised an exception (Ctrl-C), or they have
// taken METALCORE_TIMEOUT seconds.
//
// One thread, the watchman, watches all dispatches. It calls a thread that runs a kernel where the kernel must stop.
// Now and then it calls the thread that asked for the dispatch, which then lets Python's handlers run. To call a thread
// it sets a flag (wanted()) and sends a signal, whose handler leaves the kernel in the middle (Threadgroup::pause) for
// the worker's own context. There look() tells whether the kernel goes on where it was.
#pragma once

#include <cstdint>

namespace metalcore::simulator {

// The decision about a dispatch.
enum class Verdict : uint8_t {
  kGoOn,
  kGiveUp,  // another thread knows why, and says so
  kTimedOut,
  kInterrupted,  // by Ctrl-C, while a thread that Python does not interrupt waits for the dispatch
};

// A watched thread. Times are in nanoseconds; a dispatch is named by the time of its beginning.
struct Watched;

// Thrown on a thread when nobody waits for its part in a dispatch any longer.
struct GivenUp {};

// Lives from the beginning of a dispatch to its end, on the thread that asked for it. Watches may be nested: signal
// handlers run kernels.
class Watch {
 public:
  Watch();  // throws Interrupted where the handler of a waiting signal raises
  ~Watch();
  Watch(const Watch&) = delete;
  void restart();  // begins the time of the dispatch anew

 private:
  Watched* thread_;
  Watched* outer_caller_;
  int64_t outer_;
};

// Lives while the calling thread runs pieces of another thread's dispatch.
class Help {
 public:
  struct Dispatch {
    Watched* caller = nullptr;
    int64_t begun = 0;
  };
  static Dispatch current();  // the dispatch that the calling thread takes part in
  explicit Help(const Dispatch& dispatch);
  ~Help();
  Help(const Help&) = delete;
};

// Whether the watchman calls this thread. It costs a load; signal handlers may ask.
bool wanted();
// Decides about the calling thread's dispatch. Signal handlers and fibers must not call it. Throws Interrupted where a
// Python signal handler raised.
Verdict look();
// Ends the dispatch that the calling thread takes part in, on all threads.
void give_up();

// The seconds after which a dispatch is given up, or 0 for no limit. The default is METALCORE_TIMEOUT. Throws
// std::invalid_argument.
double timeout();
void set_timeout(double seconds);

}  // namespace metalcore::simulator
