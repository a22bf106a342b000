// Attention over pages, and what puts new tokens there, for C.
#include "call.h"

#include "../ops/paged/paged.h"

#include <cmath>
#include <optional>
#include <type_traits>

namespace metalcore::c_api {
namespace {

constexpr int64_t kFar = INT64_C(1) << 30;  // as good as no limit of a window

// The numbers that say where requests' pages are.
struct Numbers {
  Tensor indptr, indices, last_page_len;
};

void check_pages(const Call& call, const metalcore_pages* pages) {
  call.require(pages, "pages", "is NULL");
  for (const Size& size : {Size{"pages->page_size", pages->page_size}, Size{"pages->heads", pages->heads},
                           Size{"pages->head_size", pages->head_size}})
    call.require_positive(size);
  call.require(pages->requests >= 0, "pages->requests", "must not be negative");
}

template <typename T>
Tensor pool(Call& call, const char* name, T* data, const metalcore_pages& p) {
  const Size count{"pages->pages", p.pages}, size{"pages->head_size", p.head_size};
  const Size first = p.heads_first ? Size{"pages->heads", p.heads} : Size{"pages->page_size", p.page_size};
  const Size second = p.heads_first ? Size{"pages->page_size", p.page_size} : Size{"pages->heads", p.heads};
  if constexpr (std::is_const_v<T>)
    return call.input(name, data, {count, first, second, size});
  else
    return call.updated(name, data, {count, first, second, size});
}

// The CPU reads the numbers where it can. Kernels leave out what is beyond the pool, and trust the rest.
void check_within(const Call& call, const char* name, const Tensor& numbers, int64_t least, int64_t most) {
  const auto* values = static_cast<const int32_t*>(numbers.data_ptr());
  for (int64_t i = 0; i < numbers.numel(); ++i)
    call.require(values[i] >= least && values[i] <= most, name, "must be from ", least, " to ", most);
}

Numbers numbers_of(Call& call, const metalcore_pages& p, bool with_lengths) {
  const Size requests{"pages->requests", p.requests}, bounds{"pages->requests", int64_t{p.requests} + 1};
  const Tensor indptr = call.input("pages->kv_indptr", p.kv_indptr, {bounds});
  const Tensor indices = call.input("pages->kv_indices", p.kv_indices, {{"pages->indices", p.indices}});
  const Tensor lengths = with_lengths ? call.input("pages->kv_last_page_len", p.kv_last_page_len, {requests}) : indptr;
  if (call.on_host()) {
    call.require_ascending("pages->kv_indptr", indptr, p.indices);
    check_within(call, "pages->kv_indices", indices, 0, int64_t{p.pages} - 1);
    if (with_lengths) check_within(call, "pages->kv_last_page_len", lengths, 0, p.page_size);
  }
  return {indptr, indices, lengths};
}

template <typename T>
struct Attention {
  const T* q;
  const int32_t* qo_indptr;  // nullptr: one query of each request
  const T *k_pool, *v_pool;
  const metalcore_pages* pages;
  T* out;
  float* lse;
  int tokens, q_heads, causal, window;
  float scale, softcap;
};

template <typename T>
void attend(Call& call, const Attention<T>& a, bool decode) {
  check_pages(call, a.pages);
  const metalcore_pages& p = *a.pages;
  call.require(std::isfinite(a.scale), "scale", "must be finite");
  call.require(a.softcap >= 0 && std::isfinite(a.softcap), "softcap", "must be finite and not negative");
  call.require(a.q_heads >= 0 && a.q_heads % p.heads == 0, "q_heads", "must be a multiple of pages->heads");
  call.require(p.head_size <= 256, "pages->head_size", "must be at most 256");
  call.require(int64_t{p.indices} * p.page_size < INT64_C(1) << 30, "pages->indices",
               "times pages->page_size must be below 2^30");
  const Size tokens{decode ? "pages->requests" : "tokens", a.tokens}, heads{"q_heads", a.q_heads};
  const Size size{"pages->head_size", p.head_size};
  const Tensor q = call.input("q", a.q, {tokens, heads, size});
  const Tensor k = pool(call, "k_pool", a.k_pool, p), v = pool(call, "v_pool", a.v_pool, p);
  const Numbers numbers = numbers_of(call, p, true);
  MaybeTensor indptr;
  if (!decode) {
    indptr = call.input("qo_indptr", a.qo_indptr, {{"pages->requests", int64_t{p.requests} + 1}});
    if (call.on_host()) call.require_ascending("qo_indptr", *indptr, a.tokens);
  }
  const Tensor out = call.output("out", a.out, {tokens, heads, size});
  const Tensor lse = a.lse ? call.output("lse", a.lse, {tokens, heads}) : call.scratch<float>({tokens, heads});
  const int64_t left = a.window < 0 ? kFar : a.window, right = a.causal ? 0 : kFar;
  paged_attention_into(out, lse, q, indptr, k, v, numbers.indptr, numbers.indices, numbers.last_page_len,
                       p.heads_first != 0, std::nullopt, std::nullopt, std::nullopt, left, right, a.scale, a.softcap);
}

template <typename T>
void append(Call& call, const T* key, const T* value, const int32_t* batch_indices, const int32_t* positions, T* k_pool,
            T* v_pool, const metalcore_pages* pages, int tokens_) {
  check_pages(call, pages);
  const Size tokens{"tokens", tokens_}, heads{"pages->heads", pages->heads}, size{"pages->head_size", pages->head_size};
  const Tensor keys = call.input("key", key, {tokens, heads, size});
  const Tensor values = call.input("value", value, {tokens, heads, size});
  const Tensor requests = call.input("batch_indices", batch_indices, {tokens});
  const Tensor places = call.input("positions", positions, {tokens});
  const Numbers numbers = numbers_of(call, *pages, false);
  const Tensor k = pool(call, "k_pool", k_pool, *pages), v = pool(call, "v_pool", v_pool, *pages);
  paged_append(keys, values, requests, places, k, v, numbers.indptr, numbers.indices, pages->heads_first != 0);
}

int requests_of(const metalcore_pages* pages) { return pages ? pages->requests : 0; }

}  // namespace
}  // namespace metalcore::c_api

