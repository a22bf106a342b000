"""A tour of the language: the constructs of real programs, each with a value that one can compute by hand."""

import torch

import metalcore

# A header that is shared with Objective-C, as in Apple's samples.
SHARED = """
#ifndef ShaderTypes_h
#define ShaderTypes_h
#ifdef __METAL_VERSION__
#define NS_ENUM(_type, _name) enum _name : _type _name; enum _name : _type
typedef metal::int32_t EnumBackingType;
#else
#import <Foundation/Foundation.h>
typedef NSInteger EnumBackingType;
#endif
#include <simd/simd.h>
typedef NS_ENUM(EnumBackingType, BufferIndex) { BufferIndexA = 0, BufferIndexB = 1, BufferIndexOut = 2 };
typedef enum Mode { ModeAdd, ModeMul } Mode;
typedef struct {
  vector_float2 position; vector_float4 color; matrix_float4x4 m; simd_uint2 size; simd_float3 n; packed_float3 p;
} Uniforms;
#endif
"""

SOURCE = """
#include <metal_stdlib>
#include <simd/simd.h>
using namespace metal;
#include "ShaderTypes.h"
enum { kIndexZero, kIndexOne };
constexpr constant int kTwo = 2;
static constant float4 rows[2] = { float4(1, 2, 3, 4), {5, 6, 7, 8} };
constant float grid[2][2] = {{1, 2}, {3, 4}};
struct __attribute__((packed)) Packed { uchar a; float b; };
struct alignas(16) Aligned { float a; };
enum class Kind : uint8_t { first = 1, second };
union Bits { float f; uint u; uchar4 c; };
template <typename T, int N> struct Array2 {
  T v[N];
  T sum() const thread;
  T sum() const device;
  thread T& operator[](int i) thread { return v[i]; }
  device T& operator[](int i) device { return v[i]; }
  const device T& operator[](int i) const device { return v[i]; }
};
template <typename T, int N> T Array2<T, N>::sum() const thread {
  T s = 0; for (int i = 0; i < N; ++i) s += v[i]; return s; }
template <typename T, int N> T Array2<T, N>::sum() const device {
  T s = 0; for (int i = 0; i < N; ++i) s += v[i]; return s; }
struct C2 { float r, i; };
inline C2 operator+(thread const C2& a, thread const C2& b) { return {a.r + b.r, a.i + b.i}; }
inline C2 operator+(device const C2& a, thread const C2& b) { return {a.r + b.r, a.i + b.i}; }
inline C2 operator+(device const C2& a, device const C2& b) { return {a.r + b.r, a.i + b.i}; }
template <typename T> void deq(device const T* x, short il, thread float4x4& reg) {
  for (int i = 0; i < 16; ++i) reg[i / 4][i % 4] = float(x[i]) + il; }
template <typename T, void (*func)(device const T*, short, thread float4x4&)>
kernel void with_function(device const T* x [[buffer(kIndexZero)]], device float* out [[buffer(kIndexOne)]],
                          uint i [[thread_position_in_grid]]) {
  float4x4 m; func(x, 1, m); out[i] = m[i / 4][i % 4]; }
template [[host_name("with_function_float")]]
kernel void with_function<float, deq<float>>(device const float*, device float*, uint);
template <typename... Ts> float total(Ts... xs) { return (float(xs) + ...); }
template <typename T = float, int N = 4>
[[kernel, max_total_threads_per_threadgroup(N * 64)]] void defaults(device T* out) { out[0] = N; }
template [[host_name("defaults")]] [[kernel]] decltype(defaults<>) defaults<>;
kernel void proto(device float* out, threadgroup float (&tile)[32] [[threadgroup(0)]]);
kernel void atomics(device atomic_uint* c [[buffer(BufferIndexA)]], device atomic<float>& f [[buffer(BufferIndexB)]],
                    device atomic_int* m [[buffer(BufferIndexOut)]], uint i [[thread_position_in_grid]],
                    uint n [[threads_per_grid]]) {
  threadgroup atomic_int local;
  if (i == 0) atomic_store_explicit(&local, 0, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  atomic_fetch_add_explicit(&local, 1, memory_order_relaxed);
  atomic_fetch_add_explicit(c, i, memory_order_relaxed);
  atomic_fetch_add_explicit(&f, 0.5f, memory_order_relaxed);
  atomic_fetch_max_explicit(&m[0], int(i), memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (i == 0) atomic_store_explicit(&m[1], atomic_load_explicit(&local, memory_order_relaxed), memory_order_relaxed);
}
[[max_total_threads_per_threadgroup(128)]] kernel void features(
    const device float* a [[ buffer(BufferIndexA) ]] [[maybe_unused]],
    constant Uniforms& u [[ buffer(BufferIndexB) ]],
    device float* out [[ buffer(BufferIndexOut) ]],
    const uint gid [[ thread_position_in_grid ]]) {
  float acc = 0;
  #pragma unroll
  for (int i = 0; i < 2; ++i) acc += grid[i][0] + rows[i].w;
  #pragma clang loop unroll(full)
  for (short i = 0; i < 3; i++) { acc += i; }
  Packed p; p.a = 3; p.b = 2.5; acc += p.a + p.b + sizeof(Packed);
  Kind k = Kind::second;
  switch (k) { case Kind::first: acc += 1000; break; case Kind::second: acc += 1; break; default: break; }
  Bits bits; bits.f = 1.0; acc += bits.c.w;
  Array2<float, 3> arr; for (int i = 0; i < 3; ++i) arr[i] = i; acc += arr.sum();
  C2 c = C2{1, 2} + C2{3, 4}; acc += c.r * c.i;
  auto v = rows[0].xy; acc += v.y;
  float3x3 m3 = float3x3(1.0); float3 r = m3 * float3(1, 2, 3); acc += r.z + dot(r, r.zyx) + length(float2(3, 4));
  bool3 b = r > 1.5; acc += any(b) + 2 * all(b); acc += select(1.0f, 2.0f, b.x);
  acc += total(1, 2.0f, half(3));
  float local[2][2] = {{1, 2}, {3, 4}}; thread float (*ptr)[2] = local; acc += ptr[1][1];
  device const float4* a4 = (device const float4*)a; acc += a4->x + (*a4).zw.y;
  uint2 w = as_type<uint2>(half4(1.0h, 2.0h, 3.0h, 4.0h)); acc += w.x > 0 ? 1 : 0;
  acc += u.position.y + u.color.w + u.m[0][0] + u.size.x + u.n.z + u.p.x + kTwo;
  half hs = acc > 0 ? 1.0h : half(0); acc += hs; half2 h2 = half2(1.0h, 2.0); h2.yx = h2; acc += h2.x;
  int x = 7; x <<= 1; x ^= 3; acc += x % 4; acc += max(1, 2) + min(3u, 4u) + clamp(5.5f, 0.0f, 1.0f);
  array<float, 4> ar = {1, 2, 3, 4}; acc += ar[2] + ar.size();
  acc += Mode::ModeMul + ModeAdd;
  { threadgroup float unused_tg[4]; unused_tg[0] = acc; acc = unused_tg[0]; }
  if (gid == 0) out[0] = acc;
  out[1] = (float)INFINITY > FLT_MAX ? M_PI_F : 0; out[2] = isnan(NAN) ? popcount(7u) + clz(1u) : 0;
  out[3] = fast::exp(0.0f) + precise::sqrt(4.0f) + metal::fma(1.0f, 2.0f, 3.0f) + pow(2.0f, 3.0f) + fract(1.25f);
}
"""


def test_tour(device, tmp_path):
    (tmp_path / "ShaderTypes.h").write_text(SHARED)
    library = metalcore.compile_shader(SOURCE, include_dirs=[tmp_path])
    x, out = torch.arange(16.0, device=device), torch.zeros(16, device=device)

    library.with_function_float(x, out)
    assert out.tolist() == [i + 1 for i in range(16)]

    library.defaults(out, threads=1)
    assert out[0].item() == 4

    counter, total = torch.zeros(1, dtype=torch.int32, device=device), torch.zeros(1, device=device)
    most = torch.zeros(2, dtype=torch.int32, device=device)
    library.atomics(counter, total, most, threads=64, group_size=64)
    assert (counter.item(), total.item(), most.tolist()) == (sum(range(64)), 32, [63, 64])

    uniforms = torch.zeros(256, dtype=torch.uint8, device=device)
    library.features(x, uniforms, out, threads=1)
    assert out[:4].tolist() == [176.5, torch.tensor(torch.pi).item(), 34, 16.25]
    assert library.features.max_threads_per_threadgroup == 128
