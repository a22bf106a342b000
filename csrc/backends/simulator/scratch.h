// The scratch of the workers. It is kept from one dispatch to the next, so there are as many as ever ran at once.
#pragma once

#include "process_wide.h"
#include "threadgroup.h"

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace metalcore::simulator {

class Scratch {
 public:
  Scratch() {
    std::lock_guard lock(idle_.mutex);
    if (idle_.groups.empty()) {
      group_ = std::make_unique<Threadgroup>();
    } else {
      group_ = std::move(idle_.groups.back());
      idle_.groups.pop_back();
    }
  }
  ~Scratch() {
    std::lock_guard lock(idle_.mutex);
    idle_.groups.push_back(std::move(group_));
  }
  Threadgroup* operator->() const { return group_.get(); }
  Threadgroup& operator*() const { return *group_; }

 private:
  struct Idle {
    std::mutex mutex;
    std::vector<std::unique_ptr<Threadgroup>> groups;
  };
  Idle& idle_ = process_wide<Idle>();
  std::unique_ptr<Threadgroup> group_;
};

}  // namespace metalcore::simulator
