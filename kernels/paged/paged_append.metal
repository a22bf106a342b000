// Writes keys and values of new tokens to their places in a pool's pages.
#include "attention/numbers.h"

// A thread has an element of a head's key, and one of its value. A token without a place in the pool (no such request,
// a position behind its last page, no such page) is left out.
[[kernel]] void paged_append(device const uchar* keys [[buffer(0)]], device const uchar* values [[buffer(1)]],
                             device const int* batch_indices [[buffer(2)]], device const int* positions [[buffer(3)]],
                             device const int* kv_indptr [[buffer(4)]], device const int* kv_indices [[buffer(5)]],
                             device uchar* key_pages [[buffer(6)]], device uchar* value_pages [[buffer(7)]],
                             constant PagedAppendParams& params [[buffer(8)]], uint3 at [[thread_position_in_grid]]) {
  const uint element = at.x;
  const uint head = at.y;
  const ulong token = at.z;
  const int request = batch_indices[token];
  const int position = positions[token];
  if (request < 0 || request >= static_cast<int>(params.batch) || position < 0) return;
  const int begin = kv_indptr[request];
  const int end = min(kv_indptr[request + 1], static_cast<int>(params.indices));
  const int number = position / static_cast<int>(params.page_size);
  if (begin < 0 || number >= end - begin) return;
  const uint page = static_cast<uint>(kv_indices[begin + number]);
  if (page >= params.pages) return;
  const uint slot = static_cast<uint>(position) % params.page_size;
  if (element < params.key_size)
    store_number(key_pages,
                 page * params.key_pages.batch + head * params.key_pages.head + slot * params.key_pages.token + element,
                 params.cache_type,
                 number_at(keys, token * params.key.token + head * params.key.head + element, params.in_type));
  if (element < params.value_size)
    store_number(
        value_pages,
        page * params.value_pages.batch + head * params.value_pages.head + slot * params.value_pages.token + element,
        params.cache_type,
        number_at(values, token * params.value.token + head * params.value.head + element, params.in_type));
}
