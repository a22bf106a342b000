// The derivative of gated_delta_rule where each key has a gate, except dv (delta_rule_backward.metal): threadgroups
// walk through a chunk, with rows of S and back with rows of D.
#pragma once

#include "common/sums.h"
#include "sequence/delta_state.h"

// Rows of a state: lanes have neighbouring columns.
template <uint ROWS, uint N>
struct Rows {
  static constexpr constant uint kLanes = 32 / ROWS;  // that have the sum of a row

  float at[ROWS][N];

  void load(device const float* state, constant DeltaRuleParams& params, uint first, uint lane) {
#pragma unroll
    for (uint r = 0; r < ROWS; ++r) {
#pragma unroll
      for (uint n = 0; n < N; ++n) {
        const bool inside = first + r < params.keys && n * 32 + lane < params.values;
        at[r][n] = inside ? state[ulong(first + r) * params.values + n * 32 + lane] : 0.0f;
      }
    }
  }
  // Multiplies rows by their numbers, which their lanes have.
  void scale(float number) {
#pragma unroll
    for (uint r = 0; r < ROWS; ++r) {
      const float factor = simd_shuffle(number, static_cast<ushort>(r * kLanes));
#pragma unroll
      for (uint n = 0; n < N; ++n) at[r][n] *= factor;
    }
  }
  // Adds the vector times a number for each row.
  void add(threadgroup const float4* numbers, thread const float (&vector)[N]) {
#pragma unroll
    for (uint r = 0; r < ROWS; ++r) {
      const float factor = numbers[r / 4][r % 4];
#pragma unroll
      for (uint n = 0; n < N; ++n) at[r][n] += factor * vector[n];
    }
  }
  // The products of the rows and a vector.
  float product(thread const float (&vector)[N], uint lane) const {
    float sums[ROWS];
#pragma unroll
    for (uint r = 0; r < ROWS; ++r) {
      sums[r] = 0.0f;
#pragma unroll
      for (uint n = 0; n < N; ++n) sums[r] += at[r][n] * vector[n];
    }
    lanes_sums<32, ROWS>(sums, lane);
    return sums[0];
  }
  // The products of these rows and the others.
  float overlap(thread const Rows& other, uint lane) const {
    float sums[ROWS];
#pragma unroll
    for (uint r = 0; r < ROWS; ++r) {
      sums[r] = 0.0f;
#pragma unroll
      for (uint n = 0; n < N; ++n) sums[r] += at[r][n] * other.at[r][n];
    }
    lanes_sums<32, ROWS>(sums, lane);
    return sums[0];
  }
};

template <uint N, typename T>
inline void fetch(thread float (&vector)[N], device const T* row, float factor, uint size, uint lane) {
#pragma unroll
  for (uint n = 0; n < N; ++n)
    vector[n] = n * 32 + lane < size ? static_cast<float>(row[n * 32 + lane]) * factor : 0.0f;
}

// A block of a chunk's positions, whose products with each other are found apart from those with the states around it.
constexpr constant uint kBlock = 16, kScores = kBlock + 1;  // and the pitch of scores

inline threadgroup float* factors_of(threadgroup float4* position) {
  return reinterpret_cast<threadgroup float*>(position);
}

// The sums over the lanes of a half from its own on.
inline float sum_from(float value, uint lane) {
#pragma unroll
  for (ushort step = 1; step < kBlock; step *= 2) {
    const float others = simd_shuffle_down(value, step);
    if (lane % kBlock + step < kBlock) value += others;
  }
  return value;
}

// The same products.
inline float product_from(float value, uint lane) {
#pragma unroll
  for (ushort step = 1; step < kBlock; step *= 2) {
    const float others = simd_shuffle_down(value, step);
    if (lane % kBlock + step < kBlock) value *= others;
  }
  return value;
}

// The product of those behind the lane's own.
inline float behind_own(float left, uint lane) {
  const float next = simd_shuffle_down(left, 1);
  return lane % kBlock + 1 < kBlock ? next : 1.0f;
}

