// gated_delta_rule: a matrix-valued state along time, which each position decays, corrects and reads. Without
// corrections it is gated linear attention, in which beta weighs the positions.
#include "../../../kernels/sequence/delta_step.h"

#include "../common/rows.h"
#include "linear_scan.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <tuple>

namespace metalcore {
namespace {

struct Tuning {
  const char* family;
  bool units = false;  // units that multiply tensors make the products of walks along chunks
};
// Not to be measured elsewhere: what the kernels say in plain MSL serves tests.
const gpu::Table<Tuning> tuning_table("delta_rule", {}, {{.family = "baseline"}, {.family = "hopper", .units = true}});

const char* padded(int64_t size) { return size <= 64 ? "_64_" : size <= 128 ? "_128_" : "_256_"; }
int64_t padded_size(int64_t size) { return size <= 64 ? 64 : size <= 128 ? 128 : 256; }

// Elements of a head have to be side by side.
Tensor with_rows(const Tensor& x) { return x.size(3) == 1 || x.stride(3) == 1 ? x : torch::stable::contiguous(x); }

void put_strides(int64_t (&strides)[3], const Tensor& x) { std::copy_n(x.strides().data(), 3, strides); }

void check_float32_of(const char* op, const char* argument, const Tensor& x, const Tensor& like, Sizes sizes) {
  check_same_device(op, argument, x, like);
  const auto found = x.sizes();
  check(x.scalar_type() == ScalarType::Float && found.size() == sizes.size() &&
            std::equal(found.begin(), found.end(), sizes.begin()),
        "metalcore::", op, ": ", argument, " must be float32 of the shape ", shape_text(sizes), ", and is ",
        dtype_name(x.scalar_type()), " of ", shape_text(x));
}

Call call_of(const char* op, const Tensor& q, const Tensor& k, const Tensor& v, const MaybeTensor& g,
             const MaybeTensor& beta, const MaybeTensor& state, const MaybeTensor& ends, const MaybeTensor& skip,
             double scale, bool normalized, bool corrects) {
  check_float(op, "q", q);
  check(q.dim() == 4 && q.size(3) <= DELTA_SIZE, "metalcore::", op, ": q must be [batch, length, heads, up to ",
        DELTA_SIZE, "], not ", shape_text(q));
  check_same_device(op, "k", k, q);
  check_same_dtype(op, "k", k, q);
  check_same_shape(op, "k", k, q);
  check_same_device(op, "v", v, q);
  check_same_dtype(op, "v", v, q);
  const int64_t batch = q.size(0), length = q.size(1), heads = q.size(2), keys = q.size(3);
  check(v.dim() == 4 && v.size(0) == batch && v.size(1) == length &&
            (heads ? v.size(2) % heads == 0 : v.size(2) == 0) && v.size(3) <= DELTA_SIZE,
        "metalcore::", op, ": v must be [", batch, ", ", length, ", a multiple of ", heads, ", up to ", DELTA_SIZE,
        "], not ", shape_text(v));
  const int64_t value_heads = v.size(2), values = v.size(3);
  const int64_t by_head[3] = {batch, length, value_heads};
  const bool by_channel = g && g->dim() == 4;
  const int64_t by_key[4] = {batch, length, value_heads, keys};
  if (g) check_float32_of(op, "g", *g, q, by_channel ? Sizes(by_key, 4) : Sizes(by_head, 3));
  if (beta) check_float32_of(op, "beta", *beta, q, Sizes(by_head, 3));
  const int64_t of_skip[2] = {value_heads, values};
  if (skip) check_float32_of(op, "skip", *skip, q, Sizes(of_skip, 2));
  check(!skip || (!ends && keys > 0), "metalcore::", op, ": skip needs keys, and no cu_seqlens");
  check(!corrects || beta, "metalcore::", op, ": corrections need beta");
  int64_t sequences = batch;
  if (ends) {
    check_same_device(op, "cu_seqlens", *ends, q);
    check(ends->dim() == 1 && ends->size(0) >= 1 && batch == 1 && ends->scalar_type() == ScalarType::Int,
          "metalcore::", op,
          ": cu_seqlens must be an int32 vector of sequences' ends after 0, and q have one batch entry; they are ",
          dtype_name(ends->scalar_type()), " of ", shape_text(*ends), " and ", shape_text(q));
    sequences = ends->size(0) - 1;
  }
  const int64_t of_states[4] = {sequences, value_heads, keys, values};
  if (state) check_float32_of(op, "initial_state", *state, q, Sizes(of_states, 4));
  check(length <= INT32_MAX / 2, "metalcore::", op, ": ", length, " positions are more than kernels can count");
  const int64_t places = ends ? 0 : ceil_div<int64_t>(length, DELTA_CHUNK);
  Call call{with_rows(q),
            with_rows(k),
            with_rows(v),
            as_contiguous(g),
            as_contiguous(beta),
            as_contiguous(state),
            as_contiguous(ends),
            as_contiguous(skip),
            {},
            ends ? length / DELTA_CHUNK + sequences : places * batch,
            batch * length * value_heads * values * keys * sequences == 0};
  call.params = {
      .batch = grid_side(batch),
      .length = grid_side(length),
      .heads = grid_side(heads),
      .value_heads = grid_side(value_heads),
      .keys = grid_side(keys),
      .values = grid_side(values),
      .sequences = grid_side(sequences),
      .places = grid_side(places),
      .packed = ends.has_value(),
      .normalized = normalized,
      .has_gate = g.has_value(),
      .by_channel = by_channel,
      .weighted = beta.has_value(),
      .corrects = corrects,
      .has_skip = skip.has_value(),
      .has_state = state.has_value(),
      .row_blocks = 1,
      .segments = 1,
      .shares = 1,
      .scale = static_cast<float>(scale),
  };
  call.params.wide = is_wide(call.q) && is_wide(call.k);
  put_strides(call.params.q, call.q);
  put_strides(call.params.k, call.k);
  put_strides(call.params.v, call.v);
  return call;
}

Tensor state_of(const Call& call) {
  const DeltaRuleParams& p = call.params;
  return new_tensor({p.sequences, p.value_heads, p.keys, p.values}, ScalarType::Float, call.q);
}

// Threadgroups for all columns of the states of sequences.
uint32_t column_groups(const DeltaRuleParams& p) {
  const int64_t columns = (p.keys <= 128 ? 8 : 4) * (DELTA_THREADS / 32);
  return grid_side(ceil_div<int64_t>(p.values, columns) * p.value_heads * p.sequences);
}

// How kernels walk along chunks: fewer columns make more threadgroups, where there are too few for a GPU.
struct Columns {
  const char* name;
  uint32_t groups;
};
Columns chunk_columns(const Call& call) {
  const DeltaRuleParams& p = call.params;
  const auto groups = [&](int64_t columns) {
    return grid_side(ceil_div<int64_t>(p.values, columns) * p.value_heads * p.sequences);
  };
  if (p.keys > 128) return {"_256x16_", groups(16)};
  if (groups(32) < gpu::parallelism(call.q).fill_threadgroups) return {"_128x16_", groups(16)};
  return {"_128x32_", groups(32)};
}

// Whether the walks along chunks have their products by units. `rows` are v or its gradients.
bool by_units(const Call& call, const Tensor& rows) {
  const DeltaRuleParams& p = call.params;
  return tuning_table(call.q).units && gpu::multiplies_held_tensors(call.q) &&
         call.q.scalar_type() == ScalarType::BFloat16 && p.keys == 128 && p.values == 128 && p.corrects &&
         !p.has_skip && p.wide && is_wide(call.v) && is_wide(rows);
}

uint32_t unit_groups(const DeltaRuleParams& p) {
  return grid_side(int64_t{p.values / DELTA_UNIT_COLUMNS} * p.value_heads * p.sequences);
}

// What the kernels by chunks need of each chunk and value head: an inverse, scores, and factors of the positions. For
// units the elements of matrices are three bfloats.
struct Chunks {
  Tensor inverses, scores, factors;
  bool by_units;
};
std::optional<Chunks> chunks_of(const Call& call, bool chunked, const Tensor& rows) {
  // With fewer positions than a chunk has, most of its products are of zeros. Gates by channel have no products of
  // positions that are the same for all keys.
  if (!chunked || call.params.by_channel || call.params.length < DELTA_CHUNK) return std::nullopt;
  const int64_t count = call.chunks * call.params.value_heads * DELTA_CHUNK;
  const auto scratch = [&](int64_t size) { return new_tensor({count * size}, ScalarType::Float, call.q); };
  const bool units = by_units(call, rows);
  const int64_t row = units ? DELTA_UNIT_PARTS / DELTA_CHUNK / 2 : DELTA_CHUNK;
  return Chunks{scratch(row), scratch(row), scratch(DELTA_FACTORS), units};
}

struct Forward {
  MaybeTensor out, state, errors, kept;
};
void record_chunks(gpu::Recording& recording, const Call& call, const Chunks& chunks, DeltaRuleParams params,
                   const Forward& results) {
  params.for_derivative = results.errors.has_value();
  const char* type = suffix(call.q.scalar_type());
  recording.kernel("gated_delta_rule_inverse", chunks.by_units ? "_parts_" : "_", type);
  recording.buffer(0, call.q).buffer(1, call.k).buffer(2, call.g).buffer(3, call.beta).buffer(4, call.ends);
  recording.buffer(5, chunks.inverses).buffer(6, chunks.scores).buffer(7, chunks.factors).bytes(8, params);
  recording.dispatch_threadgroups({grid_side(call.chunks * params.value_heads)}, {DELTA_THREADS});

  const Columns columns = chunk_columns(call);
  const char* const units = params.for_derivative ? "_unit_derivative_" : "_unit_";
  recording.kernel("gated_delta_rule_walk", chunks.by_units ? units : columns.name, type);
  recording.buffer(0, call.q).buffer(1, call.k).buffer(2, call.v).buffer(3, call.beta).buffer(4, call.ends);
  recording.buffer(5, call.state).buffer(6, chunks.inverses).buffer(7, chunks.scores).buffer(8, chunks.factors);
  recording.buffer(9, results.out).buffer(10, results.state).buffer(11, results.errors).buffer(12, results.kept);
  recording.buffer(13, call.skip).bytes(14, params);
  if (chunks.by_units)
    recording.dispatch_threadgroups({unit_groups(params)}, {DELTA_UNIT_THREADS});
  else
    recording.dispatch_threadgroups({columns.groups}, {DELTA_THREADS});
}
void record_forward(gpu::Recording& recording, const Call& call, DeltaRuleParams params, const Forward& results) {
  params.for_derivative = results.errors.has_value();
  recording.kernel("gated_delta_rule", params.by_channel ? "_by_channel" : "", padded(params.keys),
                   suffix(call.q.scalar_type()));
  recording.buffer(0, call.q).buffer(1, call.k).buffer(2, call.v).buffer(3, call.g).buffer(4, call.beta);
  recording.buffer(5, call.ends).buffer(6, call.state).buffer(7, results.out).buffer(8, results.state);
  recording.buffer(9, results.errors).buffer(10, results.kept).buffer(11, call.skip).bytes(12, params);
  recording.dispatch_threadgroups({column_groups(params)}, {DELTA_THREADS});
}

// Whether the kernel for one position takes the call: rows of states are whole vectors, and the one position is the
// only one of its sequence.
bool takes_step(const Call& call) {
  const DeltaRuleParams& p = call.params;
  return p.length == 1 && !p.packed && p.values % 4 == 0 && (!call.state || aligned16(*call.state, 0, 0));
}
void record_step(gpu::Recording& recording, const Call& call, const Tensor& out, const Tensor& final_state) {
  const DeltaRuleParams& p = call.params;
  recording.kernel("gated_delta_rule_step", padded(p.keys), suffix(call.q.scalar_type()));
  recording.buffer(0, call.q).buffer(1, call.k).buffer(2, call.v).buffer(3, call.g).buffer(4, call.beta);
  recording.buffer(5, call.state).buffer(6, out).buffer(7, final_state).buffer(8, call.skip).bytes(9, p);
  const int64_t columns = 4 * DELTA_STEP_LANES(padded_size(p.keys));
  const int64_t groups = ceil_div<int64_t>(p.values, columns) * p.value_heads * p.sequences;
  recording.dispatch_threadgroups({grid_side(groups)}, {DELTA_THREADS});
}

void note(const char* op, const Call& call, bool by_chunks) {
  const DeltaRuleParams& p = call.params;
  gpu::note_plan(op, by_chunks ? "chunks" : "recurrent", [&] {
    const std::string states = " states of " + std::to_string(p.keys) + " by " + std::to_string(p.values);
    return by_chunks ? std::to_string(call.chunks) + " chunks of positions are products of matrices with" + states
                     : std::to_string(column_groups(p)) + " threadgroups walk along positions with columns of" + states;
  });
}

std::tuple<Tensor, Tensor> gated_delta_rule(const Tensor& q, const Tensor& k, const Tensor& v, const MaybeTensor& g,
                                            const MaybeTensor& beta, const MaybeTensor& state, const MaybeTensor& ends,
                                            const MaybeTensor& skip, double scale, bool normalized, bool chunked,
                                            bool corrects) {
  const char* op = "gated_delta_rule";
  Call call = call_of(op, q, k, v, g, beta, state, ends, skip, scale, normalized, corrects);
  Tensor out = new_like(v);
  Tensor final_state = state_of(call);
  // Positions that belong to no sequence have no result, and states without elements or positions stay what they are.
  if (ends || call.empty) torch::stable::zero_(out);
  if (call.empty) {
    if (state && final_state.numel()) torch::stable::copy_(final_state, *state);
    if (!state) torch::stable::zero_(final_state);
    return {out, final_state};
  }
  if (chunked && scans(call)) {
    const LinearScan scan(call, false);
    note(op, call, true);
    gpu::record(out, [&](gpu::Recording& recording) { scan.record(recording, out, final_state); });
    return {out, final_state};
  }
  if (takes_step(call)) {
    gpu::note_plan(op, "step", [&] { return "threadgroups have columns of states"; });
    gpu::record(out, [&](gpu::Recording& recording) { record_step(recording, call, out, final_state); });
    return {out, final_state};
  }
  const auto chunks = chunks_of(call, chunked, v);
  note(op, call, chunks.has_value());
  gpu::record(out, [&](gpu::Recording& recording) {
    const Forward results{out, final_state, std::nullopt, std::nullopt};
    if (chunks) return record_chunks(recording, call, *chunks, call.params, results);
    record_forward(recording, call, call.params, results);
  });
  return {out, final_state};
}

// The gradients of q, k, v, g, beta, initial_state and skip. Those of what is not given are empty.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> gated_delta_rule_backward(
    const Tensor& grad, const MaybeTensor& grad_state, const Tensor& q, const Tensor& k, const Tensor& v,
    const MaybeTensor& g, const MaybeTensor& beta, const MaybeTensor& state, const MaybeTensor& ends,
    const MaybeTensor& skip, double scale, bool normalized, bool chunked, bool corrects) {
  const char* op = "gated_delta_rule_backward";
  Call call = call_of(op, q, k, v, g, beta, state, ends, skip, scale, normalized, corrects);
  check_same_device(op, "grad", grad, q);
  check_same_dtype(op, "grad", grad, q);
  check_same_shape(op, "grad", grad, v);
  DeltaRuleParams& params = call.params;
  const int64_t of_states[4] = {params.sequences, params.value_heads, params.keys, params.values};
  if (grad_state) check_float32_of(op, "grad_state", *grad_state, q, Sizes(of_states, 4));
  params.has_state_grad = grad_state.has_value();
  Tensor gq = new_like(q), gk = new_like(k), gv = new_like(v);
  const int64_t none[1] = {0};
  const auto grad_of = [&](const MaybeTensor& x) {
    return new_tensor(x ? x->sizes() : Sizes(none, 1), ScalarType::Float, q);
  };
  Tensor gg = grad_of(g), gbeta = grad_of(beta), gstate = grad_of(state), gskip = grad_of(skip);
  if (call.empty) {
    for (Tensor* each : {&gq, &gk, &gv, &gbeta, &gg, &gskip}) torch::stable::zero_(*each);
    if (!grad_state) torch::stable::zero_(gstate);
    if (grad_state && state && gstate.numel()) torch::stable::copy_(gstate, *grad_state);
    return {gq, gk, gv, gg, gbeta, gstate, gskip};
  }
  const Tensor given = with_rows(grad);
  const MaybeTensor given_state = as_contiguous(grad_state);
  params.wide = params.wide && is_wide(given);
  put_strides(params.grad, given);
  const auto skips = skip ? std::make_optional<SkipGradient>(call, given) : std::nullopt;
  if (chunked && scans(call)) {
    if (ends) {  // what positions have that belong to no sequence
      for (Tensor each : {gq, gk, gv, gg, gbeta}) torch::stable::zero_(each);
    }
    const LinearScan scan(call, true);
    note(op, call, true);
    gpu::record(gq, [&](gpu::Recording& recording) {
      scan.record_backward(recording, given, given_state, {gq, gk, gv, gg, gbeta, gstate});
      if (skips) skips->record(recording, given, gskip);
    });
    return {gq, gk, gv, gg, gbeta, gstate, gskip};
  }
  const int64_t positions = int64_t{params.batch} * params.length * params.value_heads;
  const int64_t states = call.chunks * params.value_heads * params.keys * params.values;
  const auto scratch = [&](int64_t size) { return new_tensor({size}, ScalarType::Float, q); };
  const Tensor errors = scratch(positions * params.values), value_grads = scratch(positions * params.values);
  const Tensor kept = scratch(states), kept_grads = scratch(states);
  const int64_t rows = DELTA_ROWS(padded_size(params.values)) * (DELTA_THREADS / 32);
  params.row_blocks = params.by_channel ? grid_side(ceil_div<int64_t>(params.keys, rows)) : 1;
  const Tensor beta_parts = scratch(beta && params.by_channel ? positions * params.row_blocks : 0);
  const auto chunks = chunks_of(call, chunked, given);
  const bool units = chunks && chunks->by_units;
  // Units add the gradients of keys' heads themselves.
  const int64_t key_positions = grid_side(int64_t{params.batch} * params.length * params.heads);
  const int64_t parts = !units ? positions : params.value_heads > params.heads ? key_positions : 0;
  const Tensor parts_q = scratch(parts * params.keys), parts_k = scratch(parts * params.keys);
  if (ends) {  // what positions have that belong to no sequence
    for (Tensor each : {parts_q, parts_k, gv, gg, gbeta, beta_parts}) torch::stable::zero_(each);
    for (Tensor each : {gq, gk}) torch::stable::zero_(each);
  }
  const char* type = suffix(q.scalar_type());
  note(op, call, chunks.has_value());
  gpu::record(gq, [&](gpu::Recording& recording) {
    const Forward results{std::nullopt, std::nullopt, errors, kept};
    if (chunks)
      record_chunks(recording, call, *chunks, params, results);
    else
      record_forward(recording, call, params, results);

    if (chunks && chunks->by_units) {
      recording.kernel("gated_delta_rule_walk_back_unit_", type);
      recording.buffer(0, given).buffer(1, given_state).buffer(2, call.q).buffer(3, call.k).buffer(4, call.beta);
      recording.buffer(5, call.ends).buffer(6, chunks->inverses).buffer(7, chunks->factors).buffer(8, gv);
      recording.buffer(9, value_grads).buffer(10, kept_grads).buffer(11, gstate).buffer(12, chunks->scores);
      recording.bytes(13, params).dispatch_threadgroups({unit_groups(params)}, {DELTA_UNIT_THREADS});
    } else if (chunks) {
      recording.kernel("gated_delta_rule_spread", "_", type);
      recording.buffer(0, given).buffer(1, call.ends).buffer(2, chunks->scores).buffer(3, value_grads).bytes(4, params);
      recording.dispatch_threadgroups({grid_side(call.chunks * params.value_heads)}, {DELTA_THREADS});

      const Columns columns = chunk_columns(call);
      recording.kernel("gated_delta_rule_walk_back", columns.name, type);
      recording.buffer(0, given).buffer(1, given_state).buffer(2, call.q).buffer(3, call.k).buffer(4, call.beta);
      recording.buffer(5, call.ends).buffer(6, chunks->inverses).buffer(7, chunks->factors);
      recording.buffer(8, gv)
          .buffer(9, value_grads)
          .buffer(10, kept_grads)
          .buffer(11, gstate)
          .buffer(12, call.skip)
          .bytes(13, params);
      recording.dispatch_threadgroups({columns.groups}, {DELTA_THREADS});
    } else {
      recording.kernel("gated_delta_rule_back", params.by_channel ? "_by_channel" : "", padded(params.keys), type);
      recording.buffer(0, given).buffer(1, given_state).buffer(2, call.q).buffer(3, call.k).buffer(4, call.g);
      recording.buffer(5, call.beta).buffer(6, call.ends).buffer(7, gv).buffer(8, value_grads).buffer(9, kept_grads);
      recording.buffer(10, gstate).buffer(11, call.skip).bytes(12, params);
      recording.dispatch_threadgroups({column_groups(params)}, {DELTA_THREADS});
    }

    if (params.by_channel)
      recording.kernel("gated_delta_rule_rows", padded(params.values), type);
    else if (units)
      recording.kernel("gated_delta_rule_chunks_unit_", type);
    else
      recording.kernel("gated_delta_rule_chunks", "_", type);
    recording.buffer(0, given).buffer(1, call.q).buffer(2, call.k).buffer(3, call.g).buffer(4, call.beta);
    recording.buffer(5, call.ends).buffer(6, errors).buffer(7, value_grads).buffer(8, kept).buffer(9, kept_grads);
    recording.buffer(10, parts_q).buffer(11, parts_k).buffer(12, gg);
    recording.buffer(13, params.by_channel ? beta_parts : gbeta).bytes(14, params);
    if (units) {
      recording.buffer(15, chunks->factors).buffer(16, gq).buffer(17, gk);
      recording.dispatch_threadgroups({grid_side(call.chunks * params.heads)}, {DELTA_UNIT_THREADS});
      return;
    }
    recording.dispatch_threadgroups({grid_side(call.chunks * params.value_heads * params.row_blocks)}, {DELTA_THREADS});

    recording.kernel("gated_delta_rule_keys", "_", type);
    recording.buffer(0, call.q).buffer(1, call.k).buffer(2, parts_q).buffer(3, parts_k);
    recording.buffer(4, beta_parts).buffer(5, gq).buffer(6, gk).buffer(7, gbeta).bytes(8, params);
    recording.dispatch_threadgroups({grid_side(ceil_div<int64_t>(key_positions, DELTA_THREADS / 32))}, {DELTA_THREADS});
    if (skips) skips->record(recording, given, gskip);
  });
  return {gq, gk, gv, gg, gbeta, gstate, gskip};
}

}  // namespace
}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) {
  m.def(
      "gated_delta_rule(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, Tensor? initial_state, "
      "Tensor? cu_seqlens, Tensor? skip, float scale, bool normalized, bool chunked, bool corrects) -> (Tensor, "
      "Tensor)");
  m.def(
      "gated_delta_rule_backward(Tensor grad, Tensor? grad_state, Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? "
      "beta, Tensor? initial_state, Tensor? cu_seqlens, Tensor? skip, float scale, bool normalized, bool chunked, bool "
      "corrects) -> "
      "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
}

METALCORE_KERNELS(m) {
  m.impl<&metalcore::gated_delta_rule>("gated_delta_rule");
  m.impl<&metalcore::gated_delta_rule_backward>("gated_delta_rule_backward");
}
