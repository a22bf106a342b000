/* metalcore for C: the ops of language-model inference, without Python and without PyTorch.
 *
 * A function returns METALCORE_OK, which is 0, or another metalcore_status; metalcore_last_error() then says what was
 * wrong. No C++ exception leaves a function. A failed call may have written part of its results if its code is
 * METALCORE_KERNEL_FAULT or METALCORE_FAILED, and has written nothing otherwise.
 *
 * Arrays are contiguous, in row-major order, and aligned to their elements. Sizes may be 0: there is nothing to do
 * then. Results overlap nothing else, except where the function says so.
 *
 * A call works in the thread's context: the one that metalcore_context_use() chose, or the thread's own, which is for
 * host memory: METALCORE_CPU on Linux, METALCORE_METAL on macOS. With a CUDA context all pointers are those of device
 * memory, which no call reads on the host, and a call returns when its kernels are in the stream. (A struct such as
 * metalcore_pages lies on the host.)
 *
 * docs/c.md has a table of each function's arguments. */
#ifndef METALCORE_H
#define METALCORE_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define METALCORE_API __attribute__((visibility("default")))
#else
#define METALCORE_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* The bits of a bfloat16: the upper half of a float's. */
typedef uint16_t metalcore_bfloat16;

enum metalcore_status {
  METALCORE_OK = 0,
  METALCORE_INVALID_ARGUMENT = 1, /* a size, a pointer, or arguments that do not go together */
  METALCORE_OUT_OF_MEMORY = 2,
  METALCORE_BUSY = 3,         /* another thread has a call in this context */
  METALCORE_NO_DEVICE = 4,    /* this library or this machine has no such device */
  METALCORE_NO_KERNELS = 5,   /* the files of kernels are missing: see METALCORE_LIBRARY_DIR in docs/c.md */
  METALCORE_KERNEL_FAULT = 6, /* checking mode found an error in a kernel, or the CPU stopped one */
  METALCORE_FAILED = 7,       /* anything else; metalcore_last_error() says what */
  METALCORE_INVALID_FILE = 8  /* a program's file is damaged, of another version, or has what no such file may have */
};

/* The text of this thread's last error, or "". It serves until the thread's next failed call. */
METALCORE_API const char* metalcore_last_error(void);
/* The name of a status: "METALCORE_BUSY". */
METALCORE_API const char* metalcore_status_name(int status);
/* "0.1.0" */
METALCORE_API const char* metalcore_version(void);

/* Contexts. A context has the memory that calls need for themselves, and reuses it: after a few calls of the same sizes
 * a call allocates nothing. It serves one call at a time. */

typedef struct metalcore_context metalcore_context;

enum metalcore_device {
  METALCORE_CPU = 0,  /* host memory; kernels run on the CPU */
  METALCORE_CUDA = 1, /* memory of an NVIDIA GPU */
  METALCORE_METAL = 2 /* host memory; kernels run on an Apple GPU */
};

/* `index` is the number of a GPU, `stream` a CUstream of its primary context, or NULL for the default stream. Both are
 * 0 for METALCORE_CPU and METALCORE_METAL. All calls in a context use its stream, which must outlive it.
 * METALCORE_NO_DEVICE where there is no such GPU, no driver, or no NVRTC, which compiles each kernel on first use. */
METALCORE_API int metalcore_context_create(metalcore_context** context, int device, int index, void* stream);
/* Waits for the context's stream. No other thread may have chosen the context any longer. NULL is allowed. */
METALCORE_API int metalcore_context_destroy(metalcore_context* context);
/* Chooses the context for the calling thread's further calls. NULL chooses the thread's own again. */
METALCORE_API int metalcore_context_use(metalcore_context* context);

/* Memory of the device of the thread's context. Its begin is a multiple of 256, and it is NULL for 0 bytes. All
 * contexts of the device take it. With METALCORE_METAL kernels reach it as it is. An array elsewhere is copied for each
 * call that uses it, and so is a whole pool of pages. The memory is freed in a context of the same device, when no call
 * uses it. */
METALCORE_API int metalcore_memory_allocate(size_t bytes, void** memory);
METALCORE_API int metalcore_memory_free(void* memory);

/* out (m, n) = a b + bias. a is (m, k), or where transpose_a is not 0 (k, m); b is (k, n) or (n, k). Their rows lie
 * lda and ldb numbers apart. bias (n) may be NULL. */
