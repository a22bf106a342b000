// The walks of delta_chunks.metal and delta_walk_back.metal by units that multiply matrices, for heads of 128 bfloats.
// The inverses and the scores are sums of three bfloats an element. Half of a threadgroup's threads find errors or
// values' gradients, the other half results. All of them add to the matrix that they have columns of.
#include <metal_tensor>

#include "sequence/delta_units.h"

// A simdgroup has the same answer, as the compiler sees here. Only then does it keep numbers once for all lanes.
inline bool is_in_first_half(uint thread_index) { return simd_broadcast_first(thread_index) < 128; }

// What a threadgroup walks along.
struct UnitWalk {
  Span span;
  uint head, key_head, block;
  ulong state;  // the first element of the columns in a sequence's states

  UnitWalk(device const int* ends, constant DeltaRuleParams& params, uint group) {
    constexpr uint kBlocks = kUnitKeys / kUnitColumns;
    const uint sequence = group / kBlocks / params.value_heads;
    head = group / kBlocks % params.value_heads;
    key_head = head / (params.value_heads / params.heads);
    block = group % kBlocks * kUnitColumns;
    span = span_of(ends, params, sequence);
    state = (ulong(sequence) * params.value_heads + head) * kUnitKeys * kUnitKeys + block;
  }
  uint chunks() const { return (span.end - span.begin + DELTA_CHUNK - 1) / DELTA_CHUNK; }
  uint count(uint i) const { return min(span.end - span.begin - i * DELTA_CHUNK, uint(DELTA_CHUNK)); }
  ulong chunk(uint i, constant DeltaRuleParams& params) const { return (span.place + i) * params.value_heads + head; }
  // The place of a chunk's first position among those of this head.
  ulong position(uint i, constant DeltaRuleParams& params) const {
    return (ulong(span.batch) * params.length + span.begin + i * DELTA_CHUNK) * params.value_heads + head;
  }
};

// Where a thread's first pair of 64 rows of a matrix lies. The distances of the others are the same for all threads.
inline uint first_of_matrix(uint thread_index) {
  return (thread_index / 128 * 64 + unit_row(0, thread_index)) * kUnitKeys + unit_column(0, thread_index);
}
constexpr uint distance_in_matrix(uint pair) { return pair % 2 * 8 * kUnitKeys + pair / 2 * 8; }

inline void load_pairs(thread float* to, device const float* from, bool given, uint thread_index) {
  from += first_of_matrix(thread_index);
#pragma unroll
  for (uint pair = 0; pair < kUnitNumbers / 2; ++pair) {
    const float2 found =
        given ? *reinterpret_cast<device const float2*>(from + distance_in_matrix(pair)) : float2(0.0f);
    to[2 * pair] = found.x;
    to[2 * pair + 1] = found.y;
  }
}
inline void store_pairs(device float* to, thread const float* from, uint thread_index) {
  to += first_of_matrix(thread_index);
#pragma unroll
  for (uint pair = 0; pair < kUnitNumbers / 2; ++pair)
    *reinterpret_cast<device ulong*>(to + distance_in_matrix(pair)) =
        as_type<ulong>(float2(from[2 * pair], from[2 * pair + 1]));
}
inline void put_row_pair(device float* to, float x, float y) {
  *reinterpret_cast<device ulong*>(to) = as_type<ulong>(float2(x, y));
}
inline void put_row_pair(device bfloat* to, float x, float y) {
  *reinterpret_cast<device uint*>(to) = as_type<uint>(vec<bfloat, 2>(bfloat(x), bfloat(y)));
}
// Rows of a chunk have `stride` elements from each other.
template <typename T>
inline void store_rows(device T* to, thread const float* from, uint stride, uint count, uint thread_index) {
#pragma unroll
  for (uint i = 0; i < 2; ++i) {
    const uint row = unit_row(i, thread_index);
    device T* const own = to + ulong(row) * stride + unit_column(i, thread_index);
    if (row < count) {
#pragma unroll
      for (uint pair = i; pair < kUnitNumbers / 2; pair += 2)
        put_row_pair(own + pair / 2 * 8, from[2 * pair], from[2 * pair + 1]);
    }
  }
}

// What a thread needs of its rows of a chunk, before it is the current one.
struct UnitRows {
  vec<bfloat, 2> values[kUnitNumbers / 2];  // of v or of its gradients
  float by_key[2], by_query[2], until[2], strengths[2], decay;

  void load(device const bfloat* from, long stride, device const float* factors, device const float* beta,
            uint value_heads, uint count, uint thread_index) {
#pragma unroll
    for (uint i = 0; i < 2; ++i) {
      const uint row = unit_row(i, thread_index);
      by_key[i] = factors[row];
      by_query[i] = factors[DELTA_CHUNK + row];
      until[i] = factors[2 * DELTA_CHUNK + row];
      strengths[i] = row < count ? beta[ulong(row) * value_heads] : 0.0f;
      device const bfloat* const own = from + row * stride + unit_column(i, thread_index);
#pragma unroll
      for (uint pair = i; pair < kUnitNumbers / 2; pair += 2) {
        values[pair] = vec<bfloat, 2>(bfloat(0.0f));
        if (row < count) values[pair] = *reinterpret_cast<device const vec<bfloat, 2>*>(own + pair / 2 * 8);
      }
    }
    decay = factors[4 * DELTA_CHUNK - 1];
  }
};

