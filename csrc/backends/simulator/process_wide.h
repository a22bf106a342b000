// The one T of this process. It is made on first use and never destroyed, since kernels may run while the process ends.
// A forked child begins with a new one: the threads that may have been using the parent's do not exist there.
#pragma once

#include <pthread.h>

#include <atomic>

namespace metalcore::simulator {

template <typename T>
T& process_wide() {
  static std::atomic<T*> object{nullptr};
  static const bool made = [] {
    object = new T;
    return pthread_atfork(nullptr, nullptr, [] { object = new T; }) == 0;
  }();
  (void)made;
  return *object.load(std::memory_order_acquire);
}

}  // namespace metalcore::simulator