// The gradient of a gate is the sum of a row of S D at its position, where both are sums over positions: of terms of a
// position i >= t and one j < t, between which the gate at t lies, of a position and the state before or behind a
// block, and of both states. The last one follows from the next block's first gate, except in a chunk's last block.
template <uint ROWS, uint N, typename T>
[[kernel]] [[max_total_threads_per_threadgroup(DELTA_THREADS)]] void gated_delta_rule_rows(
    device const T* grad [[buffer(0)]], device const T* q [[buffer(1)]], device const T* k [[buffer(2)]],
    device const float* g [[buffer(3)]], device const float* beta [[buffer(4)]], device const int* ends [[buffer(5)]],
    device const float* errors [[buffer(6)]], device const float* value_grads [[buffer(7)]],
    device const float* states [[buffer(8)]], device const float* state_grads [[buffer(9)]],
    device float* gq [[buffer(10)]], device float* gk [[buffer(11)]], device float* gg [[buffer(12)]],
    device float* beta_parts [[buffer(13)]], constant DeltaRuleParams& params [[buffer(14)]],
    uint group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float lengths[2][DELTA_CHUNK];  // of q and k, their inverses
  threadgroup float products[kSimdgroups][DELTA_CHUNK];
  threadgroup float scores[2][kBlock * kScores];        // products of errors and gradients of results and of values
  threadgroup float behind[kSimdgroups][kBlock][ROWS];  // products of errors and D behind the block
  threadgroup float pairs[kSimdgroups][2][kBlock * kScores];         // of a row's positions
  threadgroup float4 all_factors[kSimdgroups][2][kBlock][ROWS / 4];  // of rows that positions add to S or D
  const uint lane = thread_index % 32, simdgroup = thread_index / 32;
  const uint block = group % params.row_blocks, head = group / params.row_blocks % params.value_heads;
  const uint place = group / params.row_blocks / params.value_heads;
  const Span span = chunk_of(ends, params, place);
  const uint count = span.end - span.begin;
  if (count == 0) return;
  const uint key_head = head / (params.value_heads / params.heads);
  q += span.batch * params.q[0] + span.begin * params.q[1] + key_head * params.q[2];
  k += span.batch * params.k[0] + span.begin * params.k[1] + key_head * params.k[2];
  grad += span.batch * params.grad[0] + span.begin * params.grad[1] + head * params.grad[2];
  const ulong from = (ulong(span.batch) * params.length + span.begin) * params.value_heads + head;
  for (uint i = simdgroup; i < count; i += kSimdgroups) {
    const float of_q = params.normalized ? inverse_length_of(q + i * params.q[1], params.keys, lane) : 1.0f;
    const float of_k = params.normalized ? inverse_length_of(k + i * params.k[1], params.keys, lane) : 1.0f;
    lengths[0][i] = of_q;
    lengths[1][i] = of_k;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  using State = Rows<ROWS, N>;
  // Errors whose products with a gradient are found at once, and the lanes that have the sum of one.
  constexpr uint kAtOnce = N > 4 ? 2 : 4, kEach = 32 / (2 * kAtOnce);
  const uint first = (block * kSimdgroups + simdgroup) * ROWS, own = lane / State::kLanes, row = first + own;
  const bool holds = row < params.keys, writes = holds && lane % State::kLanes == 0;
  const ulong matrix = (ulong(place) * params.value_heads + head) * params.keys * params.values;
  State state, state_grad;
  state.load(states + matrix, params, first, lane);
  threadgroup float4(*const factors)[kBlock][ROWS / 4] = all_factors[simdgroup];
  float vector[N];
  // Where positions meet each other, half a simdgroup has a row, and a lane the position i of the block.
  const uint i = lane % kBlock, half_begin = lane - i;
  // What is read from the states before blocks.
  for (uint begin = 0; begin < count; begin += kBlock) {
    const uint end = min(begin + kBlock, count);
    for (uint t = begin; t < end; ++t) {
      const ulong at = from + ulong(t) * params.value_heads;
      fetch(vector, grad + t * params.grad[1], params.scale, params.values, lane);
      const float by_result = state.product(vector, lane);
      float by_error = 0.0f;
      if (params.corrects) {
        fetch(vector, value_grads + at * params.values, -1.0f, params.values, lane);
        by_error = state.product(vector, lane);
      }
      if (writes) {
        gq[at * params.keys + row] = by_result;
        gk[at * params.keys + row] = by_error;
      }
    }
    if (end == count) break;
    const ulong at = from + ulong(begin + i) * params.value_heads;
    const float strength = (params.weighted ? beta[at] : 1.0f) * lengths[1][begin + i];
    float block_decay = 1.0f;
#pragma unroll 1
    for (uint pair = 0; pair < ROWS / 2; ++pair) {
      const uint of_half = 2 * pair + lane / kBlock, column = first + of_half;
      const bool inside = column < params.keys;
      const float key = inside ? static_cast<float>(k[(begin + i) * params.k[1] + column]) * strength : 0.0f;
      const float left = product_from(inside ? exp(g[at * params.keys + column]) : 1.0f, lane);
      factors_of(factors[0][i])[of_half] = key * behind_own(left, lane);
      const float of_block = simd_shuffle(left, static_cast<ushort>(own % 2 * kBlock));
      if (own / 2 == pair) block_decay = of_block;
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    state.scale(block_decay);
    for (uint j = 0; j < kBlock; ++j) {
      fetch(vector, errors + (from + ulong(begin + j) * params.value_heads) * params.values, 1.0f, params.values, lane);
      state.add(factors[0][j], vector);
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
  state_grad.load(state_grads + matrix, params, first, lane);
  float gate = state.overlap(state_grad, lane);
  simdgroup_barrier(mem_flags::mem_device);
  for (uint end = count; end > 0; end = (end - 1) / kBlock * kBlock) {
    const uint begin = (end - 1) / kBlock * kBlock, size = end - begin;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint t = simdgroup; t < kBlock; t += kSimdgroups) {
      const uint last = min(t, size - 1);
      float others[N];
      fetch(vector, grad + (begin + last) * params.grad[1], params.scale, params.values, lane);
      if (params.corrects)
        fetch(others, value_grads + (from + ulong(begin + last) * params.value_heads) * params.values, -1.0f,
              params.values, lane);
      for (uint some = 0; some < kBlock; some += kAtOnce) {
        float sums[2 * kAtOnce];
#pragma unroll
        for (uint j = 0; j < 2 * kAtOnce; ++j) sums[j] = 0.0f;
        if (some <= t) {
#pragma unroll
          for (uint j = 0; j < kAtOnce; ++j) {
            const uint position = begin + min(some + j, last);
            float error[N];
            fetch(error, errors + (from + ulong(position) * params.value_heads) * params.values, 1.0f, params.values,
                  lane);
#pragma unroll
            for (uint n = 0; n < N; ++n) sums[j] += vector[n] * error[n];
            if (params.corrects) {
#pragma unroll
              for (uint n = 0; n < N; ++n) sums[kAtOnce + j] += others[n] * error[n];
            }
          }
          lanes_sums<32, 2 * kAtOnce>(sums, lane);
        }
        const uint of = lane / 16, j = some + lane / kEach % kAtOnce;
        if (lane % kEach == 0) scores[of][t * kScores + j] = t < size && j + of <= t ? sums[0] : 0.0f;
      }
    }
    for (uint j = 0; j < size; ++j) {
      fetch(vector, errors + (from + ulong(begin + j) * params.value_heads) * params.values, 1.0f, params.values, lane);
      const float product = state_grad.product(vector, lane);
      if (lane % State::kLanes == 0) behind[simdgroup][j][own] = product;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    threadgroup float* const terms = pairs[simdgroup][lane / kBlock];
    const ulong at = from + ulong(begin + i) * params.value_heads;
    const float strength = i < size && params.weighted ? beta[at] : 1.0f;
    float beta_product = 0.0f, block_decay = 1.0f;
#pragma unroll 1
    for (uint pair = 0; pair < ROWS / 2; ++pair) {
      const uint of_half = 2 * pair + lane / kBlock, column = first + of_half;
      const ulong to = at * params.keys + column;
      const bool inside = i < size && column < params.keys;
      const float query =
          inside ? static_cast<float>(q[(begin + i) * params.q[1] + column]) * lengths[0][begin + i] : 0.0f;
      const float key =
          inside ? static_cast<float>(k[(begin + i) * params.k[1] + column]) * lengths[1][begin + i] : 0.0f;
      const float decay = inside ? exp(g[to]) : 1.0f, own_key = key * strength;
      const float left = product_from(decay, lane);
      const float until = behind_own(left, lane);  // the decay from i to the block's end
      const float added = i < size ? until * behind[simdgroup][i][of_half] : 0.0f;
      float by_result = 0.0f, by_error = 0.0f, written[1] = {own_key * added};
      float since = 1.0f;  // the decay from j to i
                           // More at once would take registers, and fewer threadgroups would run.
#pragma unroll 4
      for (uint j = kBlock; j-- > 0;) {
        const float next = simd_shuffle(decay, static_cast<ushort>(half_begin + min(j + 1, kBlock - 1)));
        if (i > j) since *= next;
        const float other = simd_shuffle(own_key, static_cast<ushort>(half_begin + j));
        const float of_result = since * scores[0][i * kScores + j], of_error = since * scores[1][i * kScores + j];
        by_result += other * of_result;
        by_error += other * of_error;
        terms[i * kScores + j] = query * of_result + key * of_error;
      }
      simdgroup_barrier(mem_flags::mem_threadgroup);
      // Now i is the earlier position of the pairs, and t goes through the gates behind it.
      float by_state = 0.0f;
#pragma unroll 4
      for (uint t = kBlock; t-- > 0;) {
        by_state += t >= i ? terms[t * kScores + i] : 0.0f;
        terms[t * kScores + i] = own_key * (by_state + added);
      }
      by_state += added;
      simdgroup_barrier(mem_flags::mem_threadgroup);
      float across = 0.0f;
#pragma unroll 4
      for (uint j = 0; j < kBlock; ++j) across += j < i ? terms[i * kScores + j] : 0.0f;
      simdgroup_barrier(mem_flags::mem_threadgroup);
      lanes_sums<kBlock, 1>(written, lane);
      since *= simd_shuffle(decay, static_cast<ushort>(half_begin));
      const float of_q = inside ? since * gq[to] : 0.0f, of_k = inside ? since * gk[to] : 0.0f;
      const float of_states = simd_shuffle(gate, static_cast<ushort>(of_half * State::kLanes));
      const float all = simd_shuffle(left, static_cast<ushort>(half_begin));
      const float found = (end == count ? of_states * all : of_states - written[0]) + across +
                          sum_from(query * of_q + key * of_k, lane);
      if (inside) {
        gq[to] = of_q + by_result;
        gk[to] = of_k + by_error + strength * by_state;
        gg[to] = found;
        beta_product += key * by_state;
      }
      factors_of(factors[0][i])[of_half] = query * since;
      factors_of(factors[1][i])[of_half] = key * since;
      const float of_first = simd_shuffle(found, static_cast<ushort>(own % 2 * kBlock));
      const float of_block = simd_shuffle(left, static_cast<ushort>(own % 2 * kBlock));
      if (own / 2 == pair) gate = of_first, block_decay = of_block;
    }
    beta_product += simd_shuffle_xor(beta_product, kBlock);
    if (lane < size) products[simdgroup][begin + lane] = beta_product;
    if (begin == 0) break;
    simdgroup_barrier(mem_flags::mem_threadgroup);
    state_grad.scale(block_decay);
    for (uint t = 0; t < size; ++t) {
      fetch(vector, grad + (begin + t) * params.grad[1], params.scale, params.values, lane);
      state_grad.add(factors[0][t], vector);
      if (!params.corrects) continue;
      fetch(vector, value_grads + (from + ulong(begin + t) * params.value_heads) * params.values, -1.0f, params.values,
            lane);
      state_grad.add(factors[1][t], vector);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (params.weighted && thread_index < count) {
    float sum = 0.0f;
#pragma unroll
    for (uint s = 0; s < kSimdgroups; ++s) sum += products[s][thread_index];
    beta_parts[(from + ulong(thread_index) * params.value_heads) * params.row_blocks + block] = sum;
  }
}
