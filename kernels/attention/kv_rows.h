// Where the keys and values of a request lie.
//
// Lengths and places of pages are in device memory, so the host has not seen them. They are bounded here: no value of
// theirs leads out of a tensor, and a key whose page does not exist is not seen.
#pragma once

#include <metal_stdlib>

#include "attention/decode.h"
#include "common/pack.h"

using namespace metal;

struct KeyRows {
  uint length;       // keys of the request
  uint first_page;   // index into kv_indices
  ulong key, value;  // the first key's and value's place in memory, in elements

  KeyRows(uint request, uint kv_head, constant AttentionDecodeParams& params, device const int* kv_indptr,
          device const int* kv_last_page_len)
      : length(params.keys), first_page(0), key(kv_head * params.k.head), value(kv_head * params.v.head) {
    if (params.key_layout == KEYS_EACH) {
      key += request * params.k.batch;
      value += request * params.v.batch;
      return;
    }
    const bool paged = params.key_layout == KEYS_PAGED;
    const int most = static_cast<int>(paged ? params.indices : params.keys);
    const int begin = clamp(kv_indptr[request], 0, most);
    const int end = clamp(kv_indptr[request + 1], begin, most);
    length = static_cast<uint>(end - begin);
    if (!paged) {
      key += begin * params.k.token;
      value += begin * params.v.token;
      return;
    }
    first_page = static_cast<uint>(begin);
    const int last = clamp(kv_last_page_len[request], 0, static_cast<int>(params.page_size));
    if (length) length = (length - 1) * params.page_size + static_cast<uint>(last);
  }

  // Finds the page of key number `i`, which is less than `length`, and its slot there; returns false where it has no
  // page in the pool. Keys that are not in pages are all in page 0.
  bool find(uint i, constant AttentionDecodeParams& params, device const int* kv_indices, thread ulong& page,
            thread uint& slot) const {
    page = 0;
    slot = i;
    if (params.key_layout != KEYS_PAGED) return true;
    const uint number = mulhi(2 * i, params.page_magic) >> params.page_shift;
    const uint index = static_cast<uint>(kv_indices[first_page + number]);
    const bool exists = index < params.pages;
    page = exists ? index : 0;
    slot = i - number * params.page_size;
    return exists;
  }
};

inline void pack(thread Pack<float>& x, thread const float (&numbers)[4]) {
  x.words = as_type<uint4>(float4(numbers[0], numbers[1], numbers[2], numbers[3]));
}
template <typename T>
inline void pack(thread Pack<T>& x, thread const T (&numbers)[8]) {
  x.words = uint4(as_type<uint2>(vec<T, 4>(numbers[0], numbers[1], numbers[2], numbers[3])),
                  as_type<uint2>(vec<T, 4>(numbers[4], numbers[5], numbers[6], numbers[7])));
}

// Loads a lane's N vectors of rows of `size` numbers. A lane whose vector would lie behind the row's end gets another
// one. Rows that are not general have vectors, and are fewer than 2^32 bytes apart.
template <bool kGeneral, typename T, uint LANES, uint N>
struct RowVectors {
  static constexpr constant uint kVector = 16 / sizeof(T);

  device const T* first;  // row of the first page
  ulong page, token;      // distances in elements
  uint part, size;
  bool vectors;
  device const uchar* places[N];  // of the first row's vectors

  RowVectors(device const T* first, int64_t page, int64_t token, uint part, uint size, bool vectors)
      : first(first), page(page), token(token), part(part), size(size), vectors(vectors) {
#pragma unroll
    for (uint n = 0; n < N; ++n)
      places[n] =
          reinterpret_cast<device const uchar*>(first + min(part + n * LANES, max(size / kVector, 1u) - 1) * kVector);
  }

  void load(thread Pack<T> (&x)[N], ulong number, uint slot) const {
    if (!kGeneral) {
      const ulong from = number * page * sizeof(T);
#pragma unroll
      for (uint n = 0; n < N; ++n)
        x[n] = *reinterpret_cast<device const Pack<T>*>(
            places[n] + from + static_cast<ulong>(slot) * static_cast<uint>(token * sizeof(T)));
      return;
    }
    const ulong from = number * page + slot * token;
    if (vectors) {
#pragma unroll
      for (uint n = 0; n < N; ++n) x[n] = *reinterpret_cast<device const Pack<T>*>(places[n] + from * sizeof(T));
      return;
    }
#pragma unroll
    for (uint n = 0; n < N; ++n) {
      const uint element = (part + n * LANES) * kVector;
      T numbers[kVector];
#pragma unroll
      for (uint i = 0; i < kVector; ++i) numbers[i] = first[from + min(element + i, size - 1)];
      pack(x[n], numbers);
    }
  }
};
