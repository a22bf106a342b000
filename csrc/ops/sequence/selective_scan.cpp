// selective_scan: state spaces whose steps, inputs and outputs depend on the position, and their next position.
#include "../../../kernels/sequence/selective_scan.h"

#include "../common/common.h"
#include "../normalization/norms.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <tuple>

namespace metalcore {
namespace {

template <size_t N>
void put_strides(int64_t (&strides)[N], const Tensor& x) {
  std::copy_n(x.strides().data(), N, strides);
}

// Checks the shape of an argument, and its dtype: that of `like`, or float32 if `wide` says so, or one of both.
enum class Dtype { Same, Float32, Either };
void check_argument(const char* op, const char* argument, const MaybeTensor& x, const Tensor& like, Dtype dtype,
                    std::initializer_list<int64_t> sizes) {
  if (!x) return;
  check_same_device(op, argument, *x, like);
  const auto found = x->sizes();
  const bool is_wide = x->scalar_type() == ScalarType::Float;
  const bool is_same = x->scalar_type() == like.scalar_type();
  const char* expected = dtype == Dtype::Float32 ? "float32" : dtype_name(like.scalar_type());
  check((dtype == Dtype::Same ? is_same : is_wide || (is_same && dtype == Dtype::Either)) &&
            std::equal(found.begin(), found.end(), sizes.begin(), sizes.end()),
        "metalcore::", op, ": ", argument, " must be ", expected, dtype == Dtype::Either ? " or float32" : "",
        " of the shape ", shape_text(Sizes(sizes.begin(), sizes.size())), ", and is ", dtype_name(x->scalar_type()),
        " of ", shape_text(*x));
}
void check_int32(const char* op, const char* argument, const MaybeTensor& x, const Tensor& like,
                 std::initializer_list<int64_t> sizes) {
  if (!x) return;
  check_same_device(op, argument, *x, like);
  const auto found = x->sizes();
  check(x->scalar_type() == ScalarType::Int && std::equal(found.begin(), found.end(), sizes.begin(), sizes.end()),
        "metalcore::", op, ": ", argument, " must be int32 of the shape ",
        shape_text(Sizes(sizes.begin(), sizes.size())), ", and is ", dtype_name(x->scalar_type()), " of ",
        shape_text(*x));
}

// A tensor of x's shape: its positions are neighbours in memory if x's are, or it is contiguous.
Tensor result_of(const Tensor& x, ScalarType dtype) {
  if (x.stride(1) != 1) return new_tensor(x.sizes(), dtype, x);
  const int64_t length = x.size(1), heads = x.size(2), dim = x.size(3);
  const int64_t strides[4] = {heads * dim * length, 1, dim * length, length};
  return new_strided(x.sizes(), Sizes(strides, 4), dtype, x);
}

const char* padded(int64_t states) { return states <= 16 ? "_16_" : states <= 64 ? "_64_" : "_128_"; }

struct Call {
  Tensor x, dt, A, B, C;
  MaybeTensor D, z, bias, state, numbers;
  SelectiveScanParams params;
  uint32_t blocks;  // parts of a group's channels that a threadgroup has in the derivative
  uint32_t forward_blocks;
  std::string variant;