METALCORE_API int metalcore_gemm_float(const float* a, const float* b, const float* bias, float* out, int m, int n,
                                       int k, int transpose_a, int transpose_b, int lda, int ldb);
METALCORE_API int metalcore_gemm_bfloat16(const metalcore_bfloat16* a, const metalcore_bfloat16* b,
                                          const metalcore_bfloat16* bias, metalcore_bfloat16* out, int m, int n, int k,
                                          int transpose_a, int transpose_b, int lda, int ldb);

/* Rows ends[g - 1] to ends[g] - 1 of out (rows, n) are those of a (rows, k) times matrix g of b (groups, k, n), or
 * where transpose_b is not 0 (groups, n, k). Rows behind the last end are 0. */
METALCORE_API int metalcore_grouped_gemm_float(const float* a, const float* b, const int32_t* ends, float* out,
                                               int rows, int n, int k, int groups, int transpose_b);
METALCORE_API int metalcore_grouped_gemm_bfloat16(const metalcore_bfloat16* a, const metalcore_bfloat16* b,
                                                  const int32_t* ends, metalcore_bfloat16* out, int rows, int n, int k,
                                                  int groups, int transpose_b);

/* out[b] = softmax(in[b] / temperature), for `batch` rows of `vocab` numbers. */
METALCORE_API int metalcore_softmax_float(const float* in, float* out, int batch, int vocab, float temperature);
METALCORE_API int metalcore_softmax_bfloat16(const metalcore_bfloat16* in, metalcore_bfloat16* out, int batch,
                                             int vocab, float temperature);

/* out = silu(gate) * up; a row of `in` has `width` numbers of gate, and `width` of up behind them. */
METALCORE_API int metalcore_silu_and_mul_float(const float* in, float* out, int rows, int width);
METALCORE_API int metalcore_silu_and_mul_bfloat16(const metalcore_bfloat16* in, metalcore_bfloat16* out, int rows,
                                                  int width);

/* out = in / sqrt(mean(in^2) + eps) * weight, by row; weight may be NULL. */
METALCORE_API int metalcore_rms_norm_float(const float* in, const float* weight, float* out, int rows, int width,
                                           float eps);
METALCORE_API int metalcore_rms_norm_bfloat16(const metalcore_bfloat16* in, const metalcore_bfloat16* weight,
                                              metalcore_bfloat16* out, int rows, int width, float eps);

/* sum = in + residual; out = rms_norm(sum). */
METALCORE_API int metalcore_add_rms_norm_float(const float* in, const float* residual, const float* weight, float* out,
                                               float* sum, int rows, int width, float eps);
METALCORE_API int metalcore_add_rms_norm_bfloat16(const metalcore_bfloat16* in, const metalcore_bfloat16* residual,
                                                  const metalcore_bfloat16* weight, metalcore_bfloat16* out,
                                                  metalcore_bfloat16* sum, int rows, int width, float eps);

/* out = in + residual; out may be in or residual. */
METALCORE_API int metalcore_add_float(const float* in, const float* residual, float* out, int count);
METALCORE_API int metalcore_add_bfloat16(const metalcore_bfloat16* in, const metalcore_bfloat16* residual,
                                         metalcore_bfloat16* out, int count);

/* Conversions; to bfloat16 to the nearest number, and to the even one of two. */
METALCORE_API int metalcore_cast_float_to_bfloat16(const float* in, metalcore_bfloat16* out, int count);
METALCORE_API int metalcore_cast_bfloat16_to_float(const metalcore_bfloat16* in, float* out, int count);

/* Rotates the first 2 * pairs numbers of each head of q and k (tokens, heads, head_size). Token t takes row
 * positions[t] of the tables cosine and sine (table_rows, pairs), which are float32 for both types. Pairs are
 * neighbours where `interleaved` is not 0, or else `pairs` apart. q_out may be q, and k_out then must be k; k and k_out
 * may be NULL where k_heads is 0. A token whose position the tables do not have gets NaN. */
METALCORE_API int metalcore_rope_float(const float* q, const float* k, const float* cosine, const float* sine,
                                       const int64_t* positions, float* q_out, float* k_out, int tokens, int q_heads,
                                       int k_heads, int head_size, int pairs, int table_rows, int interleaved);
