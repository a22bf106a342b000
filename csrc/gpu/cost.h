// How long dispatches may take on the slowest GPU that is supported. macOS aborts a command buffer that keeps the GPU
// for seconds, so the Metal backend bounds what it puts into one, and ops split what would be long by itself.
#pragma once

#include "recording.h"

#include <algorithm>
#include <cstdint>

namespace metalcore::gpu {

// The work that a command buffer or a dispatch may hold, in seconds.
constexpr double kMostSeconds = 0.2;

double seconds(const Recording& recording, const Dispatch& dispatch);

// The most items of a batch in one dispatch: all, or where the backend bounds the work, as many as take less than
// kMostSeconds, or one. It is a multiple of `multiple` where it is less than all.
int64_t at_once(const Recording& recording, int64_t items, Work each, int64_t multiple);

// Consecutive items of a batch, and the work for them.
struct Piece {
  int64_t first, count;
  Work work;
  // The view from the piece's first item on, in a view whose items lie `bytes_each` bytes apart.
  BufferView of(BufferView view, int64_t bytes_each) const {
    const size_t skipped = std::min(view.span, static_cast<size_t>(first * bytes_each));
    return {view.storage, view.offset + skipped, view.span - skipped, view.tensor};
  }
  // The same for a tensor's items.
  BufferView of(const Tensor& tensor, int64_t elements_each) const;
};

// Calls body(piece) for pieces of at_once items. Nearly always there is one piece.
template <typename Body>
void in_pieces(const Recording& recording, int64_t items, Work each, const Body& body, int64_t multiple = 1) {
  const int64_t most = at_once(recording, items, each, multiple);
  for (int64_t first = 0, count; first < items; first += count) {
    count = std::min(most, items - first);
    const auto times = static_cast<double>(count);
    body(Piece{first, count, {times * each.flops, times * each.bytes}});
  }
}

}  // namespace metalcore::gpu