  bool empty() const { return params.length == 0 || params.batch == 0 || params.channels == 0; }
  Tensor new_states() const { return new_tensor({x.size(0), A.size(0), A.size(1), A.size(2)}, ScalarType::Float, x); }
  // Threadgroups for chunks of the positions.
  uint32_t groups(const SelectiveScanParams& p) const {
    return grid_side(int64_t{p.batch} * p.chunks * p.groups * p.blocks);
  }
};

Call call_of(const char* op, const Tensor& x, const Tensor& dt, const Tensor& A, const Tensor& B, const Tensor& C,
             const MaybeTensor& D, const MaybeTensor& z, const MaybeTensor& bias, const MaybeTensor& state,
             const MaybeTensor& numbers, bool softplus, double low, double high) {
  check_float(op, "x", x);
  check(x.dim() == 4, "metalcore::", op, ": x must be [batch, length, heads, channels], not ", shape_text(x));
  const int64_t batch = x.size(0), length = x.size(1), heads = x.size(2), dim = x.size(3);
  check_argument(op, "dt", dt, x, Dtype::Either, {batch, length, heads, dim});
  check(A.dim() == 3 && A.size(2) <= SCAN_STATES, "metalcore::", op, ": A must be [", heads, ", ", dim, ", up to ",
        SCAN_STATES, "], not ", shape_text(A));
  const int64_t states = A.size(2);
  check_argument(op, "A", A, x, Dtype::Float32, {heads, dim, states});
  check(B.dim() == 4 && B.size(2) > 0 && heads % B.size(2) == 0, "metalcore::", op, ": B must be [", batch, ", ",
        length, ", a number that divides ", heads, ", ", states, "], not ", shape_text(B));
  const int64_t groups = B.size(2);
  check_argument(op, "B", B, x, Dtype::Same, {batch, length, groups, states});
  check_argument(op, "C", C, x, Dtype::Same, {batch, length, groups, states});
  check_argument(op, "D", D, x, Dtype::Float32, {heads, dim});
  check_argument(op, "z", z, x, Dtype::Same, {batch, length, heads, dim});
  check_argument(op, "dt_bias", bias, x, Dtype::Float32, {heads, dim});
  check_argument(op, "initial_states", state, x, Dtype::Float32, {batch, heads, dim, states});
  check_int32(op, "seq_idx", numbers, x, {batch, length});
  check(length <= INT32_MAX / 2, "metalcore::", op, ": ", length, " positions are more than kernels can count");
  Call call{x,
            dt,
            A,
            B,
            C,
            as_contiguous(D),
            z,
            as_contiguous(bias),
            as_contiguous(state),
            as_contiguous(numbers),
            {},
            grid_side(ceil_div<int64_t>(heads / groups * dim, SCAN_CHANNELS(states))),
            0,
            padded(states)};
  // All states of a channel have one rate, as in Mamba 2. A lane has several channels, forward.
  const bool shared = A.stride(2) == 0 && states > 16;
  call.forward_blocks = shared ? ceil_div(call.blocks, uint32_t{SCAN_LANE_CHANNELS}) : call.blocks;
  call.variant = (shared ? "_shared" : "") + call.variant + suffix(x.scalar_type());
  call.params = {
      .batch = grid_side(batch),
      .length = grid_side(length),
      .dim = grid_side(dim),
      .channels = grid_side(heads * dim),
      .groups = grid_side(groups),
      .states = grid_side(states),
      .blocks = call.forward_blocks,
      .tiles = 1,
      .wide_steps = dt.scalar_type() == ScalarType::Float,
      .softplus = softplus,
      .has_skip = D.has_value(),
      .has_gate = z.has_value(),
      .has_bias = bias.has_value(),
      .has_before = state.has_value(),
      .has_numbers = numbers.has_value(),
      .low = static_cast<float>(low),
      .high = static_cast<float>(high),
  };
  put_strides(call.params.x, x);
  put_strides(call.params.step, dt);
  if (z) put_strides(call.params.gate, *z);
  put_strides(call.params.A, A);
  put_strides(call.params.B, B);
  put_strides(call.params.C, C);
  return call;
}

void set_chunks(SelectiveScanParams& p, int64_t chunks) {
  p.chunk = round_up(ceil_div<uint32_t>(p.length, grid_side(chunks)), uint32_t{SCAN_POSITIONS});
  p.chunks = ceil_div(p.length, p.chunk);
}

constexpr int64_t kGroups = 1024;  // threadgroups that fill a GPU

// What each chunk adds to the states, and the factors of the states before it, and for the derivative the gradients of
// these. The carry turns the first and the last into the states before chunks and their gradients behind them.
struct Chunks {
  MaybeTensor states, factors, gradients;
};
Chunks new_chunks(const Call& call) {
  const SelectiveScanParams& p = call.params;
  if (p.chunks == 1) return {};
  const auto scratch = [&](bool wanted) {
    const int64_t count = int64_t{p.chunks} * p.batch * p.channels * p.states;
    return given_if(wanted, new_tensor({wanted ? count : 0}, ScalarType::Float, call.x));
  };
  return {scratch(true), scratch(true), scratch(p.for_derivative)};
}
void record_chunks(gpu::Recording& recording, const Call& call, const Chunks& chunks, const MaybeTensor& grad,
                   const MaybeTensor& after, const MaybeTensor& given_grad, const MaybeTensor& state_grad) {
  SelectiveScanParams params = call.params;
  params.blocks = call.forward_blocks;
  recording.kernel("selective_scan_chunks", call.variant.c_str());
  recording.buffer(0, call.x).buffer(1, call.dt).buffer(2, call.A).buffer(3, call.B).buffer(4, call.C);
  recording.buffer(5, call.z).buffer(6, call.bias).buffer(7, call.numbers).buffer(8, grad);
  recording.buffer(9, chunks.states).buffer(10, chunks.factors).buffer(11, chunks.gradients).bytes(12, params);
  recording.dispatch_threadgroups({call.groups(params)}, {SCAN_THREADS});
  const uint32_t threads = grid_side(int64_t{params.batch} * params.channels * params.states);
  const auto carry = [&](const char* name, const MaybeTensor& given, const MaybeTensor& parts,
                         const MaybeTensor& left) {
    if (threads == 0) return;
    recording.kernel(name);
    recording.buffer(0, given).buffer(1, chunks.factors).buffer(2, parts).buffer(3, left).bytes(4, params);
    recording.dispatch_threads({threads}, {SCAN_THREADS});
  };
  // Forward, has_after says that states are wanted; in the derivative, that their gradients are given.
  if (params.for_derivative) params.has_after = false;
  carry("selective_scan_carry", call.state, chunks.states, after);
  params.has_after = call.params.has_after;
  if (params.for_derivative) carry("selective_scan_carry_back", given_grad, chunks.gradients, state_grad);
}

std::tuple<Tensor, Tensor> selective_scan(const Tensor& x, const Tensor& dt, const Tensor& A, const Tensor& B,
                                          const Tensor& C, const MaybeTensor& D, const MaybeTensor& z,
                                          const MaybeTensor& bias, const MaybeTensor& state, const MaybeTensor& numbers,
                                          bool softplus, double low, double high) {
  const char* op = "selective_scan";
  Call call = call_of(op, x, dt, A, B, C, D, z, bias, state, numbers, softplus, low, high);
  SelectiveScanParams& params = call.params;
  const Tensor out = result_of(x, x.scalar_type());
  Tensor final_state = call.new_states();
  if (call.empty()) {
    if (state && final_state.numel()) torch::stable::copy_(final_state, *state);
    if (!state) torch::stable::zero_(final_state);
    return {out, final_state};
  }
  // Two chunks would take as long as one: each is walked along twice.
  const int64_t walks = int64_t{params.batch} * params.groups * params.blocks;
  const int64_t chunks = std::min<int64_t>(ceil_div(kGroups, walks), ceil_div<int64_t>(params.length, SCAN_POSITIONS));
  set_chunks(params, chunks > 2 ? chunks : 1);
  put_strides(params.out, out);
  params.has_after = true;
  const Chunks parts = new_chunks(call);
  gpu::note_plan(op, params.chunks > 1 ? "chunks" : "walk", [&] {
    return std::to_string(call.groups(params)) + " threadgroups walk along " + std::to_string(params.chunk) +
           " positions each, and " + (params.chunks > 1 ? "twice" : "once");
  });
  gpu::record(out, [&](gpu::Recording& recording) {
    SelectiveScanParams scan = params;
    if (params.chunks > 1) {
      record_chunks(recording, call, parts, std::nullopt, final_state, std::nullopt, std::nullopt);
      scan.has_before = true;
      scan.has_after = false;
    }
    recording.kernel("selective_scan", call.variant.c_str());
    recording.buffer(0, x).buffer(1, dt).buffer(2, A).buffer(3, B).buffer(4, C).buffer(5, call.D).buffer(6, z);
    recording.buffer(7, call.bias).buffer(8, call.numbers).buffer(9, params.chunks > 1 ? parts.states : call.state);
    recording.buffer(10, out).buffer(11, final_state).bytes(12, scan);
    recording.dispatch_threadgroups({call.groups(scan)}, {SCAN_THREADS});
  });
  return {out, final_state};
}

using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// The gradients of x, dt, A, B, C, D, z, dt_bias and initial_states. Those of what is not given are empty.
Gradients selective_scan_backward(const Tensor& grad, const MaybeTensor& grad_state, const Tensor& x, const Tensor& dt,
                                  const Tensor& A, const Tensor& B, const Tensor& C, const MaybeTensor& D,
                                  const MaybeTensor& z, const MaybeTensor& bias, const MaybeTensor& state,
                                  const MaybeTensor& numbers, bool softplus, double low, double high) {
  const char* op = "selective_scan_backward";
  Call call = call_of(op, x, dt, A, B, C, D, z, bias, state, numbers, softplus, low, high);
  SelectiveScanParams& params = call.params;
  check_argument(op, "grad", grad, x, Dtype::Same, {x.size(0), x.size(1), x.size(2), x.size(3)});
  check_argument(op, "grad_state", grad_state, x, Dtype::Float32, {x.size(0), x.size(2), x.size(3), A.size(2)});
  const int64_t none[1] = {0};
  const auto like = [&](const MaybeTensor& given) {
    return new_tensor(given ? given->sizes() : Sizes(none, 1), given ? given->scalar_type() : ScalarType::Float, x);
  };
  const Tensor gx = result_of(x, x.scalar_type()), gdt = result_of(x, dt.scalar_type());
  const Tensor gz = z ? result_of(x, x.scalar_type()) : like(z);
  Tensor gA = like(A), gB = like(B), gC = like(C), gD = like(D), gbias = like(bias), gstate = like(state);
  const Gradients all{gx, gdt, gA, gB, gC, gD, gz, gbias, gstate};
  if (call.empty()) {
    for (Tensor* each : {&gA, &gB, &gC, &gD, &gbias}) torch::stable::zero_(*each);
    if (!grad_state) torch::stable::zero_(gstate);
    if (grad_state && gstate.numel()) torch::stable::copy_(gstate, *grad_state);
    return all;
  }
  set_chunks(params, ceil_div<int64_t>(params.length, SCAN_POSITIONS));
  // A threadgroup takes so many channels that there are enough threadgroups, and few sums of them to add up.
  const int64_t walks = int64_t{params.batch} * params.chunks * params.groups * call.blocks;
  params.tiles = grid_side(std::clamp<int64_t>(walks / kGroups, 1, call.blocks));
  params.blocks = ceil_div(call.blocks, params.tiles);
  params.for_derivative = true;
  params.has_after = grad_state.has_value();
  put_strides(params.grad, grad);
  put_strides(params.out, gx);
  const MaybeTensor given_grad = as_contiguous(grad_state);
  const auto scratch = [&](int64_t size) { return new_tensor({size}, ScalarType::Float, x); };
  const int64_t of_states = int64_t{params.chunks} * params.batch * params.channels * params.states;
  const Chunks parts{scratch(of_states), scratch(of_states), scratch(of_states)};
  const int64_t walked = int64_t{params.batch} * params.chunks;
  const Tensor rate_parts = scratch(walked * params.channels * params.states);
  const Tensor channel_parts = scratch(walked * 2 * params.channels);
  const Tensor row_parts = scratch(params.blocks * (gB.numel() + gC.numel()));
  const Tensor skips = D ? gD : scratch(params.channels), biases = bias ? gbias : scratch(params.channels);
  gpu::note_plan(op, "chunks", [&] {
    return std::to_string(call.groups(params)) + " threadgroups walk along " + std::to_string(SCAN_POSITIONS) +
           " positions each, with " + std::to_string(params.tiles * SCAN_CHANNELS(params.states)) + " channels";
  });
  gpu::record(gx, [&](gpu::Recording& recording) {
    record_chunks(recording, call, parts, grad, std::nullopt, given_grad, gstate);
    recording.kernel("selective_scan_back", call.variant.c_str());
    recording.buffer(0, x).buffer(1, dt).buffer(2, A).buffer(3, B).buffer(4, C).buffer(5, call.D).buffer(6, z);
    recording.buffer(7, call.bias).buffer(8, call.numbers).buffer(9, grad).buffer(10, parts.states);
    recording.buffer(11, parts.gradients).buffer(12, gx).buffer(13, gdt).buffer(14, gz).buffer(15, rate_parts);
    recording.buffer(16, row_parts).buffer(17, channel_parts).bytes(18, params);
    recording.dispatch_threadgroups({call.groups(params)}, {SCAN_THREADS});
    if (params.states > 0) {
      record_column_sums(recording, rate_parts, walked, gA);
      record_column_sums(recording, row_parts, params.blocks, gB, gC);
    }
    if (D || bias) record_column_sums(recording, channel_parts, walked, skips, biases);
  });
  return all;
}

Tensor selective_state_update(const Tensor& state, const Tensor& x, const Tensor& dt, const Tensor& A, const Tensor& B,
                              const Tensor& C, const MaybeTensor& D, const MaybeTensor& z, const MaybeTensor& bias,
                              bool softplus, const MaybeTensor& rows) {
  const char* op = "selective_state_update";
  check_float(op, "x", x);
  check(x.dim() == 3, "metalcore::", op, ": x must be [batch, heads, channels], not ", shape_text(x));
  const int64_t batch = x.size(0), heads = x.size(1), dim = x.size(2);
  check(state.dim() == 4 && (rows || state.size(0) == batch), "metalcore::", op, ": state must be [", batch, ", ",
        heads, ", ", dim, ", states], not ", shape_text(state));
  const int64_t states = state.size(3);
  check_argument(op, "state", state, x, Dtype::Either, {state.size(0), heads, dim, states});
  check_argument(op, "dt", dt, x, Dtype::Either, {batch, heads, dim});
  check_argument(op, "A", A, x, Dtype::Float32, {heads, dim, states});
  check(B.dim() == 3 && B.size(1) > 0 && heads % B.size(1) == 0, "metalcore::", op, ": B must be [", batch,
        ", a number that divides ", heads, ", ", states, "], not ", shape_text(B));
  check_argument(op, "B", B, x, Dtype::Same, {batch, B.size(1), states});
  check_argument(op, "C", C, x, Dtype::Same, {batch, B.size(1), states});
  check_argument(op, "D", D, x, Dtype::Either, {heads, dim});
  check_argument(op, "z", z, x, Dtype::Same, {batch, heads, dim});
  check_argument(op, "dt_bias", bias, x, Dtype::Either, {heads, dim});
  check_int32(op, "state_batch_indices", rows, x, {batch});
  check(state.size(0) <= INT32_MAX, "metalcore::", op, ": there are more rows than kernels can count");
  const Tensor out = new_like(x);
  if (out.numel() == 0) return out;
  const auto is_wide = [](const Tensor& t) { return t.scalar_type() == ScalarType::Float; };
  const auto bytes = static_cast<int64_t>(state.element_size());
  // Whether the states that fill 16 bytes are neighbours, and the first of them lies at a multiple of as many.
  const auto has_vectors = [&](const Tensor& t) {
    const int64_t count = 16 / bytes;
    bool all = states % count == 0 && t.stride(-1) == 1 && t.storage_offset() % count == 0;
    for (int64_t d = 0; d + 1 < t.dim(); ++d) all = all && t.stride(d) % count == 0;
    return all;
  };
  SelectiveStateUpdateParams params{
      .batch = grid_side(batch),
      .heads = grid_side(heads),
      .dim = grid_side(dim),
      .group_heads = grid_side(heads / B.size(1)),
      .states = grid_side(states),
      .rows = grid_side(state.size(0)),
      .has_rows = rows.has_value(),
      .wide_steps = is_wide(dt),
      .wide_skip = D && is_wide(*D),
      .wide_bias = bias && is_wide(*bias),
      .softplus = softplus,
      .has_skip = D.has_value(),
      .has_gate = z.has_value(),
      .has_bias = bias.has_value(),
  };
  put_strides(params.state, state);
  put_strides(params.x, x);
  put_strides(params.step, dt);
  if (z) put_strides(params.gate, *z);
  put_strides(params.A, A);
  put_strides(params.B, B);
  put_strides(params.C, C);
  if (D) put_strides(params.skip, *D);
  if (bias) put_strides(params.bias, *bias);
  const MaybeTensor numbers = as_contiguous(rows);
  const bool shared = A.stride(2) == 0;
  // Kernels for vectors compute places among a head's states in 32 bits.
  const bool vectors = states > 0 && has_vectors(state) && has_vectors(B) && has_vectors(C) &&
                       (shared || has_vectors(A)) && dim * state.stride(2) <= UINT32_MAX;
  const int64_t padded_states = states <= 16 ? 16 : states <= 64 ? 64 : 128;
  const int64_t lanes = vectors ? UPDATE_LANES(padded_states, bytes) : 4;
  const int64_t channels = SCAN_THREADS / lanes * UPDATE_ROWS(lanes, vectors && shared);  // of a threadgroup
  const int64_t parts = ceil_div(dim, channels) * heads;
  // Where rates have more bytes than states, threadgroups walk over batch entries if they stay enough.
  const bool walks = vectors && !shared && padded_states == 16 && bytes == 2;
  const int64_t fill = int64_t{gpu::parallelism(x).fill_threadgroups} * 2;  // these have half of the threads
  params.entries = walks ? grid_side(ceil_div(batch, std::min(batch, ceil_div(fill, parts)))) : 1;
  const std::string size = walks      ? "walk"
                           : !vectors ? "update_any"
                                      : (shared ? "update_shared_" : "update_") + std::to_string(padded_states);
  gpu::note_plan(op, size.c_str(), [&] { return std::to_string(lanes) + " lanes share channels' states"; });
  gpu::record(out, [&](gpu::Recording& recording) {
    recording.kernel("selective_state_", size, "_", suffix(x.scalar_type()), "_", suffix(state.scalar_type()));
    recording.buffer(0, state).buffer(1, x).buffer(2, dt).buffer(3, A).buffer(4, B).buffer(5, C).buffer(6, D);
    recording.buffer(7, z).buffer(8, bias).buffer(9, numbers).buffer(10, out).bytes(11, params);
    recording.dispatch_threadgroups(
        {grid_side(ceil_div(dim, channels)), grid_side(heads), grid_side(ceil_div<int64_t>(batch, params.entries))},
        {SCAN_THREADS});
  });
  return out;
}

}  // namespace
}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) {
  m.def(
      "selective_scan(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? dt_bias, "
      "Tensor? initial_states, Tensor? seq_idx, bool softplus, float low, float high) -> (Tensor, Tensor)");
  m.def(
      "selective_scan_backward(Tensor grad, Tensor? grad_state, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, "
      "Tensor? D, Tensor? z, Tensor? dt_bias, Tensor? initial_states, Tensor? seq_idx, bool softplus, float low, "
      "float high) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "selective_state_update(Tensor(a!) state, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, "
      "Tensor? z, Tensor? dt_bias, bool softplus, Tensor? state_batch_indices) -> Tensor");
}

METALCORE_KERNELS(m) {
  m.impl<&metalcore::selective_scan>("selective_scan");
  m.impl<&metalcore::selective_scan_backward>("selective_scan_backward");
  m.impl<&metalcore::selective_state_update>("selective_state_update");
}
