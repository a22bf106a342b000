// quantize(numbers, type): rows of numbers as packed weights, and an integer that is 1 where blocks of the type cannot
// hold a number, and else 0.
#include "formats.h"

#include "../../../kernels/quant/quant.h"

#include <algorithm>
#include <limits>
#include <tuple>
#include <vector>

namespace metalcore {

namespace {

// A type that can be made. Groups share a scale; 0 where a block's scale is its own.
struct Packing {
  QuantFormat format;
  int64_t group;
};

Packing packing_of(int64_t type) {
  static const QuantFormat made_only[] = {{34, "TQ1_0", 256, 54}, {35, "TQ2_0", 256, 66}};
  for (const QuantFormat& format : made_only)
    if (format.number == type) return {format, 0};
  const QuantFormat& format = quant_format("quantize", type);
  if (format.block == 32) return {format, 0};
  const std::string_view name = format.name;
  return {format, name == "Q4_K" || name == "Q5_K" || name == "IQ4_XS" ? 32 : 16};
}

// Scales and minima are float16. Those of MXFP4 are powers of 2, which are enough for all finite numbers.
float most_of(const QuantFormat& format) {
  return std::string_view(format.name) == "MXFP4" ? std::numeric_limits<float>::max() : 65504.0f;
}

bool has_minima(const QuantFormat& format) { return format.number == 10 || format.number == 12 || format.number == 13; }

std::tuple<Tensor, Tensor> quantize(const Tensor& numbers, int64_t type) {
  const auto [format, group] = packing_of(type);
  check_float("quantize", "numbers", numbers);
  check(numbers.dim() > 0 && numbers.size(-1) % format.block == 0, "metalcore::quantize: blocks of ", format.block,
        " do not divide rows of shape ", shape_text(numbers), " as ", format.name);
  std::vector<int64_t> sizes(numbers.sizes().begin(), numbers.sizes().end());
  sizes.back() = sizes.back() / format.block * format.bytes;
  const Tensor packed = new_tensor({sizes.data(), sizes.size()}, ScalarType::Byte, numbers);
  Tensor unheld = new_tensor({}, ScalarType::Int, numbers);
  torch::stable::zero_(unheld);
  gpu::note_plan("quantize", group ? "groups" : "blocks", [&, &format = format, &group = group] {
    return group ? "a thread searches the scale of " + std::to_string(group) + " numbers as " + format.name
                 : std::string("a thread packs a block of ") + format.name;
  });
  if (packed.numel() == 0) return {packed, unheld};

  const Tensor from = from_multiple_of_16(numbers);
  const int64_t count = from.numel(), item = static_cast<int64_t>(from.element_size());
  const int64_t most = std::min<int64_t>(count, QUANTIZE_AT_ONCE);
  MaybeTensor scales, chosen;
  if (group) {
    const int64_t groups = most / group, floats = groups * (has_minima(format) ? 2 : 1);
    scales = new_tensor({&floats, 1}, ScalarType::Float, numbers);
    chosen = new_tensor({&groups, 1}, ScalarType::Int, numbers);
  }
  gpu::record(packed, [&, &format = format, &group = group](gpu::Recording& recording) {
    for (int64_t first = 0; first < count; first += most) {
      const int64_t part = std::min(most, count - first);
      const auto beyond = [](gpu::BufferView view, int64_t bytes) {
        return gpu::BufferView{view.storage, view.offset + bytes, view.span - bytes, view.tensor};
      };
      const gpu::BufferView x = beyond(gpu::view_of(from), first * item);
      const gpu::BufferView y = beyond(gpu::view_of(packed), first / format.block * format.bytes);
      const auto dispatch = [&](uint32_t index, int64_t threads, double operations) {
        recording.bytes(index, QuantizeParams{grid_side(threads), quant_dtype(numbers.scalar_type()), most_of(format)});
        recording.work(operations * static_cast<double>(part), static_cast<double>(part * item));
        recording.dispatch_threadgroups({grid_side(ceil_div<int64_t>(threads, QUANTIZE_THREADS))}, {QUANTIZE_THREADS});
      };
      if (group) {
        recording.kernel("quantize_search_", format.name).buffer(0, x).buffer(1, *scales).buffer(3, unheld);
        dispatch(2, part / group, QUANTIZE_SEARCH_OPERATIONS);
        recording.kernel("quantize_fit_", format.name).buffer(0, x).buffer(1, *scales).buffer(2, *chosen);
        dispatch(3, part / group, QUANTIZE_FIT_OPERATIONS);
        recording.kernel("quantize_", format.name).buffer(0, x).buffer(1, *scales).buffer(2, *chosen).buffer(3, y);
        dispatch(4, part / QUANT_SLICE, QUANTIZE_OPERATIONS);
      } else {
        recording.kernel("quantize_", format.name).buffer(0, x).buffer(1, y).buffer(3, unheld);
        const bool searches = format.number == 20;
        dispatch(2, part / format.block, searches ? QUANTIZE_SEARCH_OPERATIONS : QUANTIZE_OPERATIONS);
      }
    }
  });
  return {packed, unheld};
}

}  // namespace
}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) { m.def("quantize(Tensor numbers, int type) -> (Tensor, Tensor)"); }

METALCORE_KERNELS(m) { m.impl<&metalcore::quantize>("quantize"); }
METALCORE_KERNELS_ON_CPU(m) { m.impl<&metalcore::quantize>("quantize"); }
