// The derivative of gated_delta_rule, in which D is the gradient of the state: what kernels do where positions are not
// walked by chunks (delta_chunks_backward.metal), and what is the same in both cases.
//
// The first kernel walks back along a sequence with columns of D, which it keeps behind each chunk, and finds dv. Where
// each key has a gate, the second kernel walks through a chunk, with rows of S and back with rows of D.
#include "common/sums.h"
#include "sequence/delta_state.h"

template <uint ACROSS, uint N, bool BY_CHANNEL, typename T>
[[kernel]] [[max_total_threads_per_threadgroup(DELTA_THREADS)]] void gated_delta_rule_back(
    device const T* grad [[buffer(0)]], device const float* grad_state [[buffer(1)]], device const T* q [[buffer(2)]],
    device const T* k [[buffer(3)]], device const float* g [[buffer(4)]], device const float* beta [[buffer(5)]],
    device const int* ends [[buffer(6)]], device T* gv [[buffer(7)]], device float* value_grads [[buffer(8)]],
    device float* kept [[buffer(9)]], device float* state_grad [[buffer(10)]], device const float* skip [[buffer(11)]],
    constant DeltaRuleParams& params [[buffer(12)]], uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  using State = Columns<ACROSS, N>;
  constexpr uint kPadded = State::kPadded, kAcross = State::kColumns * kSimdgroups;
  threadgroup float4 keys[DELTA_STEPS * kPadded / 4];
  threadgroup float4 queries[DELTA_STEPS * kPadded / 4];
  threadgroup float4 decays[BY_CHANNEL ? DELTA_STEPS * kPadded / 4 : 1];
  const uint lane = thread_index % 32, simdgroup = thread_index / 32;
  const uint blocks = (params.values + kAcross - 1) / kAcross;
  const uint head = group / blocks % params.value_heads, sequence = group / blocks / params.value_heads;
  const uint column = group % blocks * kAcross + simdgroup * State::kColumns + lane % State::kColumns;
  const Span span = span_of(ends, params, sequence);
  const uint key_head = head / (params.value_heads / params.heads);
  q += span.batch * params.q[0] + key_head * params.q[2];
  k += span.batch * params.k[0] + key_head * params.k[2];
  grad += span.batch * params.grad[0] + head * params.grad[2];
  const ulong size = ulong(params.keys) * params.values;  // of a state
  const ulong gate_stride = ulong(params.value_heads) * params.keys;
  const ulong first_gate = span.batch * params.length * gate_stride + head * params.keys;
  State columns(lane);
  columns.load(grad_state + (ulong(sequence) * params.value_heads + head) * size, params.has_state_grad, params.keys,
               params.values, column);
  for (uint tiles = (span.end - span.begin + DELTA_STEPS - 1) / DELTA_STEPS; tiles > 0; --tiles) {
    const uint first = span.begin + (tiles - 1) * DELTA_STEPS;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    fetch<kPadded>(reinterpret_cast<threadgroup float*>(keys), k, params.k[1], first, span.end, 1.0f, params, simdgroup,
                   lane);
    fetch<kPadded>(reinterpret_cast<threadgroup float*>(queries), q, params.q[1], first, span.end, params.scale, params,
                   simdgroup, lane);
    if (BY_CHANNEL)
      fetch_decays<kPadded>(reinterpret_cast<threadgroup float*>(decays), g + first_gate, gate_stride, first, span.end,
                            params, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const uint chunk = (first - span.begin) / DELTA_CHUNK;
    if (first + DELTA_STEPS >= span.end || (first + DELTA_STEPS - span.begin) % DELTA_CHUNK == 0)
      columns.store(kept + ((span.place + chunk) * params.value_heads + head) * size, params.keys, params.values,
                    column);
    for (uint i = min(uint(DELTA_STEPS), span.end - first); i-- > 0;) {
      const uint position = first + i;
      const ulong at = (ulong(span.batch) * params.length + position) * params.value_heads + head;
      threadgroup const float4* const key = keys + i * (kPadded / 4);
      const float result_grad =
          column < params.values ? static_cast<float>(grad[position * params.grad[1] + column]) : 0.0f;
      columns.add(queries + i * (kPadded / 4), result_grad);
      const float value_grad = (params.weighted ? beta[at] : 1.0f) * columns.product(key);
      if (column < params.values && lane < State::kColumns) {
        const float skipped = params.has_skip ? skip[head * params.values + column] * result_grad : 0.0f;
        gv[at * params.values + column] = static_cast<T>(value_grad + skipped);
        value_grads[at * params.values + column] = value_grad;
      }
      if (params.corrects) columns.add(key, -value_grad);
      if (BY_CHANNEL)
        columns.scale(decays + i * (kPadded / 4));
      else if (params.has_gate)
        columns.scale(exp(g[at]));
    }
  }
  if (params.has_state)
    columns.store(state_grad + (ulong(sequence) * params.value_heads + head) * size, params.keys, params.values,
                  column);
}
INSTANTIATE_TYPES("gated_delta_rule_back", gated_delta_rule_back, false)
INSTANTIATE_TYPES("gated_delta_rule_back_by_channel", gated_delta_rule_back, true)

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
  // Adds a row's number, which its lanes have, times the vector.
  void add(float number, thread const float (&vector)[N]) {
#pragma unroll
    for (uint r = 0; r < ROWS; ++r) {
      const float factor = simd_shuffle(number, static_cast<ushort>(r * kLanes));
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

// The sums over the lanes of a half from its own on.
inline float sum_from(float value, uint lane) {
#pragma unroll
  for (ushort step = 1; step < kBlock; step *= 2) {
    const float others = simd_shuffle_down(value, step);
    if (lane % kBlock + step < kBlock) value += others;
  }
  return value;
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
  const uint first = (block * kSimdgroups + simdgroup) * ROWS, own = lane / State::kLanes, row = first + own;
  const bool holds = row < params.keys, writes = holds && lane % State::kLanes == 0;
  const ulong matrix = (ulong(place) * params.value_heads + head) * params.keys * params.values;
  State state, state_grad;
  state.load(states + matrix, params, first, lane);
  float vector[N];
  // What is read from the states before blocks.
  for (uint begin = 0; begin < count; begin += kBlock) {
    const uint end = min(begin + kBlock, count);
    for (uint i = begin; i < end; ++i) {
      const ulong at = from + ulong(i) * params.value_heads;
      fetch(vector, grad + i * params.grad[1], params.scale, params.values, lane);
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
    for (uint i = begin; i < end; ++i) {
      const ulong at = from + ulong(i) * params.value_heads;
      state.scale(holds ? exp(g[at * params.keys + row]) : 1.0f);
      fetch(vector, errors + at * params.values, params.weighted ? beta[at] : 1.0f, params.values, lane);
      state.add(holds ? static_cast<float>(k[i * params.k[1] + row]) * lengths[1][i] : 0.0f, vector);
    }
  }
  state_grad.load(state_grads + matrix, params, first, lane);
  float gate = state.overlap(state_grad, lane);
  simdgroup_barrier(mem_flags::mem_device);
  for (uint end = count; end > 0; end = (end - 1) / kBlock * kBlock) {
    const uint begin = (end - 1) / kBlock * kBlock, size = end - begin;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = simdgroup; i < size; i += kSimdgroups) {
      float others[N];
      fetch(vector, grad + (begin + i) * params.grad[1], params.scale, params.values, lane);
      fetch(others, value_grads + (from + ulong(begin + i) * params.value_heads) * params.values, -1.0f, params.values,
            lane);
      for (uint j = 0; j <= i; ++j) {
        float error[N], sums[2] = {0.0f, 0.0f};
        fetch(error, errors + (from + ulong(begin + j) * params.value_heads) * params.values, 1.0f, params.values,
              lane);
#pragma unroll
        for (uint n = 0; n < N; ++n) {
          sums[0] += vector[n] * error[n];
          sums[1] += others[n] * error[n];
        }
        lanes_sums<32, 2>(sums, lane);
        if (lane % 16 == 0) scores[lane / 16][i * kScores + j] = sums[0];
      }
    }
    for (uint j = 0; j < size; ++j) {
      fetch(vector, errors + (from + ulong(begin + j) * params.value_heads) * params.values, 1.0f, params.values, lane);
      const float product = state_grad.product(vector, lane);
      if (lane % State::kLanes == 0) behind[simdgroup][j][own] = product;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    // Half a simdgroup has a row, and a lane the position i of the block. Meanwhile j goes through those before.
    const uint i = lane % kBlock, half_begin = lane - i;
    const ulong at = from + ulong(begin + i) * params.value_heads;
    const float strength = i < size && params.weighted ? beta[at] : 1.0f;
    float beta_product = 0.0f;
#pragma unroll 1
    for (uint pair = 0; pair < ROWS / 2; ++pair) {
      const uint of_half = 2 * pair + lane / kBlock, column = first + of_half;
      const ulong to = at * params.keys + column;
      const bool inside = i < size && column < params.keys;
      const float query =
          inside ? static_cast<float>(q[(begin + i) * params.q[1] + column]) * lengths[0][begin + i] : 0.0f;
      const float key =
          inside ? static_cast<float>(k[(begin + i) * params.k[1] + column]) * lengths[1][begin + i] : 0.0f;
      const float decay = inside ? exp(g[to]) : 1.0f;
      float by_result = 0.0f, by_error = 0.0f, by_state = 0.0f, across = 0.0f, written = 0.0f;
      float since = 1.0f;  // the decay from j to i
      for (uint j = size; j-- > 0;) {
        const float next = simd_shuffle(decay, static_cast<ushort>(half_begin + min(j + 1, kBlock - 1)));
        if (i > j) since *= next;
        const float other = simd_shuffle(key * strength, static_cast<ushort>(half_begin + j));
        const float until = simd_shuffle(since, static_cast<ushort>(half_begin + size - 1));
        const float of_result = inside && i >= j ? since * scores[0][i * kScores + j] : 0.0f;
        const float of_error = inside && i > j && params.corrects ? since * scores[1][i * kScores + j] : 0.0f;
        by_result += other * of_result;
        by_error += other * of_error;
        const float sum = sum_from(query * of_result + key * of_error, lane);
        const float added = until * behind[simdgroup][j][of_half];
        if (i > j) across += other * (sum + added);
        if (i == j) by_state = sum + added;
        written += other * added;
      }
      since *= simd_shuffle(decay, static_cast<ushort>(half_begin));
      const float of_q = inside ? since * gq[to] : 0.0f, of_k = inside ? since * gk[to] : 0.0f;
      const float of_states = simd_shuffle(gate, static_cast<ushort>(of_half * State::kLanes));
      const float all = simd_shuffle(since, static_cast<ushort>(half_begin + size - 1));
      const float found =
          (end == count ? of_states * all : of_states - written) + across + sum_from(query * of_q + key * of_k, lane);
      if (inside) {
        gq[to] = of_q + by_result;
        gk[to] = of_k + by_error + strength * by_state;
        gg[to] = found;
        beta_product += key * by_state;
      }
      const float of_first = simd_shuffle(found, static_cast<ushort>(own % 2 * kBlock));
      if (own / 2 == pair) gate = of_first;
    }
    beta_product += simd_shuffle_xor(beta_product, kBlock);
    if (lane < size) products[simdgroup][begin + lane] = beta_product;
    for (uint i = end; begin > 0 && i-- > begin;) {
      const ulong at = from + ulong(i) * params.value_heads;
      fetch(vector, grad + i * params.grad[1], params.scale, params.values, lane);
      state_grad.add(holds ? static_cast<float>(q[i * params.q[1] + row]) * lengths[0][i] : 0.0f, vector);
      if (params.corrects) {
        fetch(vector, value_grads + at * params.values, -1.0f, params.values, lane);
        state_grad.add(holds ? static_cast<float>(k[i * params.k[1] + row]) * lengths[1][i] : 0.0f, vector);
      }
      state_grad.scale(holds ? exp(g[at * params.keys + row]) : 1.0f);
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
#define INSTANTIATE_VALUES(T, types)                                                            \
  INSTANTIATE("gated_delta_rule_rows_64", types, gated_delta_rule_rows<DELTA_ROWS(64), 2, T>)   \
  INSTANTIATE("gated_delta_rule_rows_128", types, gated_delta_rule_rows<DELTA_ROWS(128), 4, T>) \
  INSTANTIATE("gated_delta_rule_rows_256", types, gated_delta_rule_rows<DELTA_ROWS(256), 8, T>)
INSTANTIATE_VALUES(float, "_float")
INSTANTIATE_VALUES(half, "_half")
INSTANTIATE_VALUES(bfloat, "_bfloat")

// The gradient of a head's q or k: the sum of those by its heads of v, and through the normalization. A lane has some
// quads of the keys.
template <typename T>
struct KeyGradient {
  static constexpr constant uint kQuads = DELTA_SIZE / 128;

  float4 sums[kQuads], values[kQuads];

  // The elements that `row` has of quad `at`.
  template <typename U>
  static float4 quad_of(device const U* row, uint at, constant DeltaRuleParams& params) {
    if (params.wide)
      return 4 * at < params.keys ? static_cast<float4>(reinterpret_cast<device const vec<U, 4>*>(row)[at]) : 0.0f;
    float4 quad = float4(0.0f);
#pragma unroll
    for (uint i = 0; i < 4; ++i)
      if (4 * at + i < params.keys) quad[i] = static_cast<float>(row[4 * at + i]);
    return quad;
  }
  void load(device const float* parts, device const T* x, constant DeltaRuleParams& params, uint lane) {
#pragma unroll
    for (uint n = 0; n < kQuads; ++n) {
      sums[n] = quad_of(parts, n * 32 + lane, params);
      values[n] = params.normalized ? quad_of(x, n * 32 + lane, params) : 0.0f;
    }
    for (uint head = 1; head < params.value_heads / params.heads; ++head) {
      parts += params.keys;
#pragma unroll
      for (uint n = 0; n < kQuads; ++n) sums[n] += quad_of(parts, n * 32 + lane, params);
    }
  }
  void store(device T* gx, constant DeltaRuleParams& params, uint lane) const {
    float squares = 0.0f, product = 0.0f;
#pragma unroll
    for (uint n = 0; n < kQuads; ++n) {
      squares += dot(values[n], values[n]);
      product += dot(values[n], sums[n]);
    }
    const float factor = params.normalized ? inverse_length(simd_sum(squares)) : 1.0f;
    const float along = simd_sum(product) * factor * factor;
#pragma unroll
    for (uint n = 0; n < kQuads; ++n) {
      const uint at = 4 * (n * 32 + lane);
      const vec<T, 4> quad = static_cast<vec<T, 4>>(factor * (sums[n] - along * values[n]));
      if (params.wide && at < params.keys) *reinterpret_cast<device vec<T, 4>*>(gx + at) = quad;
#pragma unroll
      for (uint i = 0; i < 4; ++i)
        if (!params.wide && at + i < params.keys) gx[at + i] = quad[i];
    }
  }
};

// A simdgroup has a position of a head of q and k.
template <typename T>
[[kernel]] [[max_total_threads_per_threadgroup(DELTA_THREADS)]] void gated_delta_rule_keys(
    device const T* q [[buffer(0)]], device const T* k [[buffer(1)]], device const float* parts_q [[buffer(2)]],
    device const float* parts_k [[buffer(3)]], device const float* beta_parts [[buffer(4)]], device T* gq [[buffer(5)]],
    device T* gk [[buffer(6)]], device float* gbeta [[buffer(7)]], constant DeltaRuleParams& params [[buffer(8)]],
    uint group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  const uint at = group * kSimdgroups + thread_index / 32, head = at % params.heads, lane = thread_index % 32;
  const uint position = at / params.heads, batch = position / params.length, i = position % params.length;
  if (batch >= params.batch) return;
  const uint repeats = params.value_heads / params.heads;
  const ulong first = ulong(at) * repeats * params.keys, own = ulong(at) * params.keys;
  KeyGradient<T> of_q, of_k;
  of_q.load(parts_q + first, q + batch * params.q[0] + i * params.q[1] + head * params.q[2], params, lane);
  of_k.load(parts_k + first, k + batch * params.k[0] + i * params.k[1] + head * params.k[2], params, lane);
  of_q.store(gq + own, params, lane);
  of_k.store(gk + own, params, lane);
  // Threadgroups for some rows each have found parts of beta's gradients.
  for (ulong each = ulong(at) * repeats; params.by_channel && params.weighted && each < (ulong(at) + 1) * repeats;
       ++each) {
    const float part = lane < params.row_blocks ? beta_parts[each * params.row_blocks + lane] : 0.0f;
    const float sum = simd_sum(part);
    if (lane == 0) gbeta[each] = sum;
  }
}
INSTANTIATE("gated_delta_rule_keys", "_float", gated_delta_rule_keys<float>)
INSTANTIATE("gated_delta_rule_keys", "_half", gated_delta_rule_keys<half>)
INSTANTIATE("gated_delta_rule_keys", "_bfloat", gated_delta_rule_keys<bfloat>)
