// Recordings that outlive their op, and replays of them. Python names both by numbers.
#pragma once

#include "backend.h"
#include "recorder.h"

#include <torch/headeronly/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

namespace metalcore::gpu {

// Keeps a recording, so that Python can show, compare and submit it again. Returns its number.
int64_t keep(std::shared_ptr<KeptRecording> recording);
void forget(int64_t number);
// Throws std::invalid_argument if no recording has this number.
std::shared_ptr<KeptRecording> kept(int64_t number);

// What an op chose its kernels by. A tensor that takes the place of another one must have the same layout.
struct TensorLayout {
  explicit TensorLayout(const Tensor& tensor);
  // The view of a tensor in the place. Throws std::runtime_error where the tensor has another layout.
  BufferView view_of(const Tensor& replacement) const;

  std::vector<int64_t> sizes, strides;
  torch::headeronly::ScalarType dtype;
  int32_t device_type, device_index;
  size_t offset;  // in the storage, in bytes
};

// Recordings, joined into one, that are submitted many times. Kernels are looked up and arguments packed once; a run
// allocates nothing. Memory may be bound in the place of what was recorded, by slots.
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