using namespace metalcore::c_api;

int metalcore_batch_prefill_float(const float* q, const int32_t* qo_indptr, const float* k_pool, const float* v_pool,
                                  const metalcore_pages* pages, float* out, float* lse, int tokens, int q_heads,
                                  int causal, int window, float scale, float softcap) {
  return call(__func__, [&](Call& call) {
    attend<float>(
        call, {q, qo_indptr, k_pool, v_pool, pages, out, lse, tokens, q_heads, causal, window, scale, softcap}, false);
  });
}

int metalcore_batch_prefill_bfloat16(const metalcore_bfloat16* q, const int32_t* qo_indptr,
                                     const metalcore_bfloat16* k_pool, const metalcore_bfloat16* v_pool,
                                     const metalcore_pages* pages, metalcore_bfloat16* out, float* lse, int tokens,
                                     int q_heads, int causal, int window, float scale, float softcap) {
  return call(__func__, [&](Call& call) {
    attend<metalcore_bfloat16>(
        call, {q, qo_indptr, k_pool, v_pool, pages, out, lse, tokens, q_heads, causal, window, scale, softcap}, false);
  });
}

int metalcore_batch_decode_float(const float* q, const float* k_pool, const float* v_pool, const metalcore_pages* pages,
                                 float* out, float* lse, int q_heads, int window, float scale, float softcap) {
  return call(__func__, [&](Call& call) {
    attend<float>(call,
                  {q, nullptr, k_pool, v_pool, pages, out, lse, requests_of(pages), q_heads, 1, window, scale, softcap},
                  true);
  });
}

int metalcore_batch_decode_bfloat16(const metalcore_bfloat16* q, const metalcore_bfloat16* k_pool,
                                    const metalcore_bfloat16* v_pool, const metalcore_pages* pages,
                                    metalcore_bfloat16* out, float* lse, int q_heads, int window, float scale,
                                    float softcap) {
  return call(__func__, [&](Call& call) {
    attend<metalcore_bfloat16>(
        call, {q, nullptr, k_pool, v_pool, pages, out, lse, requests_of(pages), q_heads, 1, window, scale, softcap},
        true);
  });
}

int metalcore_paged_append_float(const float* key, const float* value, const int32_t* batch_indices,
                                 const int32_t* positions, float* k_pool, float* v_pool, const metalcore_pages* pages,
                                 int tokens) {
  return call(__func__,
              [&](Call& call) { append(call, key, value, batch_indices, positions, k_pool, v_pool, pages, tokens); });
}

int metalcore_paged_append_bfloat16(const metalcore_bfloat16* key, const metalcore_bfloat16* value,
                                    const int32_t* batch_indices, const int32_t* positions, metalcore_bfloat16* k_pool,
                                    metalcore_bfloat16* v_pool, const metalcore_pages* pages, int tokens) {
  return call(__func__,
              [&](Call& call) { append(call, key, value, batch_indices, positions, k_pool, v_pool, pages, tokens); });
}
