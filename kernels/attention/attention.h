// Arguments of the attention kernels, shared with the host. Strides and sizes are in elements.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

// The head sizes that kernels have tiles for. Others take the next one.
#define ATTENTION_SIZES 64, 96, 128, 192, 256

// A threadgroup of so many simdgroups has a block of so many rows.
#define ATTENTION_SIMDS 4
#define ATTENTION_DOWN(size) ((size) <= 128 ? 2 : 1)  // fragments of 8 rows that a simdgroup holds
#define ATTENTION_ROWS(size) (8 * ATTENTION_DOWN(size) * ATTENTION_SIMDS)
// The same for the gradients of queries, and of keys and values, of which a simdgroup holds more.
#define ATTENTION_DQ_DOWN(size, bytes) ((size) * (bytes) <= 256 ? 2 : 1)
#define ATTENTION_DQ_ROWS(size, bytes) (8 * ATTENTION_DQ_DOWN(size, bytes) * ATTENTION_SIMDS)
#define ATTENTION_DKV_DOWN(size, bytes) ((size) * (bytes) <= 128 ? 2 : 1)
#define ATTENTION_DKV_ROWS(size, bytes) (8 * ATTENTION_DKV_DOWN(size, bytes) * ATTENTION_SIMDS)
// The rows that it walks over at once: as many as a tile of threadgroup memory has, for elements of `bytes` bytes.
#define ATTENTION_KEYS(size, bytes) \
  ((size) * (bytes) <= 128 ? 64 : (size) * (bytes) <= 256 ? 32 : (size) * (bytes) <= 512 ? 16 : 8)
// The queries that the gradients of keys and values walk over at once. With 16 of 192 elements of 2 bytes, NVIDIA's
// compiler leaves a thread a quarter of its registers.
#define ATTENTION_DKV_QUERIES(size, bytes) ((size) == 192 && (bytes) == 2 ? 32 : ATTENTION_KEYS(size, bytes))

// Narrow kernels are the same for threads with at most 128 registers, as Apple's GPUs have them. A simdgroup has 8
// rows, which stay in threadgroup memory, and loads nothing ahead into registers. Fewer simdgroups share long rows.
#define ATTENTION_NARROW_SIMDS(size, bytes) ((size) * (bytes) <= 512 ? 4 : 2)
#define ATTENTION_NARROW_ROWS(size, bytes) (8 * ATTENTION_NARROW_SIMDS(size, bytes))
#define ATTENTION_NARROW_KEYS(size, bytes) ((size) * (bytes) <= 192 ? 32 : (size) * (bytes) <= 256 ? 16 : 8)
// The same for gradients, whose kernels have rows of two tensors: queries and gradients of results, or keys and values.
#define ATTENTION_NARROW_BOTH_SIMDS(size, bytes) ((size) * (bytes) <= 192 ? 4 : (size) * (bytes) <= 512 ? 2 : 1)
#define ATTENTION_NARROW_BOTH_ROWS(size, bytes) (8 * ATTENTION_NARROW_BOTH_SIMDS(size, bytes))
#define ATTENTION_NARROW_DQ_KEYS(size, bytes) ((size) * (bytes) <= 256 ? 16 : 8)
#define ATTENTION_NARROW_DKV_QUERIES(size, bytes) ((size) * (bytes) <= 128 ? 16 : 8)
// From this size on the gradients of keys and values have a kernel each, with one tile instead of two.
#define ATTENTION_NARROW_SPLIT 128
#define ATTENTION_NARROW_SPLIT_QUERIES(size, bytes) ((size) * (bytes) <= 256 ? 16 : 8)

// A distance in a window that is as good as none. Sequences are shorter.
#define ATTENTION_UNLIMITED (1 << 30)

// How attn_mask is stored.
#define ATTENTION_NO_MASK 0u
#define ATTENTION_BOOL_MASK 1u
#define ATTENTION_ADDED_MASK 2u        // of the queries' dtype
#define ATTENTION_ADDED_FLOAT_MASK 3u  // float32

// Where the vectors of a tensor lie: those of one head and one batch item are `row` apart, and a vector's elements one
// apart. Where sequences have variable lengths, `batch` is 0 and rows of all sequences follow each other.
struct AttentionStrides {
  int64_t batch, head, row;
};
// `first` is the place of the first query and key. Strides may be negative: where a mask has a number for each distance
// of a key and a query, the number is that of key - query.
struct AttentionMaskStrides {
  int64_t batch, head, row, column, first;
};

// Query i sees key j where  i + shift - left <= j <= i + shift + right.  The shift is 0, or if the band is aligned to
// the lower right, the number of keys less that of queries.
struct AttentionBand {
  int32_t left, right;
  uint32_t lower_right;
};

struct AttentionParams {
  AttentionStrides q, k, v, out, rests;
  AttentionStrides d_out, dq, dk, dv;  // of the gradients
  AttentionMaskStrides mask;
  int64_t numbers;  // queries of all heads and batch items
  AttentionBand band;
  uint32_t heads, group;           // of queries; of queries that share a head of keys and values
  uint32_t q_length, k_length;     // without cu_seq_q and cu_seq_k; the length of all sequences together with them
  uint32_t head_size, value_size;  // of queries and keys; of values and results
  uint32_t blocks;                 // of rows, of the longest sequence
  uint32_t first;                  // threadgroup of the dispatch: a long dispatch is made in pieces
  uint32_t variable;               // cu_seq_q and cu_seq_k hold where sequences begin
  uint32_t mask_kind;
  uint32_t has_sinks, has_lse_gradient, has_rests;
  uint32_t vectors;  // rows can be loaded 16 bytes at a time
  float scale;
  float product_scale;  // what makes log2's scores of products, or what the soft cap's tanh takes
  float softcap;        // times log2(e), or 0 for none
  uint32_t dropped;     // of 2^32 random numbers, those that drop; 0 for no dropout
  float kept_scale;     // 1 / (1 - dropout_p)
};