template <bool FOR_DERIVATIVE>
[[kernel]] [[max_total_threads_per_threadgroup(DELTA_UNIT_THREADS)]] void gated_delta_rule_walk_unit(
    device const bfloat* q [[buffer(0)]], device const bfloat* k [[buffer(1)]], device const bfloat* v [[buffer(2)]],
    device const float* beta [[buffer(3)]], device const int* ends [[buffer(4)]],
    device const float* state [[buffer(5)]], device const bfloat* inverses [[buffer(6)]],
    device const bfloat* scores [[buffer(7)]], device const float* factors [[buffer(8)]],
    device bfloat* out [[buffer(9)]], device float* final_state [[buffer(10)]], device float* errors [[buffer(11)]],
    device float* kept [[buffer(12)]], constant DeltaRuleParams& params [[buffer(14)]],
    uint group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float memory[(kUnitKeys + 2 * DELTA_CHUNK) * kUnitColumns];
  const UnitWalk at(ends, params, group);
  const bool is_first = is_in_first_half(thread_index);
  q += at.span.batch * params.q[0] + at.key_head * params.q[2];
  k += at.span.batch * params.k[0] + at.key_head * params.k[2];
  v += at.span.batch * params.v[0] + at.head * params.v[2] + at.block;
  const uint stride = params.value_heads * kUnitKeys;
  auto walk = metalcore_unit_state(memory, thread_index, 0);
  load_pairs(&walk.state[0], state + at.state, params.has_state, thread_index);
  walk.put_state();
  const auto chunk_of = [&](uint i) {
    const ulong begin = at.span.begin + i * DELTA_CHUNK, chunk = at.chunk(i, params) * DELTA_UNIT_PARTS;
    return UnitChunk{k + begin * params.k[1],
                     FOR_DERIVATIVE ? nullptr : q + begin * params.q[1],
                     nullptr,
                     inverses + chunk,
                     scores + chunk,
                     params.k[1],
                     params.q[1],
                     0,
                     at.count(i)};
  };
  const uint chunks = at.chunks();
  UnitRows rows;
  const auto load_rows = [&](uint i) {
    rows.load(v + (at.span.begin + i * DELTA_CHUNK) * params.v[1], params.v[1],
              factors + at.chunk(i, params) * DELTA_FACTORS * DELTA_CHUNK, beta + at.position(i, params),
              params.value_heads, at.count(i), thread_index);
  };
  if (chunks > 0) {
    walk.ask(chunk_of(0));
    if (!FOR_DERIVATIVE) walk.ask_scores(chunk_of(0));
    load_rows(0);
  }
  float results[kUnitNumbers];  // of the chunk before, without what its own positions add
  // Results need the scores of their chunk, which come last.
  const auto finish = [&](uint i) {
    walk.weigh(kUnitResults, true);
#pragma unroll
    for (uint n = 0; n < kUnitNumbers; ++n) walk.products[n] += results[n];
    store_rows(out + at.position(i, params) * kUnitKeys + at.block, &walk.products[0], stride, at.count(i),
               thread_index);
  };
  for (uint i = 0; i < chunks; ++i) {
    walk.template begin_chunk<FOR_DERIVATIVE>();
    const bool has_next = i + 1 < chunks;
    if (has_next) walk.ask(chunk_of(i + 1));
    const auto keep = [&] {
      if (FOR_DERIVATIVE)
        store_pairs(kept + at.chunk(i, params) * kUnitKeys * kUnitKeys + at.block, &walk.state[0], thread_index);
    };
    if (is_first) {
      walk.read(false, keep);
#pragma unroll
      for (uint n = 0; n < kUnitNumbers; ++n)
        walk.products[n] = static_cast<float>(rows.values[n / 2][n % 2]) - rows.by_key[n / 2 % 2] * walk.products[n];
      walk.put(kUnitErrors);
    } else {
      keep();
      if (!FOR_DERIVATIVE && i > 0) finish(i - 1);
    }
    walk.wait();
    if (!FOR_DERIVATIVE && has_next) walk.ask_scores(chunk_of(i + 1));
    if (is_first) {
      walk.template solve<false>(kUnitErrors);
      if (!FOR_DERIVATIVE) walk.put(kUnitResults, rows.strengths[0], rows.strengths[1]);
    } else if (!FOR_DERIVATIVE) {
      walk.read(true, [] {});
#pragma unroll
      for (uint n = 0; n < kUnitNumbers; ++n) results[n] = rows.by_query[n / 2 % 2] * walk.products[n];
    }
    walk.wait_for_solutions();
    if (is_first) walk.put(kUnitErrors, rows.strengths[0] * rows.until[0], rows.strengths[1] * rows.until[1]);
    walk.wait();
    const float decay = rows.decay;
    walk.template learn<false>(decay, [&] {
      if (has_next) load_rows(i + 1);
      if (FOR_DERIVATIVE && is_first)
        store_rows(errors + at.position(i, params) * kUnitKeys + at.block, &walk.products[0], stride, at.count(i),
                   thread_index);
    });
    walk.put_state();
  }
  if (FOR_DERIVATIVE) return;
  if (chunks > 0) {
    walk.template begin_chunk<true>();
    if (!is_first) finish(chunks - 1);
  }
  store_pairs(final_state + at.state, &walk.state[0], thread_index);
}

