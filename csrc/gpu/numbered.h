// Objects that Python knows by a number.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

namespace metalcore::gpu {

template <typename T>
class Numbered {
 public:
  explicit Numbered(const char* what) : what_(what) {}

  int64_t add(std::shared_ptr<T> object) {
    const std::lock_guard lock(mutex_);
    by_number_.emplace(next_, std::move(object));
    return next_++;
  }

  void remove(int64_t number) {
    std::shared_ptr<T> removed;  // freed without the lock
    const std::lock_guard lock(mutex_);
    if (auto found = by_number_.find(number); found != by_number_.end()) {
      removed = std::move(found->second);
      by_number_.erase(found);
    }
  }

  std::shared_ptr<T> get(int64_t number) {
    const std::lock_guard lock(mutex_);
    auto found = by_number_.find(number);
    if (found == by_number_.end())
      throw std::invalid_argument("metalcore: there is no " + std::string(what_) + " " + std::to_string(number));
    return found->second;
  }

 private:
  const char* const what_;
  std::mutex mutex_;
  std::map<int64_t, std::shared_ptr<T>> by_number_;
  int64_t next_ = 1;
};

}  // namespace metalcore::gpu
