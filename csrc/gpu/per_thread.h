// The calling thread's T. It is made on first use, and the thread's end destroys it. Destructors that run later, of
// static objects or of other thread_local ones, may call metalcore too. They get a new T, which is never destroyed.
#pragma once

#include <utility>

namespace metalcore::gpu {

template <typename T>
T& per_thread() {
  static constinit thread_local T* object = nullptr;
  struct End {
    ~End() { delete std::exchange(object, nullptr); }
  };
  if (!object) {
    object = new T;
    static thread_local End end;
    static_cast<void>(end);
  }
  return *object;
}

}  // namespace metalcore::gpu
