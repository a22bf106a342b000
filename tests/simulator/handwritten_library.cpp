// A library by hand, as the translator would make it: with it, tests of the executor need no translator.
#include "host/kernel_abi.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#ifndef LIBRARY_VERSION
#define LIBRARY_VERSION kVersion
#endif

using namespace msl_abi;

namespace {

const Runtime* runtime;

template <typename T>
T* buffer(const Dispatch* dispatch, int index) {
  return static_cast<T*>(dispatch->buffers[index]);
}

template <typename T>
T* threadgroup_memory(uint32_t site, uint32_t count) {
  return static_cast<T*>(runtime->threadgroup_memory(site, count * sizeof(T), alignof(T)));
}

template <typename T, typename Combine>
__attribute__((always_inline)) inline T simd_reduce(T value, Combine combine, uint32_t line = __builtin_LINE()) {
  const Exchange e = runtime->simd_exchange(&value, sizeof(T), 32, line);
  const T* all = reinterpret_cast<const T*>(e.values);
  if (e.active == ~0u) {
    T result = all[0];
    for (int i = 1; i < 32; ++i) result = combine(result, all[i]);
    return result;
  }
  bool first = true;
  T result = value;
  for (uint32_t i = 0; i < 32; ++i)
    if (e.active >> i & 1) {
      result = first ? all[i] : combine(result, all[i]);
      first = false;
    }
  return result;
}

inline int quad_sum(int value, uint32_t line = __builtin_LINE()) {
  const Exchange e = runtime->simd_exchange(&value, sizeof value, 4, line);
  int sum = 0;
  for (uint32_t i = 0; i < 32; ++i)
    if (e.active >> i & 1) sum += *reinterpret_cast<const int*>(e.values + i * e.stride);
  return sum;
}

const auto add = [](auto a, auto b) { return a + b; };
const auto larger = [](auto a, auto b) { return a > b ? a : b; };

inline void barrier(uint32_t line = __builtin_LINE()) { runtime->threadgroup_barrier(3, line); }

// out[i] = in[i] * 2 + 1, a row at a time.
void scale_row(const Dispatch* dispatch, const Thread* first, uint32_t count) {
  const float* in = buffer<float>(dispatch, 0) + first->position_in_grid.x;
  float* out = buffer<float>(dispatch, 1) + first->position_in_grid.x;
  for (uint32_t i = 0; i < count; ++i) out[i] = in[i] * 2 + 1;
}

void scale(const Dispatch* dispatch, const Thread* thread) { scale_row(dispatch, thread, 1); }

// Each thread stores its attributes, eighteen numbers, at its place in the grid.
void describe(const Dispatch* dispatch, const Thread* t) {
  const Uint3 n = dispatch->threads_per_grid, p = t->position_in_grid;
  uint32_t* out = buffer<uint32_t>(dispatch, 0) + (size_t{p.z} * n.y * n.x + size_t{p.y} * n.x + p.x) * 18;
  const Uint3 fields[] = {p, t->position_in_threadgroup, t->threadgroup_position, t->threadgroup_size,
                          dispatch->threadgroups_per_grid};
  std::memcpy(out, fields, sizeof fields);
  out[15] = t->lane;
  out[16] = t->simdgroup;
  out[17] = t->simdgroups;
  out[15] += 100 * t->index_in_threadgroup;
}

void describe_row(const Dispatch* dispatch, const Thread* first, uint32_t count) {
  Thread thread = *first;
  for (uint32_t i = 0; i < count; ++i) {
    describe(dispatch, &thread);
    ++thread.position_in_grid.x;
    ++thread.position_in_threadgroup.x;
    thread.simdgroup = ++thread.index_in_threadgroup / 32;
    thread.lane = thread.index_in_threadgroup % 32;
  }
}

// One threadgroup per row of `n` numbers.
void softmax(const Dispatch* dispatch, const Thread* t) {
  const uint32_t n = *buffer<uint32_t>(dispatch, 2), row = t->threadgroup_position.x;
  const float* in = buffer<float>(dispatch, 0) + size_t{row} * n;
  float* out = buffer<float>(dispatch, 1) + size_t{row} * n;
  float* shared = threadgroup_memory<float>(0, 32);
  const uint32_t me = t->index_in_threadgroup, threads = t->threadgroup_size.x;
  float top = -std::numeric_limits<float>::infinity();
  for (uint32_t i = me * 4; i < n; i += threads * 4)
    for (uint32_t k = 0; k < 4; ++k) top = std::max(top, in[i + k]);
  top = simd_reduce(top, larger);
  if (t->lane == 0) shared[t->simdgroup] = top;
  barrier();
  top = simd_reduce(t->lane < t->simdgroups ? shared[t->lane] : -std::numeric_limits<float>::infinity(), larger);
  float sum = 0;
  for (uint32_t i = me * 4; i < n; i += threads * 4)
    for (uint32_t k = 0; k < 4; ++k) sum += out[i + k] = std::exp2(1.442695f * (in[i + k] - top));
  sum = simd_reduce(sum, add);
  barrier();
  if (t->lane == 0) shared[t->simdgroup] = sum;
  barrier();
  sum = simd_reduce(t->lane < t->simdgroups ? shared[t->lane] : 0.0f, add);
  const float scale = 1 / sum;
  for (uint32_t i = me * 4; i < n; i += threads * 4)
    for (uint32_t k = 0; k < 4; ++k) out[i + k] *= scale;
}

// Has `n` SIMD operations and as many barriers, to time them.
void exchange_loop(const Dispatch* dispatch, const Thread* t) {
  const uint32_t n = *buffer<uint32_t>(dispatch, 1);
  float value = static_cast<float>(t->lane);
  for (uint32_t i = 0; i < n; ++i) value = simd_reduce(value, larger);
  buffer<float>(dispatch, 0)[t->position_in_grid.x] = value;
}

void barrier_loop(const Dispatch* dispatch, const Thread* t) {
  const uint32_t n = *buffer<uint32_t>(dispatch, 1);
  for (uint32_t i = 0; i < n; ++i) barrier();
  buffer<float>(dispatch, 0)[t->position_in_grid.x] = 1;
}

// Lanes part, meet in their own branches, and meet again: the sums show which lanes met.
void divergence(const Dispatch* dispatch, const Thread* t) {
  int* out = buffer<int>(dispatch, 0) + size_t{t->position_in_grid.x} * 5;
  const int one = 1;
  if (t->lane % 2) {
    out[0] = simd_reduce(one, add);
  } else if (t->lane % 4) {
    out[0] = simd_reduce(one, add) * 10;
  } else {
    out[0] = 0;
  }
  out[1] = simd_reduce(one, add);
  int sum = 0;
  for (uint32_t i = 0; i < t->lane; ++i) sum += simd_reduce(one, add);
  out[2] = sum;
  if (t->lane >= 20) return;
  out[3] = simd_reduce(one, add);
  struct Wide {
    long values[4];
  };
  if (t->lane < 8) {
    const Wide wide = {{1, 2, 3, t->lane}};
    const Exchange e = runtime->simd_exchange(&wide, sizeof wide, 32, __LINE__);
    long total = 0;
    for (uint32_t i = 0; i < 32; ++i)
      if (e.active >> i & 1) total += reinterpret_cast<const Wide*>(e.values + i * e.stride)->values[3];
    out[4] = static_cast<int>(total);
  } else {
    out[4] = quad_sum(static_cast<int>(t->lane));
  }
}

// The last threads of the group leave before the barrier.
void early_exit(const Dispatch* dispatch, const Thread* t) {
  int* shared = threadgroup_memory<int>(0, 1024);
  const uint32_t me = t->index_in_threadgroup, half = t->threadgroup_size.x / 2;
  if (me >= half) return;
  shared[me] = static_cast<int>(me);
  barrier();
  buffer<int>(dispatch, 0)[me] = shared[half - 1 - me];
}

// Thread 0 waits for a number that the last thread stores.
void spin(const Dispatch* dispatch, const Thread* t) {
  uint32_t* out = buffer<uint32_t>(dispatch, 0);
  if (t->index_in_threadgroup == t->threadgroup_size.x - 1) __atomic_store_n(&out[0], 7, __ATOMIC_RELAXED);
  if (t->index_in_threadgroup == 0) {
    while (__atomic_load_n(&out[0], __ATOMIC_RELAXED) != 7) runtime->yield();
    out[1] = 8;
  }
  barrier();
}

void large_memory(const Dispatch* dispatch, const Thread* t) {
  char* a = threadgroup_memory<char>(0, 30000);
  int* b = threadgroup_memory<int>(1, 1000);
  b[t->index_in_threadgroup] = a[t->index_in_threadgroup] = 1;
  barrier();
  buffer<int>(dispatch, 0)[0] = b[0];
}

// Stores the length of its threadgroup argument.
void argument_memory(const Dispatch* dispatch, const Thread* t) {
  int* a = static_cast<int*>(runtime->threadgroup_memory(64, dispatch->threadgroup_lengths[0], 16));
  a[t->index_in_threadgroup] = static_cast<int>(t->index_in_threadgroup);
  barrier();
  buffer<int>(dispatch, 0)[t->index_in_threadgroup] = a[t->threadgroup_size.x - 1 - t->index_in_threadgroup];
}

void throwing(const Dispatch*, const Thread* t) {
  barrier();
  if (t->position_in_grid.x == 40) runtime->threadgroup_memory(1000, 4, 4);
  barrier();
}

void deep_stack(const Dispatch* dispatch, const Thread* t) {
  volatile char local[160 * 1024];
  for (size_t i = 0; i < sizeof local; i += 512) local[i] = static_cast<char>(t->lane);
  barrier();
  buffer<int>(dispatch, 0)[t->position_in_grid.x] = local[512];
}

const Argument in_out[] = {{"in", kBuffer, 0, 4, 0, 0}, {"out", kBuffer, 1, 4, 1, 0}};
const Argument in_out_n[] = {{"in", kBuffer, 0, 4, 0, 0}, {"out", kBuffer, 1, 4, 1, 0}, {"n", kBuffer, 2, 4, 0, 1}};
const Argument out_n[] = {{"out", kBuffer, 0, 4, 1, 0}, {"n", kBuffer, 1, 4, 0, 1}};
const Argument out_scratch[] = {{"out", kBuffer, 0, 4, 1, 0}, {"scratch", kThreadgroup, 0, 4, 1, 0}};

const Kernel kernels[] = {
    {"scale", 0, 0, in_out, 2, scale, scale_row},
    {"describe", 0, 0, in_out + 1, 0, describe, describe_row},
    {"describe_fibers", kSynchronizes, 0, in_out + 1, 0, describe, nullptr},
    {"softmax", kSynchronizes, 0, in_out_n, 3, softmax, nullptr},
    {"exchange_loop", kSynchronizes, 0, out_n, 2, exchange_loop, nullptr},
    {"barrier_loop", kSynchronizes, 0, out_n, 2, barrier_loop, nullptr},
    {"divergence", kSynchronizes, 0, out_n, 1, divergence, nullptr},
    {"early_exit", kSynchronizes, 0, out_n, 1, early_exit, nullptr},
    {"spin", kSynchronizes, 0, out_n, 1, spin, nullptr},
    {"large_memory", kSynchronizes, 0, out_n, 1, large_memory, nullptr},
    {"argument_memory", kSynchronizes, 0, out_scratch, 2, argument_memory, nullptr},
    {"throwing", kSynchronizes, 64, out_n, 1, throwing, nullptr},
    {"deep_stack", kSynchronizes, 0, out_n, 1, deep_stack, nullptr},
};

const Library library = {LIBRARY_VERSION, sizeof kernels / sizeof kernels[0], kernels,
                         [](const Runtime* r) { runtime = r; }, 0};

}  // namespace

extern "C" const Library* msl_library() { return &library; }
