// causal_conv1d: convolutions of each channel along time, with the state before the first position, and their step.
#include "../../../kernels/sequence/causal_conv1d.h"

#include "../common/common.h"
#include "../normalization/norms.h"

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <tuple>

namespace metalcore {
namespace {

struct Conv {
  Tensor weight;  // contiguous, as the bias
  MaybeTensor bias;
  int64_t channels, width;
  const char* variant() const { return width <= 4 ? "_narrow_" : "_wide_"; }
};

Conv conv_of(const char* op, const Tensor& x, const Tensor& weight, const MaybeTensor& bias) {
  check_float(op, "x", x);
  check(x.dim() == 3, "metalcore::", op, ": x must have 3 dimensions, and is ", shape_text(x));
  check_same_device(op, "weight", weight, x);
  const ScalarType type = weight.scalar_type();
  check(type == x.scalar_type() || type == ScalarType::Float, "metalcore::", op, ": weight must be ",
        dtype_name(x.scalar_type()), " or float32, not ", dtype_name(type));
  check(weight.dim() == 2 && weight.size(0) == x.size(1) && weight.size(1) >= 2 && weight.size(1) <= CONV1D_WIDTH,
        "metalcore::", op, ": weight must be [", x.size(1), ", 2 to ", CONV1D_WIDTH, "], not ", shape_text(weight));
  if (bias) {
    check_same_device(op, "bias", *bias, x);
    check_same_dtype(op, "bias", *bias, weight);
    check(bias->dim() == 1 && bias->size(0) == x.size(1), "metalcore::", op, ": bias must be [", x.size(1), "], not ",
          shape_text(*bias));
  }
  return {as_contiguous(weight), as_contiguous(bias), x.size(1), weight.size(1)};
}

void put_strides(int64_t (&strides)[3], const Tensor& x) { std::copy_n(x.strides().data(), 3, strides); }

// The result has its channels side by side if x has, and is contiguous otherwise.
Tensor result_of(const Tensor& x) {
  const int64_t channels = x.size(1), length = x.size(2);
  if (x.stride(1) != 1) return new_like(x);
  const int64_t strides[3] = {channels * length, 1, channels};
  return new_strided(x.sizes(), Sizes(strides, 3), x.scalar_type(), x);
}

void check_int32(const char* op, const char* argument, const Tensor& numbers, const Tensor& x, Sizes sizes) {
  check_same_device(op, argument, numbers, x);
  const auto found = numbers.sizes();
  check(numbers.scalar_type() == ScalarType::Int && found.size() == sizes.size() &&
            std::equal(found.begin(), found.end(), sizes.begin()),
        "metalcore::", op, ": ", argument, " must be int32 of the shape ", shape_text(sizes), ", and is ",
        dtype_name(numbers.scalar_type()), " of ", shape_text(numbers));
}

// What groups positions into sequences, and what comes before these.
struct Sequences {
  MaybeTensor numbers;
  uint32_t sequencing;
  int64_t count;
};

Sequences sequences_of(const char* op, const Tensor& x, const MaybeTensor& seq_idx, const MaybeTensor& cu_seqlens,
                       const MaybeTensor& state, int64_t width) {
  Sequences found{std::nullopt, CONV1D_WHOLE, x.size(0)};
  check(!seq_idx || (!cu_seqlens && !state), "metalcore::", op,
        ": seq_idx goes neither with cu_seqlens nor with initial_state");
  if (seq_idx) {
    const int64_t sizes[2] = {x.size(0), x.size(2)};
    check_int32(op, "seq_idx", *seq_idx, x, Sizes(sizes, 2));
    found = {as_contiguous(*seq_idx), CONV1D_NUMBERS, x.size(0)};
  }
  if (cu_seqlens) {
    check(cu_seqlens->dim() == 1 && cu_seqlens->size(0) >= 1 && x.size(0) == 1, "metalcore::", op,
          ": cu_seqlens must be a vector of sequences' ends after 0, and x have one batch entry; they are ",
          shape_text(*cu_seqlens), " and ", shape_text(x));
    check_int32(op, "cu_seqlens", *cu_seqlens, x, cu_seqlens->sizes());
    found = {as_contiguous(*cu_seqlens), CONV1D_ENDS, cu_seqlens->size(0) - 1};
  }
  if (state) {
    check_same_device(op, "initial_state", *state, x);
    check_same_dtype(op, "initial_state", *state, x);
    check(state->dim() == 3 && state->size(0) == found.count && state->size(1) == x.size(1) &&
              state->size(2) == width - 1,
          "metalcore::", op, ": initial_state must be [", found.count, ", ", x.size(1), ", ", width - 1, "], not ",
          shape_text(*state));
  }
  return found;
}

CausalConv1dParams params_of(const Conv& conv, const Sequences& sequences, const Tensor& x, const MaybeTensor& state,
                             bool silu) {
  check(x.size(2) <= INT32_MAX - 2 * CONV1D_POSITIONS, "metalcore::causal_conv1d: ", x.size(2),
        " positions are more than kernels can count");
  CausalConv1dParams params{
      .channels = grid_side(conv.channels),
      .length = grid_side(x.size(2)),
      .width = grid_side(conv.width),
      .segments = grid_side(ceil_div<int64_t>(x.size(2), CONV1D_POSITIONS)),
      .tiles = 1,
      .sequencing = sequences.sequencing,
      .sequences = grid_side(sequences.count),
      .wide = conv.weight.scalar_type() == ScalarType::Float,
      .has_bias = conv.bias.has_value(),
      .has_state = state.has_value(),
      .silu = silu,
  };
  put_strides(params.x, x);
  if (state) put_strides(params.state, *state);
  return params;
}

uint32_t channel_blocks(const Conv& conv) { return grid_side(ceil_div<int64_t>(conv.channels, CONV1D_CHANNELS)); }

void note(const char* op, const Conv& conv, uint32_t segments, uint32_t tiles) {
  gpu::note_plan(op, conv.width <= 4 ? "narrow" : "wide", [&] {
    return std::to_string(segments) + " threadgroups for " + std::to_string(tiles * CONV1D_POSITIONS) +
           " positions each of " + std::to_string(CONV1D_CHANNELS) + " channels";
  });
}

// Whether kernels of vectors can have x and the tensors beside it, and which axis has neighbours in memory.
enum class Vectors { None, Channels, Positions };
Vectors vectors_of(const Conv& conv, const CausalConv1dParams& params, std::initializer_list<const Tensor*> tensors) {
  if (params.sequencing != CONV1D_WHOLE || params.has_state || conv.width > CONV1D_NARROW ||
      !aligned16(conv.weight, 0, 0))
    return Vectors::None;
  const auto along = [&](int axis) {
    return std::all_of(tensors.begin(), tensors.end(), [&](const Tensor* x) {
      const auto step = [&](int of) { return x->size(of) == 1 ? 0 : x->stride(of); };
      return x->stride(axis) == 1 && step(3 - axis) <= INT32_MAX && aligned16(*x, step(3 - axis), x->size(axis)) &&
             aligned16(*x, step(0), 0);
    });
  };
  return along(1) ? Vectors::Channels : along(2) ? Vectors::Positions : Vectors::None;
}
const char* axis_name(Vectors vectors) { return vectors == Vectors::Channels ? "channels" : "positions"; }

// The longest walk that leaves enough threadgroups, of which there are threadgroups(positions): of `most` positions, a
// half of them, a quarter, and so on, but at least `least`.
template <typename F>
int64_t walk_of(const Tensor& x, int64_t most, int64_t least, F threadgroups) {
  int64_t positions = most;
  while (positions > least && threadgroups(positions) < gpu::parallelism(x).fill_threadgroups) positions /= 2;
  return positions;
}

int64_t positions_of_vector(const Tensor& x) { return 16 / x.element_size(); }

void note_vectors(const char* op, Vectors vectors, const CausalConv1dParams& params) {
  gpu::note_plan(op, axis_name(vectors), [&] {
    return "neighbours are " + std::string(axis_name(vectors)) + ", and walks have " + std::to_string(params.run) +
           " positions";
  });
}

void record_vectors(const Conv& conv, CausalConv1dParams params, const Tensor& x, const Tensor& y, Vectors vectors) {
  const bool by_channels = vectors == Vectors::Channels;
  const int64_t across = by_channels ? conv.channels / CONV1D_ACROSS : conv.channels;
  const int64_t side = by_channels ? 1 : positions_of_vector(x);
  // A walk along channels computes as many positions at once as have 16 bytes of a channel.
  const int64_t most = by_channels ? 16 : side * CONV1D_VECTORS, least = positions_of_vector(x);
  params.run = grid_side(walk_of(x, most, least, [&](int64_t positions) {
    return across * ceil_div<int64_t>(params.length, positions) * x.size(0) / CONV1D_THREADS;
  }));
  params.segments = ceil_div(params.length, params.run);
  note_vectors("causal_conv1d", vectors, params);
  uint32_t beside = 1;  // threads of a threadgroup that have one channel
  while (beside < std::min(params.segments, uint32_t{CONV1D_THREADS})) beside *= 2;
  gpu::record(y, [&](gpu::Recording& recording) {
    recording.kernel("causal_conv1d_", axis_name(vectors), "_", suffix(x.scalar_type()));
    recording.buffer(0, x).buffer(1, conv.weight).buffer(2, conv.bias).buffer(3, y).bytes(4, params);
    if (by_channels)
      recording.dispatch_threads({grid_side(across * params.segments * x.size(0))}, {CONV1D_THREADS});
    else
      recording.dispatch_threads({params.segments, params.channels, grid_side(x.size(0))},
                                 {beside, CONV1D_THREADS / beside});
  });
}

// Sets how the derivative's kernels of vectors walk, and returns the number of their threads.
int64_t plan_vectors_backward(CausalConv1dParams& params, const Tensor& x, Vectors vectors) {
  const int64_t length = params.length, batch = x.size(0);
  if (vectors == Vectors::Channels) {  // the walks of a threadgroup follow each other
    constexpr int64_t kWalks = CONV1D_BACK_THREADS / 32;
    const int64_t columns = 32 * CONV1D_BACK_BYTES / x.element_size();
    const int64_t blocks = ceil_div<int64_t>(params.channels, columns) * batch;
    const int64_t run =
        walk_of(x, 128, 8, [&](int64_t positions) { return blocks * ceil_div(length, positions * kWalks); });
    params.segments = grid_side(ceil_div(length, run * kWalks));
    params.run = grid_side(ceil_div(length, params.segments * kWalks));
    return blocks * params.segments * CONV1D_BACK_THREADS;
  }
  const int64_t step = 32 * positions_of_vector(x), walks = params.channels * batch;
  params.run = grid_side(walk_of(x, 16 * step, step, [&](int64_t positions) {
    return walks * ceil_div(length, positions) * 32 / CONV1D_THREADS;
  }));
  params.segments = ceil_div(params.length, params.run);
  return walks * params.segments * 32;
}

Tensor causal_conv1d(const Tensor& x, const Tensor& weight, const MaybeTensor& bias, const MaybeTensor& seq_idx,
                     const MaybeTensor& cu_seqlens, const MaybeTensor& state, bool silu) {
  const char* op = "causal_conv1d";
  const Conv conv = conv_of(op, x, weight, bias);
  const Sequences sequences = sequences_of(op, x, seq_idx, cu_seqlens, state, conv.width);
  const Tensor y = result_of(x);
  if (y.numel() == 0) return y;
  CausalConv1dParams params = params_of(conv, sequences, x, state, silu);
  put_strides(params.out, y);
  if (const Vectors vectors = vectors_of(conv, params, {&x, &y}); vectors != Vectors::None) {
    record_vectors(conv, params, x, y, vectors);
    return y;
  }
  note(op, conv, params.segments, 1);
  gpu::record(y, [&](gpu::Recording& recording) {
    recording.kernel("causal_conv1d", conv.variant(), suffix(x.scalar_type()));
    recording.buffer(0, x).buffer(1, conv.weight).buffer(2, conv.bias).buffer(3, sequences.numbers);
    recording.buffer(4, state).buffer(5, y).bytes(6, params);
    recording.dispatch_threadgroups({grid_side(int64_t{channel_blocks(conv)} * params.segments * x.size(0))},
                                    {CONV1D_THREADS});
  });
  return y;
}

// The gradients of x, weight, bias and initial_state. Those that do not exist or are not wanted are empty.
std::tuple<Tensor, Tensor, Tensor, Tensor> causal_conv1d_backward(
    const Tensor& grad, const Tensor& x, const Tensor& weight, const MaybeTensor& bias, const MaybeTensor& seq_idx,
    const MaybeTensor& cu_seqlens, const MaybeTensor& state, bool silu, bool parameters_wanted) {
  const char* op = "causal_conv1d_backward";
  const Conv conv = conv_of(op, x, weight, bias);
  const Sequences sequences = sequences_of(op, x, seq_idx, cu_seqlens, state, conv.width);
  check_same_device(op, "grad", grad, x);
  check_same_dtype(op, "grad", grad, x);
  check_same_shape(op, "grad", grad, x);
  const auto gradient_of = [&](const Tensor& parameter, bool wanted) {
    const int64_t none[1] = {0};
    return new_tensor(wanted ? parameter.sizes() : Sizes(none, 1), parameter.scalar_type(), x);
  };
  const Tensor gx = result_of(x);
  Tensor gw = gradient_of(weight, parameters_wanted);
  Tensor gb = gradient_of(bias ? *bias : weight, parameters_wanted && bias);
  Tensor gstate = gradient_of(state ? *state : x, state.has_value());
  // Sequences without positions have no part in anything.
  if (state && (cu_seqlens || gx.numel() == 0)) torch::stable::zero_(gstate);
  if (gx.numel() == 0) {
    torch::stable::zero_(gw);
    torch::stable::zero_(gb);
    return {gx, gw, gb, gstate};
  }
  CausalConv1dParams params = params_of(conv, sequences, x, state, silu);
  put_strides(params.grad, grad);
  put_strides(params.out, gx);
  params.parameters_wanted = parameters_wanted;
  const auto parts_of = [&] {
    const int64_t chunks = int64_t{params.segments} * x.size(0);
    return new_tensor({parameters_wanted ? chunks * (gw.numel() + gb.numel()) : 0}, ScalarType::Float, x);
  };
  const auto add_parts = [&](gpu::Recording& recording, const Tensor& parts) {
    if (parameters_wanted)
      record_column_sums(recording, parts, int64_t{params.segments} * x.size(0), gw, given_if(bias.has_value(), gb));
  };
  if (const Vectors vectors = vectors_of(conv, params, {&grad, &x, &gx}); vectors != Vectors::None) {
    const int64_t threads = plan_vectors_backward(params, x, vectors);
    note_vectors(op, vectors, params);
    const Tensor parts = parts_of();
    gpu::record(gx, [&](gpu::Recording& recording) {
      recording.kernel("causal_conv1d_", axis_name(vectors), "_backward_", suffix(x.scalar_type()));
      recording.buffer(0, grad).buffer(1, x).buffer(2, conv.weight).buffer(3, conv.bias).buffer(4, gx);
      recording.buffer(5, parts).bytes(6, params);
      const uint32_t side = vectors == Vectors::Channels ? CONV1D_BACK_THREADS : CONV1D_THREADS;
      recording.dispatch_threads({grid_side(threads)}, {side});
      add_parts(recording, parts);
    });
    return {gx, gw, gb, gstate};
  }
  // A threadgroup takes so many positions that there are enough threadgroups, and few sums to add up.
  constexpr int64_t kGroups = 1024, kTiles = 8;
  const int64_t groups = int64_t{params.segments} * channel_blocks(conv) * x.size(0);
  params.tiles = grid_side(std::clamp<int64_t>(groups / kGroups, 1, std::min<int64_t>(kTiles, params.segments)));
  params.segments = ceil_div(params.segments, params.tiles);
  note(op, conv, params.segments, params.tiles);
  const Tensor parts = parts_of();
  gpu::record(gx, [&](gpu::Recording& recording) {
    recording.kernel("causal_conv1d_backward", conv.variant(), suffix(x.scalar_type()));
    recording.buffer(0, grad).buffer(1, x).buffer(2, conv.weight).buffer(3, conv.bias).buffer(4, sequences.numbers);
    recording.buffer(5, state).buffer(6, gx).buffer(7, gstate).buffer(8, parts).bytes(9, params);
    recording.dispatch_threadgroups({grid_side(int64_t{channel_blocks(conv)} * params.segments * x.size(0))},
                                    {CONV1D_THREADS});
    add_parts(recording, parts);
  });
  return {gx, gw, gb, gstate};
}

int64_t channels_of_word(const Tensor& x) { return 4 / x.element_size(); }

// Whether the kernel for one position and states of three or four has these tensors: channels lie side by side, and
// begin at multiples of a word.
bool takes_step(const Conv& conv, const Tensor& x, const Tensor& state, const Tensor& y) {
  const int64_t kept = state.size(2), side = channels_of_word(x);
  const auto has_words = [&](const Tensor& tensor) {
    return reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 4 == 0 && tensor.stride(0) % side == 0;
  };
  return x.size(2) == 1 && conv.width <= CONV1D_NARROW && (kept == 3 || kept == 4) && conv.channels % side == 0 &&
         x.stride(1) == 1 && y.stride(1) == 1 && state.stride(1) == kept && state.stride(2) == 1 && has_words(x) &&
         has_words(state) && has_words(y) && aligned16(conv.weight, 0, 0);
}

Tensor causal_conv1d_update(const Tensor& x, const Tensor& state, const Tensor& weight, const MaybeTensor& bias,
                            bool silu, const MaybeTensor& counts, const MaybeTensor& rows) {
  const char* op = "causal_conv1d_update";
  const Conv conv = conv_of(op, x, weight, bias);
  check_same_device(op, "conv_state", state, x);
  check_same_dtype(op, "conv_state", state, x);
  check(state.dim() == 3 && state.size(1) == x.size(1) && state.size(2) >= conv.width - 1 &&
            (rows || state.size(0) == x.size(0)),
        "metalcore::", op, ": conv_state must be [", x.size(0), ", ", x.size(1), ", ", conv.width - 1,
        " or more], not ", shape_text(state));
  check(std::max(state.size(0), state.size(2)) <= INT32_MAX / 2 && x.size(2) <= INT32_MAX / 2, "metalcore::", op,
        ": there are more positions or rows than kernels can count");
  const int64_t batch[1] = {x.size(0)};
  if (counts) check_int32(op, "cache_seqlens", *counts, x, Sizes(batch, 1));
  if (rows) check_int32(op, "conv_state_indices", *rows, x, Sizes(batch, 1));
  const Tensor y = result_of(x);
  if (y.numel() == 0) return y;
  CausalConv1dUpdateParams params{
      .channels = grid_side(conv.channels),
      .length = grid_side(x.size(2)),
      .width = grid_side(conv.width),
      .states = grid_side(state.size(0)),
      .state_length = grid_side(state.size(2)),
      .is_ring = counts.has_value(),
      .has_rows = rows.has_value(),
      .wide = conv.weight.scalar_type() == ScalarType::Float,
      .has_bias = conv.bias.has_value(),
      .silu = silu,
  };
  put_strides(params.x, x);
  put_strides(params.out, y);
  put_strides(params.state, state);
  const MaybeTensor given_counts = as_contiguous(counts), given_rows = as_contiguous(rows);
  if (!counts && takes_step(conv, x, state, y)) {
    gpu::note_plan(op, "step", [&] { return "a thread has the channels of a word"; });
    gpu::record(y, [&](gpu::Recording& recording) {
      recording.kernel("causal_conv1d_step_", std::to_string(state.size(2)), "_", suffix(x.scalar_type()));
      recording.buffer(0, x).buffer(1, state).buffer(2, conv.weight).buffer(3, conv.bias);
      recording.buffer(4, given_rows).buffer(5, y).bytes(6, params);
      const uint32_t words = grid_side(conv.channels / channels_of_word(x));
      recording.dispatch_threads({words, grid_side(x.size(0))}, {std::min(words, uint32_t{CONV1D_THREADS})});
    });
    return y;
  }
  gpu::note_plan(op, conv.width <= 4 ? "narrow" : "wide", [&] { return "a thread has a channel"; });
  gpu::record(y, [&](gpu::Recording& recording) {
    recording.kernel("causal_conv1d_update", conv.variant(), suffix(x.scalar_type()));
    recording.buffer(0, x).buffer(1, state).buffer(2, conv.weight).buffer(3, conv.bias);
    recording.buffer(4, given_counts).buffer(5, given_rows).buffer(6, y).bytes(7, params);
    recording.dispatch_threads({params.channels, grid_side(x.size(0))}, {std::min(params.channels, 256u)});
  });
  return y;
}

}  // namespace
}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) {
  m.def(
      "causal_conv1d(Tensor x, Tensor weight, Tensor? bias, Tensor? seq_idx, Tensor? cu_seqlens, "
      "Tensor? initial_state, bool silu) -> Tensor");
  m.def(
      "causal_conv1d_backward(Tensor grad, Tensor x, Tensor weight, Tensor? bias, Tensor? seq_idx, "
      "Tensor? cu_seqlens, Tensor? initial_state, bool silu, bool parameters_wanted) -> "
      "(Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "causal_conv1d_update(Tensor x, Tensor(a!) conv_state, Tensor weight, Tensor? bias, bool silu, "
      "Tensor? cache_seqlens, Tensor? conv_state_indices) -> Tensor");
}

METALCORE_KERNELS(m) {
  m.impl<&metalcore::causal_conv1d>("causal_conv1d");
  m.impl<&metalcore::causal_conv1d_backward>("causal_conv1d_backward");
  m.impl<&metalcore::causal_conv1d_update>("causal_conv1d_update");
}
