// Recordings, joined into one, that are submitted many times. Kernels are looked up and arguments packed once; a run
// allocates nothing. Memory may be bound in the place of what was recorded, by slots.
#pragma once

#include "backend.h"
#include "kept.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

namespace metalcore::gpu {

class Replay {
 public:
  // The dispatches of `parts` in their order. All views of the storage of a slot's tensor belong to that slot; the
  // slots' storages differ. It keeps the tensors of all other views. A slot has no memory until one is bound.
  Replay(const std::vector<std::shared_ptr<KeptRecording>>& parts, const std::vector<Tensor>& slots);

  // Has the slots from `first` on use other tensors. Throws std::runtime_error where one does not match its slot, and
  // changes nothing then.
  void bind(size_t first, const std::vector<Tensor>& by);

  // Submits dispatches [first, end). While the thread records, they are recorded.
  void run(size_t first, size_t end);

  size_t size() const { return recording_.dispatches().size(); }

 private:
  struct Place {
    size_t view;
    size_t offset;  // of the view, from the slot's tensor
  };
  struct Slot {
    TensorLayout layout;
    std::vector<Place> places;
    std::optional<Tensor> tensor;
  };

  void count_unbound();

  std::mutex mutex_;
  Recording recording_;
  std::vector<Slot> slots_;
  size_t unbound_ = 0;  // slots that dispatches use and that have no memory
  std::vector<Tensor> others_;
  std::unique_ptr<Prepared> prepared_;  // null where there is nothing to run
};

// Those that Python has made, by their numbers. Throws std::invalid_argument if none has this number.
std::shared_ptr<Replay> replay(int64_t number);
void forget_replay(int64_t number);

}  // namespace metalcore::gpu
