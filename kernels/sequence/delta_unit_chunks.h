// What a threadgroup that finds the gradients of one chunk's queries and keys by units has: rows of 64 positions, and a
// matrix of 128 keys by values. Each half of its threads has the products of the positions with 64 of the keys, of
// which a thread has two beside each other at chunk_row() and chunk_column(). Of products of positions, which are
// scores, a half has 32 columns.
//
// metalcore_unit_chunks() is called with a 0 as its last parameter, as metalcore_unit_state() is (delta_units.h): the
// headers for Hopper GPUs have a function whose result brings rows to threadgroup memory, and has warpgroups multiply.
#pragma once

#include <metal_stdlib>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>

#include "sequence/delta_state.h"

inline uint chunk_row(uint pair, uint thread_index) {
  return thread_index / 32 % 4 * 16 + thread_index % 32 / 4 + pair % 2 * 8;
}
inline uint chunk_column(uint pair, uint thread_index) { return pair / 2 * 8 + thread_index % 4 * 2; }

template <typename T>
struct UnitChunks {
  static constexpr constant uint kKeys = 128;

  template <typename U>
  struct Rows {
    device const U* from;
    long stride;
    uint count;

    float operator()(uint row, uint column) const {
      return row < count ? static_cast<float>(from[row * stride + column]) : 0.0f;
    }
  };

  // Of two tiles of scores: the second one, whose diagonal is zero, is the transposed upper triangle.
  threadgroup float* memory;
  threadgroup const float *by_column[2], *by_row[2];
  uint thread_index;
  Rows<T> keys, queries, result_grads;
  Rows<float> errors, value_grads, matrix;
  float products[32], scores[16];

  UnitChunks(threadgroup float* memory, uint thread_index) : memory(memory), thread_index(thread_index) {}

  // Waits for what all threads have brought and put.
  void wait() { threadgroup_barrier(mem_flags::mem_threadgroup); }

  void bring_keys(device const T* from, long stride, uint count) { keys = {from, stride, count}; }
  // Take the place of errors.
  void bring_queries(device const T* from, long stride, uint count) { queries = {from, stride, count}; }
  void hold_result_grads(device const T* from, long stride, uint count) { result_grads = {from, stride, count}; }
  void bring_value_grads(device const float* from, long stride, uint count) { value_grads = {from, stride, count}; }
  void bring_errors(device const float* from, long stride, uint count) { errors = {from, stride, count}; }
  void bring_matrix(device const float* from) { matrix = {from, kKeys, kKeys}; }
  // Brings another matrix in its place, and returns this thread's part of the sum of products of both ones' elements.
  float exchange_matrix(device const float* from) {
    float sum = 0.0f;
    for (uint i = thread_index; i < kKeys * kKeys; i += DELTA_UNIT_THREADS) sum += matrix.from[i] * from[i];
    bring_matrix(from);
    return sum;
  }

  // Products of rows and the matrix's.
  void read_by_errors() { read(errors); }
  void read_by_result_grads() { read(result_grads); }
  void read_by_value_grads() { read(value_grads); }
  // Scores are products of rows and errors, or of rows and keys.
  void score_result_grads() { score(result_grads, errors); }
  void score_value_grads() { score(value_grads, errors); }
  void score_queries() { score(queries, keys); }
  void score_keys() { score(keys, keys); }

  // Elements of brought rows, at the places of a pair of the products.
  float2 key_pair(uint pair) const { return pair_of(keys, pair); }
  float2 query_pair(uint pair) const { return pair_of(queries, pair); }

  // Gives this thread's scores to all threads, as tile 0 or 1, which takes the place of the matrix. The tile has the
  // scores times factors of their columns, and its transpose those times factors of their rows.
  void put_scores(uint index, threadgroup const float* column_factors, threadgroup const float* row_factors) {
    by_column[index] = column_factors;
    by_row[index] = row_factors;
    for (uint n = 0; n < 16; ++n) {
      const uint i = chunk_row(n / 2, thread_index);
      const uint j = thread_index / 128 * 32 + chunk_column(n / 2, thread_index) + n % 2;
      if (j + index <= i) memory[place(index, i, j)] = scores[n];
    }
  }
  // Adds products of a tile of scores and keys to the products.
  void weigh_keys(uint index) { weigh<false>(index, keys); }
  // The sum of products of the transposed tile 0 and queries, and of the transposed tile 1 and keys.
  void weigh_back() {
    for (uint n = 0; n < 32; ++n) products[n] = 0.0f;
    weigh<true>(0, queries);
    weigh<true>(1, keys);
  }

 private:
  static uint place(uint index, uint i, uint j) { return index ? j * 64 + i : i * 64 + j; }
  float2 pair_of(Rows<T> rows, uint pair) const {
    const uint row = chunk_row(pair, thread_index);
    return float2(rows(row, key(2 * pair)), rows(row, key(2 * pair + 1)));
  }
  uint key(uint i) const { return thread_index / 128 * 64 + chunk_column(i / 2, thread_index) + i % 2; }

  template <typename U>
  void read(Rows<U> rows) {
    for (uint i = 0; i < 32; ++i) {
      products[i] = 0.0f;
      for (uint n = 0; n < kKeys; ++n) products[i] += rows(chunk_row(i / 2, thread_index), n) * matrix(key(i), n);
    }
  }
  template <typename U, typename V>
  void score(Rows<U> rows, Rows<V> columns) {
    for (uint i = 0; i < 16; ++i) {
      const uint column = thread_index / 128 * 32 + chunk_column(i / 2, thread_index) + i % 2;
      scores[i] = 0.0f;
      for (uint n = 0; n < kKeys; ++n) scores[i] += rows(chunk_row(i / 2, thread_index), n) * columns(column, n);
    }
  }
  template <bool TRANSPOSED>
  void weigh(uint index, Rows<T> rows) {
    for (uint n = 0; n < 32; ++n) {
      const uint row = chunk_row(n / 2, thread_index);
      float sum = 0.0f;
      for (uint other = 0; other < 64; ++other) {
        const uint i = TRANSPOSED ? other : row, j = TRANSPOSED ? row : other;
        const float factor = TRANSPOSED ? by_row[index][i] : by_column[index][j];
        if (j + index <= i) sum += memory[place(index, i, j)] * factor * rows(other, key(n));
      }
      products[n] += sum;
    }
  }
};

template <typename T>
METAL_FUNC UnitChunks<T> metalcore_unit_chunks(threadgroup float* memory, device const T*, uint thread_index, long) {
  return UnitChunks<T>(memory, thread_index);
}
