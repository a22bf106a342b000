// A T that reuses the memory of this thread's last one.
#pragma once

#include "per_thread.h"

#include <memory>
#include <utility>

namespace metalcore::gpu {

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