// Also what gated_delta_rule_spread does.
template <typename T>
[[kernel]] [[max_total_threads_per_threadgroup(DELTA_UNIT_THREADS)]] void gated_delta_rule_walk_back_unit(
    device const T* grad [[buffer(0)]], device const float* grad_state [[buffer(1)]], device const T* q [[buffer(2)]],
    device const T* k [[buffer(3)]], device const float* beta [[buffer(4)]], device const int* ends [[buffer(5)]],
    device const T* inverses [[buffer(6)]], device const float* factors [[buffer(7)]], device T* gv [[buffer(8)]],
    device float* value_grads [[buffer(9)]], device float* kept [[buffer(10)]], device float* state_grad [[buffer(11)]],
    device const T* scores [[buffer(12)]], constant DeltaRuleParams& params [[buffer(13)]],
    uint group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float memory[(kUnitKeys + 2 * DELTA_CHUNK) * kUnitColumns];
  const UnitWalk at(ends, params, group);
  const bool is_first = is_in_first_half(thread_index);
  q += at.span.batch * params.q[0] + at.key_head * params.q[2];
  k += at.span.batch * params.k[0] + at.key_head * params.k[2];
  grad += at.span.batch * params.grad[0] + at.head * params.grad[2] + at.block;
  const uint stride = params.value_heads * kUnitKeys;
  auto walk = metalcore_unit_state(memory, thread_index, 0);
  load_pairs(&walk.state[0], grad_state + at.state, params.has_state_grad, thread_index);
  walk.put_state();
  UnitRows rows;
  const auto ask = [&](uint i) {
    const ulong begin = at.span.begin + i * DELTA_CHUNK, chunk = at.chunk(i, params) * DELTA_UNIT_PARTS;
    const UnitChunk asked{k + begin * params.k[1],
                          q + begin * params.q[1],
                          grad + begin * params.grad[1],
                          inverses + chunk,
                          scores + chunk,
                          params.k[1],
                          params.q[1],
                          params.grad[1],
                          at.count(i)};
    walk.ask(asked);
    walk.ask_scores(asked);
  };
  const auto load_rows = [&](uint i) {
    rows.load(grad + (at.span.begin + i * DELTA_CHUNK) * params.grad[1], params.grad[1],
              factors + at.chunk(i, params) * DELTA_FACTORS * DELTA_CHUNK, beta + at.position(i, params),
              params.value_heads, at.count(i), thread_index);
  };
  if (at.chunks() > 0) {
    ask(at.chunks() - 1);
    load_rows(at.chunks() - 1);
  }
  for (uint i = at.chunks(); i-- > 0;) {
    walk.template begin_chunk<true>();
    if (i > 0) ask(i - 1);
    const auto keep = [&] {
      store_pairs(kept + at.chunk(i, params) * kUnitKeys * kUnitKeys + at.block, &walk.state[0], thread_index);
    };
    if (is_first) {
      walk.read(false, keep);
#pragma unroll
      for (uint n = 0; n < kUnitNumbers; ++n) walk.products[n] *= rows.until[n / 2 % 2];
      walk.spread();
      walk.put(kUnitErrors, rows.strengths[0], rows.strengths[1]);
    } else {
      keep();
#pragma unroll
      for (uint n = 0; n < kUnitNumbers; ++n) walk.products[n] = static_cast<float>(rows.values[n / 2][n % 2]);
      walk.put(kUnitResults, rows.by_query[0], rows.by_query[1]);
    }
    walk.wait();
    if (is_first) walk.template solve<true>(kUnitErrors);
    walk.wait_for_solutions();
    if (is_first) walk.put(kUnitErrors, -rows.by_key[0], -rows.by_key[1]);
    walk.wait();
    const float decay = rows.decay;
    walk.template learn<true>(decay, [&] {
      if (i > 0) load_rows(i - 1);
      if (!is_first) return;
      const ulong to = at.position(i, params) * kUnitKeys + at.block;
      store_rows(value_grads + to, &walk.products[0], stride, at.count(i), thread_index);
      store_rows(gv + to, &walk.products[0], stride, at.count(i), thread_index);
    });
    walk.put_state();
  }
  if (params.has_state) store_pairs(state_grad + at.state, &walk.state[0], thread_index);
}

INSTANTIATE("gated_delta_rule_walk_unit", "_bfloat", gated_delta_rule_walk_unit<false>)
INSTANTIATE("gated_delta_rule_walk_unit_derivative", "_bfloat", gated_delta_rule_walk_unit<true>)
INSTANTIATE("gated_delta_rule_walk_back_unit", "_bfloat", gated_delta_rule_walk_back_unit<bfloat>)
