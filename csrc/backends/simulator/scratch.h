// The scratch of the threads that run kernels. It is kept from one dispatch to the next. There is one for each of these
// threads, so that a thread which for the first time runs a kernel beside all others finds one too.
#pragma once

#include "process_wide.h"
#include "threadgroup.h"

#include "../../gpu/per_thread.h"

#include <cstddef>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace metalcore::simulator {

class Scratch {
 public:
  Scratch() : group_(idle_.take()) {}
  ~Scratch() { idle_.give(std::move(group_)); }
  Scratch(const Scratch&) = delete;
  Threadgroup* operator->() const { return group_.get(); }
  Threadgroup& operator*() const { return *group_; }

 private:
  class Idle {
   public:
    void join() {
      std::lock_guard lock(mutex_);
      if (made_ == threads_) make();
      ++threads_;
    }
    void leave() {
      std::lock_guard lock(mutex_);
      --threads_;
    }
    std::unique_ptr<Threadgroup> take() {
      std::lock_guard lock(mutex_);
      if (groups_.empty()) make();  // for a thread's second kernel: signal handlers run kernels
      auto group = std::move(groups_.back());
      groups_.pop_back();
      return group;
    }
    void give(std::unique_ptr<Threadgroup> group) {
      std::lock_guard lock(mutex_);
      groups_.push_back(std::move(group));
    }

   private:
    void make() {
      groups_.reserve(made_ + 1);  // give() never allocates
      groups_.push_back(std::make_unique<Threadgroup>());
      ++made_;
    }

    std::mutex mutex_;
    std::vector<std::unique_ptr<Threadgroup>> groups_;
    size_t made_ = 0, threads_ = 0;
  };

  // Counts the calling thread among the threads of this process.
  class Membership {
   public:
    ~Membership() {
      if (idle_ == &process_wide<Idle>()) idle_->leave();
    }
    Idle& get() {
      Idle& idle = process_wide<Idle>();  // a forked child has a new one
      if (idle_ != &idle) {
        idle.join();
        idle_ = &idle;
      }
      return idle;
    }

   private:
    Idle* idle_ = nullptr;
  };

  Idle& idle_ = gpu::per_thread<Membership>().get();
  std::unique_ptr<Threadgroup> group_;
};

}  // namespace metalcore::simulator
