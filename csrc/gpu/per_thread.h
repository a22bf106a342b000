// The calling thread's T. It is made on first use, and the thread's end destroys it. Destructors that run later, of
// static objects or of other thread_local ones, may call metalcore too. They get a new T, which is never destroyed.
#pragma once

#include <memory>
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

// A T that reuses the memory of this thread's last one.
template <typename T>
class Spare {
 public:
  Spare() : object_(std::move(kept())) {
    if (!object_) object_ = std::make_unique<T>();
  }
  ~Spare() {
    object_->clear();
    kept() = std::move(object_);
  }
  Spare(const Spare&) = delete;
  T& operator*() { return *object_; }

 private:
  static std::unique_ptr<T>& kept() { return per_thread<std::unique_ptr<T>>(); }

  std::unique_ptr<T> object_;
};

}  // namespace metalcore::gpu
