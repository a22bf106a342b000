// Rotary position embedding: pairs (a, b) of a head's elements become (a cos - b sin, b cos + a sin). T is the type of
// q and k, C that of the tables of cos and sin. A thread has the same pairs of ROPE_HEADS heads of a token: one of
// them, or in the packed kernels, where 16 bytes can be read at a time, two times 16 bytes. It rotates in float32.
#include <metal_stdlib>

#include "common/pack.h"
#include "rotary/rope.h"

using namespace metal;

// What a thread has to do.
struct Work {
  uint batch;
  uint token;
  uint head;   // the first
  uint index;  // of its elements in a head, from pairs to the rest

  Work(constant RopeParams& params, uint2 at, uint per_head)
      : batch(at.y / params.tokens),
        token(at.y % params.tokens),
        head(at.x / per_head * ROPE_HEADS),
        index(at.x % per_head) {}
};

inline long offset_of(constant const long (&strides)[3], uint batch, uint token, uint head) {
  return batch * strides[0] + token * strides[1] + head * strides[2];
}

template <typename T>
inline device const T* head_of(device const T* q, device const T* k, constant RopeParams& params, Work work,
                               uint head) {
  return head < params.q_heads ? q + offset_of(params.q_strides, work.batch, work.token, head)
                               : k + offset_of(params.k_strides, work.batch, work.token, head - params.q_heads);
}
template <typename T>
inline device T* result_of(device T* q, device T* k, constant RopeParams& params, Work work, uint head) {
  return head < params.q_heads ? q + offset_of(params.q_out_strides, work.batch, work.token, head)
                               : k + offset_of(params.k_out_strides, work.batch, work.token, head - params.q_heads);
}

// Where the angles of a section begin, or -1 if the position is none that the tables have.
inline long table_row(device const long* positions, constant RopeParams& params, Work work, uint section) {
  const long first = section * params.table_strides[0];
  if (!params.has_positions) return first + work.batch * params.table_strides[1] + work.token * params.table_strides[2];
  long position = positions[offset_of(params.position_strides, section, work.batch, work.token)];
  if (position < 0) position += params.positions;
  return position < 0 || position >= long(params.positions) ? -1 : first + position * params.table_strides[2];
}

// (cos, sin) of one pair. A position that the tables do not have gives NaN.
template <typename C>
inline float2 angle_of(device const C* cosine, device const C* sine, device const long* positions,
                       constant RopeParams& params, Work work, uint pair) {
  const uint section = params.sectioned ? uint(pair >= params.sections[0]) + uint(pair >= params.sections[1]) : 0;
  const long row = table_row(positions, params, work, section);
  if (row < 0) return float2(NAN);
  const uint column = params.every_other ? 2 * pair : pair;
  return float2(static_cast<float>(cosine[row + column]), params.direction * static_cast<float>(sine[row + column]));
}

template <typename T, typename C>
kernel void rope_single(device const T* q [[buffer(0)]], device const T* k [[buffer(1)]], device T* q_out [[buffer(2)]],
                        device T* k_out [[buffer(3)]], device const C* cosine [[buffer(4)]],
                        device const C* sine [[buffer(5)]], device const long* positions [[buffer(6)]],
                        constant RopeParams& params [[buffer(7)]], uint2 at [[thread_position_in_grid]]) {
  const Work work(params, at, params.pairs + params.rest);
  const uint last = min(work.head + ROPE_HEADS, params.heads);
  if (work.index >= params.pairs) {
    const uint element = work.index + params.pairs;
    for (uint head = work.head; head < last; ++head)
      result_of(q_out, k_out, params, work, head)[element] = head_of(q, k, params, work, head)[element];
    return;
  }
  const float2 angle = angle_of(cosine, sine, positions, params, work, work.index);
  const uint a = params.interleaved ? 2 * work.index : work.index, b = params.interleaved ? a + 1 : a + params.pairs;
  for (uint head = work.head; head < last; ++head) {
    device const T* const x = head_of(q, k, params, work, head);
    device T* const y = result_of(q_out, k_out, params, work, head);
    const float u = static_cast<float>(x[a]), v = static_cast<float>(x[b]);
    y[a] = static_cast<T>(u * angle.x - v * angle.y);
    y[b] = static_cast<T>(v * angle.x + u * angle.y);
  }
}

// The angles of a thread's pairs: whole vectors where they lie side by side.
template <uint N, typename C>
inline void fetch_angles(thread float4 (&c)[N], thread float4 (&s)[N], device const C* cosine, device const C* sine,
                         device const long* positions, constant RopeParams& params, Work work, uint pair) {
  if (params.sectioned || params.every_other) {
#pragma unroll
    for (uint n = 0; n < N; ++n) {
#pragma unroll
      for (uint i = 0; i < 4; ++i) {
        const float2 angle = angle_of(cosine, sine, positions, params, work, pair + 4 * n + i);
        c[n][i] = angle.x;
        s[n][i] = angle.y;
      }
    }
    return;
  }
  const long row = table_row(positions, params, work, 0);
#pragma unroll
  for (uint n = 0; n < N; ++n) {
    c[n] = s[n] = float4(NAN);
    if (row < 0) continue;
    c[n] = static_cast<float4>(*reinterpret_cast<device const vec<C, 4>*>(cosine + row + pair + 4 * n));
    s[n] =
        static_cast<float4>(*reinterpret_cast<device const vec<C, 4>*>(sine + row + pair + 4 * n)) * params.direction;
  }
}