METALCORE_API int metalcore_rope_bfloat16(const metalcore_bfloat16* q, const metalcore_bfloat16* k, const float* cosine,
                                          const float* sine, const int64_t* positions, metalcore_bfloat16* q_out,
                                          metalcore_bfloat16* k_out, int tokens, int q_heads, int k_heads,
                                          int head_size, int pairs, int table_rows, int interleaved);

/* out[i] = table[indices[i]], rows of `width` numbers. A row that the table does not have is NaN. */
METALCORE_API int metalcore_embedding_float(const float* table, const int32_t* indices, float* out, int table_rows,
                                            int width, int count);
METALCORE_API int metalcore_embedding_bfloat16(const metalcore_bfloat16* table, const int32_t* indices,
                                               metalcore_bfloat16* out, int table_rows, int width, int count);

/* The k largest numbers of each row, in descending order, and where they stand. k is at most 65536. */
METALCORE_API int metalcore_topk_float(const float* in, float* values, int64_t* indices, int batch, int vocab, int k);
METALCORE_API int metalcore_topk_bfloat16(const metalcore_bfloat16* in, metalcore_bfloat16* values, int64_t* indices,
                                          int batch, int vocab, int k);

/* out = in where it is among the k largest of its row, or equals the smallest of them, and -infinity elsewhere. */
METALCORE_API int metalcore_top_k_mask_logits_float(const float* in, float* out, int batch, int vocab, int k);
METALCORE_API int metalcore_top_k_mask_logits_bfloat16(const metalcore_bfloat16* in, metalcore_bfloat16* out, int batch,
                                                       int vocab, int k);

/* Draws a number from each row of logits: of the top_k largest (0: of all), of the fewest whose probabilities reach
 * top_p (1: all), by uniform[b] in [0, 1). With the temperature 0 it is the first of the largest logits. */
METALCORE_API int metalcore_sample_float(const float* logits, const float* uniform, int64_t* out, int batch, int vocab,
                                         float temperature, int top_k, float top_p);
METALCORE_API int metalcore_sample_bfloat16(const metalcore_bfloat16* logits, const float* uniform, int64_t* out,
                                            int batch, int vocab, float temperature, int top_k, float top_p);

/* The keys and values of requests in pages of a pool. Request r has the pages kv_indices[kv_indptr[r]] to
 * kv_indices[kv_indptr[r + 1] - 1], the last of which has kv_last_page_len[r] tokens. */
typedef struct metalcore_pages {
  int pages;                 /* of the pool */
  int page_size;             /* tokens of a page, 1 and more */
  int heads;                 /* of keys and values */
  int head_size;             /* of keys and values */
  int heads_first;           /* 0: (pages, page_size, heads, head_size); 1: (pages, heads, page_size, head_size) */
  int requests;              /* r above is below this */
  int indices;               /* numbers in kv_indices */
  const int32_t* kv_indptr;  /* requests + 1 numbers */
  const int32_t* kv_indices; /* numbers of pages */
  const int32_t* kv_last_page_len; /* requests numbers; metalcore_paged_append does not read them */
} metalcore_pages;

/* Attention of each request's queries to its keys. Request r has the queries qo_indptr[r] to qo_indptr[r + 1] - 1 of q
 * (tokens, q_heads, head_size), which are its last tokens. A query sees `window` tokens before its own (all where it is
 * negative), and none behind it where `causal` is not 0. Scores are softcap * tanh(scale * q.k / softcap), or
 * scale * q.k where softcap is 0. lse (tokens, q_heads) gets the logarithms of the sums, and may be NULL. */
METALCORE_API int metalcore_batch_prefill_float(const float* q, const int32_t* qo_indptr, const float* k_pool,
                                                const float* v_pool, const metalcore_pages* pages, float* out,
                                                float* lse, int tokens, int q_heads, int causal, int window,
                                                float scale, float softcap);
METALCORE_API int metalcore_batch_prefill_bfloat16(const metalcore_bfloat16* q, const int32_t* qo_indptr,
                                                   const metalcore_bfloat16* k_pool, const metalcore_bfloat16* v_pool,
                                                   const metalcore_pages* pages, metalcore_bfloat16* out, float* lse,
                                                   int tokens, int q_heads, int causal, int window, float scale,
                                                   float softcap);

/* The same for one query of each request: q and out are (requests, q_heads, head_size). */
METALCORE_API int metalcore_batch_decode_float(const float* q, const float* k_pool, const float* v_pool,
                                               const metalcore_pages* pages, float* out, float* lse, int q_heads,
                                               int window, float scale, float softcap);
