// Optimizers whose states have 8 bits, over many parameters at once (Dettmers, Lewis, Shleifer and Zettlemoyer, "8-bit
// Optimizers via Block-wise Quantization", 2022). Blocks of 256 elements of a state share a scale, their largest
// absolute value, and an element is an index of a table. A simdgroup has a block, and a lane eight of its elements.
#include <metal_stdlib>
#include "lanes.h"
#include "optim.h"
using namespace metal;

template <typename T>
struct EightBitPointers {
  device T* param;
  device T* grad;
};
struct EightBitStates {
  device uchar* first;
  device uchar* second;
  device float* first_scales;
  device float* second_scales;
};

// A sorted table in threadgroup memory, with the numbers between two neighbours.
struct Table {
  threadgroup const float* entries;
  threadgroup const float* bounds;
  float middle, low, high;  // bounds that every search compares with

  Table(threadgroup const float* memory) : entries(memory), bounds(memory + 256) {
    middle = bounds[127];
    low = bounds[63];
    high = bounds[191];
  }
  // The nearest entry: how many bounds are less, or all of them for NaN.
  uint nearest(float x) const {
    const bool upper = !(middle >= x);
    uint place = upper ? 128 : 0;
    place += (upper ? high : low) >= x ? 0 : 64;
#pragma unroll
    for (uint step = 32; step > 0; step /= 2) place += bounds[place + step - 1] >= x ? 0 : step;
    return place;
  }
};
inline void fill(threadgroup float* memory, device const float* code, uint thread_index, uint threads) {
  for (uint i = thread_index; i < 256; i += threads) {
    memory[i] = code[i];
    memory[256 + i] = i < 255 ? (code[i] + code[i + 1]) / 2.0f : 0.0f;
  }
}

// Eight elements of a state, from their bytes.
inline void unpack8(thread float* values, device const uchar* from, uint count, bool as_vectors, float scale,
                    thread const Table& table) {
  if (as_vectors && count == 8) {
    const uint2 bytes = *reinterpret_cast<device const uint2*>(from);
#pragma unroll
    for (uint k = 0; k < 8; ++k) values[k] = table.entries[(bytes[k / 4] >> (k % 4 * 8)) & 255u] * scale;
  } else {
    for (uint k = 0; k < 8; ++k) values[k] = k < count ? table.entries[from[k]] * scale : 0.0f;
  }
}

// A block's scale. The lane that writes it reads it, since no barrier lies in between.
inline float scale_of(device const float* scale, uint lane) {
  float read = 0.0f;
  if (lane == 0) read = *scale;
  return simd_broadcast_first(read);
}

// Packs the elements of a block, of which each lane has eight. All lanes of a simdgroup come here.
inline void pack8(thread const float* values, device uchar* to, device float* scale, uint count, bool as_vectors,
                  thread const Table& table, uint lane) {
  uint largest = 0;  // of the bits, so that NaN is larger than all
#pragma unroll
  for (uint k = 0; k < 8; ++k) largest = max(largest, as_type<uint>(values[k]) & 0x7fffffffu);
  largest = simd_max(largest);
  const float absmax = as_type<float>(largest);
  const float inverse = absmax < 0x1p-126f ? 0.0f : 1.0f / absmax;
  if (count == 0) return;
  if (lane == 0) *scale = absmax;
  uint2 bytes = uint2(0);
#pragma unroll
  for (uint k = 0; k < 8; ++k) bytes[k / 4] |= table.nearest(values[k] * inverse) << (k % 4 * 8);
  if (as_vectors && count == 8) {
    *reinterpret_cast<device uint2*>(to) = bytes;
  } else {
#pragma unroll
    for (uint k = 0; k < 8; ++k)
      if (k < count) to[k] = uchar(bytes[k / 4] >> (k % 4 * 8));
  }
}

// Each changes a parameter's element by its gradient and its states.
struct Adam {
  static constexpr constant bool has_second = true;
  static float step(float p, float grad, thread float& m, thread float& v, constant EightBitParams& o) {
    m = fma(m, o.beta1, o.one_minus_beta1 * grad);
    v = fma(v, o.beta2, o.one_minus_beta2 * grad * grad);
    return fma(p, o.decay, -o.step_size * m / (precise::sqrt(v) * o.correction + o.eps));
  }
};
struct Lion {
  static constexpr constant bool has_second = false;
  static float step(float p, float grad, thread float& m, thread float&, constant EightBitParams& o) {
    const float direction = fma(o.beta1, m, o.one_minus_beta1 * grad);
    const float sign_of = direction > 0.0f ? 1.0f : direction < 0.0f ? -1.0f : 0.0f * direction;
    m = fma(o.beta2, m, o.one_minus_beta2 * grad);
    return fma(p, o.decay, -o.step_size * sign_of);
  }
};
struct Momentum {
  static constexpr constant bool has_second = false;
  static float step(float p, float grad, thread float& m, thread float&, constant EightBitParams& o) {
    m = fma(m, o.beta1, fma(p, o.weight_decay, grad));  // beta1 is 0 in the first step
    return fma(m, -o.step_size, p);
  }
};