template <uint N>
inline void put(thread float4 (&u)[N], thread float4 (&v)[N], uint i, float4 value) {
  if (i < N)
    u[i % N] = value;
  else
    v[i % N] = value;
}

// Rotates a thread's pairs. They have 16 bytes in u and 16 bytes in v.
template <uint N>
inline void rotate(thread float4 (&u)[N], thread float4 (&v)[N], thread float4 (&c)[N], thread float4 (&s)[N],
                   bool interleaved) {
  if (interleaved) {
#pragma unroll
    for (uint n = 0; n < N; ++n) {
      const uint i = 2 * n, j = 2 * n + 1;  // of the float4s of both
      const float4 low = i < N ? u[i % N] : v[i % N], high = j < N ? u[j % N] : v[j % N];
      const float4 a = float4(low.x, low.z, high.x, high.z), b = float4(low.y, low.w, high.y, high.w);
      const float4 p = a * c[n] - b * s[n], q = b * c[n] + a * s[n];
      put(u, v, i, float4(p.x, q.x, p.y, q.y));
      put(u, v, j, float4(p.z, q.z, p.w, q.w));
    }
    return;
  }
#pragma unroll
  for (uint n = 0; n < N; ++n) {
    const float4 a = u[n], b = v[n];
    u[n] = a * c[n] - b * s[n];
    v[n] = b * c[n] + a * s[n];
  }
}

template <typename T, typename C>
kernel void rope_packed(device const T* q [[buffer(0)]], device const T* k [[buffer(1)]], device T* q_out [[buffer(2)]],
                        device T* k_out [[buffer(3)]], device const C* cosine [[buffer(4)]],
                        device const C* sine [[buffer(5)]], device const long* positions [[buffer(6)]],
                        constant RopeParams& params [[buffer(7)]], uint2 at [[thread_position_in_grid]]) {
  constexpr uint P = kPackElements<T>, N = kPackVectors<T>;
  const uint workers = params.pairs / P;
  const Work work(params, at, workers + params.rest / P);
  if (work.index >= workers) {
    const uint element = 2 * params.pairs + (work.index - workers) * P;
#pragma unroll
    for (uint h = 0; h < ROPE_HEADS; ++h) {
      if (work.head + h < params.heads)
        *reinterpret_cast<device Pack<T>*>(result_of(q_out, k_out, params, work, work.head + h) + element) =
            *reinterpret_cast<device const Pack<T>*>(head_of(q, k, params, work, work.head + h) + element);
    }
    return;
  }
  const uint pair = work.index * P;
  const uint first = params.interleaved ? 2 * pair : pair;
  const uint second = params.interleaved ? first + P : first + params.pairs;
  Pack<T> low[ROPE_HEADS], high[ROPE_HEADS];  // all of them are on their way at once
#pragma unroll
  for (uint h = 0; h < ROPE_HEADS; ++h) {
    device const T* const x = head_of(q, k, params, work, min(work.head + h, params.heads - 1));
    low[h] = *reinterpret_cast<device const Pack<T>*>(x + first);
    high[h] = *reinterpret_cast<device const Pack<T>*>(x + second);
  }
  float4 c[N], s[N];
  fetch_angles(c, s, cosine, sine, positions, params, work, pair);
#pragma unroll
  for (uint h = 0; h < ROPE_HEADS; ++h) {
    if (work.head + h >= params.heads) continue;
    float4 u[N], v[N];
    unpack(low[h], u);
    unpack(high[h], v);
    rotate(u, v, c, s, params.interleaved);
    device T* const y = result_of(q_out, k_out, params, work, work.head + h);
    *reinterpret_cast<device Pack<T>*>(y + first) = packed<T>(u);
    *reinterpret_cast<device Pack<T>*>(y + second) = packed<T>(v);
  }
}

#define INSTANTIATE(name, types, ...) template[[host_name(name types)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;

#define INSTANTIATE_ROPE(types, T, C)                  \
  INSTANTIATE("rope_single", types, rope_single<T, C>) \
  INSTANTIATE("rope_packed", types, rope_packed<T, C>)

INSTANTIATE_ROPE("_float", float, float)
INSTANTIATE_ROPE("_half", half, half)
INSTANTIATE_ROPE("_bfloat", bfloat, bfloat)
INSTANTIATE_ROPE("_half_float", half, float)
INSTANTIATE_ROPE("_bfloat_float", bfloat, float)