METALCORE_API int metalcore_batch_decode_bfloat16(const metalcore_bfloat16* q, const metalcore_bfloat16* k_pool,
                                                  const metalcore_bfloat16* v_pool, const metalcore_pages* pages,
                                                  metalcore_bfloat16* out, float* lse, int q_heads, int window,
                                                  float scale, float softcap);

/* Puts the keys and values of new tokens (tokens, heads, head_size) into the pool: token t becomes number positions[t]
 * of request batch_indices[t]. A token whose place the pages do not have is left out. */
METALCORE_API int metalcore_paged_append_float(const float* key, const float* value, const int32_t* batch_indices,
                                               const int32_t* positions, float* k_pool, float* v_pool,
                                               const metalcore_pages* pages, int tokens);
METALCORE_API int metalcore_paged_append_bfloat16(const metalcore_bfloat16* key, const metalcore_bfloat16* value,
                                                  const int32_t* batch_indices, const int32_t* positions,
                                                  metalcore_bfloat16* k_pool, metalcore_bfloat16* v_pool,
                                                  const metalcore_pages* pages, int tokens);

/* Programs: models that `program.save(path, recordings=True)` of the Python package wrote to files. A file has a
 * recording of a program's run, kernel by kernel, for a kind of device: "mps" for METALCORE_CPU and METALCORE_METAL,
 * "cuda" for METALCORE_CUDA.
 *
 * A program belongs to the device of the context in which it was loaded. It runs in the thread's context, which must
 * be of that device, with the context's stream and scratch memory. It keeps what it writes for itself, such as caches,
 * from run to run. It runs once at a time: METALCORE_BUSY, where another thread runs it. In several streams, runs of
 * one program that keeps something must wait for each other. */

typedef struct metalcore_program metalcore_program;

enum metalcore_dtype {
  METALCORE_FLOAT32 = 0,
  METALCORE_FLOAT16 = 1,
  METALCORE_BFLOAT16 = 2,
  METALCORE_INT64 = 3,
  METALCORE_INT32 = 4,
  METALCORE_INT16 = 5,
  METALCORE_INT8 = 6,
  METALCORE_UINT8 = 7,
  METALCORE_BOOL = 8 /* a byte, 0 or 1 */
};

/* An input or an output of a program. What it points to lives as long as the program. */
typedef struct metalcore_array {
  const char* name;
  int dtype; /* a metalcore_dtype */
  int dims;
  const int64_t* sizes;
  const int64_t* strides; /* in elements: those of row-major order, except where the program has another one */
  size_t bytes;           /* of the whole array, in which no place is empty */
} metalcore_array;

enum metalcore_program_flags {
  /* The file's author is trusted. Otherwise METALCORE_CPU runs programs in checking mode, in which no kernel can leave
   * its arrays, whatever the file says, and which is much slower; and inputs on the host are copied. */
  METALCORE_TRUSTED = 1
};

/* Loads a program for the device of the thread's context. `weights` is the path of a file of safetensors, for a program
 * that was saved with its weights apart; NULL means the file that was saved with it, beside it. `flags` are
 * metalcore_program_flags. METALCORE_INVALID_FILE where a file is damaged, of another version, or has what no such file
 * may have, or where its kernels are not this library's: nothing of it has run then. */
METALCORE_API int metalcore_program_load(const char* path, const char* weights, int flags, metalcore_program** program);
/* Waits for the context's stream; the thread's context must be of the program's device. NULL is allowed. */
METALCORE_API int metalcore_program_free(metalcore_program* program);

METALCORE_API int metalcore_program_counts(const metalcore_program* program, int* inputs, int* outputs);
METALCORE_API int metalcore_program_input(const metalcore_program* program, int number, metalcore_array* array);
METALCORE_API int metalcore_program_output(const metalcore_program* program, int number, metalcore_array* array);

/* Runs a program: `inputs` and `outputs` have the addresses of its arrays, each of which begins at a multiple of 16.
 * Outputs overlap nothing. With METALCORE_CUDA it returns when the kernels are in the stream. After the first two runs
 * a run allocates nothing, except in checking mode. */
METALCORE_API int metalcore_program_run(metalcore_program* program, const void* const* inputs, void* const* outputs);

#ifdef __cplusplus
}
#endif

#endif