template <typename A, typename T, bool by_vectors>
inline void update(EightBitPointers<T> arrays, EightBitStates states, ulong at, uint count, bool as_vectors,
                   constant EightBitParams& o, thread const Table& first, thread const Table& second, uint lane) {
  const ulong block = at / OPTIM_BLOCK;
  Lanes<T, 8> p = load_lanes<by_vectors, 8>(static_cast<device const T*>(arrays.param + at), count);
  const Lanes<T, 8> g = load_lanes<by_vectors, 8>(static_cast<device const T*>(arrays.grad + at), count);
  float m[8], v[8];
  unpack8(m, states.first + at, count, as_vectors, scale_of(states.first_scales + block, lane), first);
  if constexpr (A::has_second)
    unpack8(v, states.second + at, count, as_vectors, scale_of(states.second_scales + block, lane), second);
#pragma unroll
  for (uint k = 0; k < 8; ++k)
    p.at[k] =
        static_cast<T>(A::step(static_cast<float>(p.at[k]), static_cast<float>(g.at[k]) * o.grad_scale, m[k], v[k], o));
  store_lanes<by_vectors, 8>(p, arrays.param + at, count);
  pack8(m, states.first + at, states.first_scales + block, count, as_vectors, first, lane);
  if constexpr (A::has_second)
    pack8(v, states.second + at, states.second_scales + block, count, as_vectors, second, lane);
}

template <typename A, typename T>
[[kernel]] [[max_total_threads_per_threadgroup(OPTIM_MAX_THREADS)]] void eight_bits(
    constant EightBitPointers<T>* pointers [[buffer(0)]], constant OptimTensor* tensors [[buffer(1)]],
    constant EightBitStates* states [[buffer(2)]], constant EightBitParams& o [[buffer(3)]],
    device const float* first_code [[buffer(4)]], device const float* second_code [[buffer(5)]],
    uint threadgroup_index [[threadgroup_position_in_grid]], uint thread_index [[thread_position_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
  threadgroup float memory[A::has_second ? 1024 : 512];
  fill(memory, first_code, thread_index, threads);
  if (A::has_second) fill(memory + 512, second_code, thread_index, threads);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const Table first(memory), second(memory + (A::has_second ? 512 : 0));

  const OptimChunk chunk = find_chunk(tensors, o.grid, threadgroup_index);
  const bool as_vectors = tensors[chunk.tensor].as_vectors != 0;
  const uint part = o.grid.chunk / (threads / 32), lane = thread_index % 32;
  const uint begin = thread_index / 32 * part, end = min(chunk.length, begin + part);
  for (uint block = begin; block < end; block += OPTIM_BLOCK) {
    const uint i = block + lane * 8;
    const uint count = i < end ? min(end - i, 8u) : 0;
    const ulong at = chunk.start + (count > 0 ? i : block);
    if (as_vectors)
      update<A, T, true>(pointers[chunk.tensor], states[chunk.tensor], at, count, true, o, first, second, lane);
    else
      update<A, T, false>(pointers[chunk.tensor], states[chunk.tensor], at, count, false, o, first, second, lane);
  }
}

#define EIGHT_BITS(name, A, T)                                                                                  \
  template [[host_name(name)]] [[kernel]] void eight_bits<A, T>(                                                \
      constant EightBitPointers<T>*, constant OptimTensor*, constant EightBitStates*, constant EightBitParams&, \
      device const float*, device const float*, uint, uint, uint);
EIGHT_BITS("adam_8bit_float", Adam, float)
EIGHT_BITS("adam_8bit_half", Adam, half)
EIGHT_BITS("adam_8bit_bfloat", Adam, bfloat)
EIGHT_BITS("lion_8bit_float", Lion, float)
EIGHT_BITS("lion_8bit_half", Lion, half)
EIGHT_BITS("lion_8bit_bfloat", Lion, bfloat)
EIGHT_BITS("momentum_8bit_float", Momentum, float)
EIGHT_BITS("momentum_8bit_half", Momentum, half)
EIGHT_BITS("momentum_8bit_bfloat", Momentum, bfloat)
