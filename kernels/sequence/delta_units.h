// What a threadgroup that walks along chunks by units has: kUnitColumns columns of a matrix of 128 keys by values. Each
// half of its threads has 64 of the keys' rows, and so has the products of a chunk with 64 positions. A thread has
// kUnitNumbers numbers of both, at unit_row() and unit_column().
//
// metalcore_unit_state() is called with a 0 as its last parameter: a compiler's headers may have a function that is the
// same except for an `int`, whose result has the same members (see common/matrices.h). That for Hopper GPUs has the
// operands of the next chunk brought to threadgroup memory while warpgroups multiply. This one says what they find.
#pragma once

#include <metal_stdlib>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>

#include "sequence/delta_state.h"

constexpr constant uint kUnitKeys = 128, kUnitColumns = DELTA_UNIT_COLUMNS, kUnitNumbers = kUnitColumns / 2;

// The places of a pair of neighbouring numbers, of a thread of a half.
inline uint unit_row(uint pair, uint thread_index) {
  return thread_index / 32 % 4 * 16 + thread_index % 32 / 4 + pair % 2 * 8;
}
inline uint unit_column(uint pair, uint thread_index) { return pair / 2 * 8 + thread_index % 4 * 2; }

// What a chunk's products need in device memory. Triangular matrices are sums of three bfloats an element, and `rows`
// are those of v's gradients.
struct UnitChunk {
  device const bfloat* keys;
  device const bfloat* queries;
  device const bfloat* rows;
  device const bfloat* inverse;
  device const bfloat* scores;
  long key_stride, query_stride, row_stride;
  uint count;
};

// Tiles of 64 positions by columns.
constexpr constant uint kUnitErrors = 0, kUnitResults = 1;

struct UnitState {
  static constexpr constant uint kTile = 64 * kUnitColumns;

  threadgroup float* memory;  // of the matrix, and of two tiles
  uint thread_index, stage;
  UnitChunk chunks[2];
  float state[kUnitNumbers], products[kUnitNumbers];

  UnitState(threadgroup float* memory, uint thread_index) : memory(memory), thread_index(thread_index), stage(1) {}

  // Asks for the operands of the next chunk but its scores, and for these.
  void ask(UnitChunk chunk) {
    chunk.scores = chunks[1 - stage].scores;
    chunks[1 - stage] = chunk;
  }
  void ask_scores(UnitChunk chunk) { chunks[1 - stage].scores = chunk.scores; }
  // Makes the chunk that was asked for last the current one, when all threads have given their part of the matrix. Its
  // scores are there for weigh() of the next chunk, or if WITH_SCORES, at once.
  template <bool WITH_SCORES>
  void begin_chunk() {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    stage = 1 - stage;
  }
  // Waits for the errors that solve() read, which only the first half does. All threads come here.
  void wait_for_solutions() { threadgroup_barrier(mem_flags::mem_threadgroup); }
  void wait() { threadgroup_barrier(mem_flags::mem_threadgroup); }

  // Gives this thread's numbers of the matrix, and of a tile, to all threads. The latter are multiplied by factors of
  // the thread's two rows.
  void put_state() { put(memory + thread_index / 128 * kTile, state, 1.0f, 1.0f); }
  void put(uint of, float first_factor = 1.0f, float second_factor = 1.0f) {
    put(memory + (2 + of) * kTile, products, first_factor, second_factor);
  }

  // The products of all positions' keys or queries with the matrix. Meanwhile something else may be done.
  template <typename Meanwhile>
  void read(bool of_queries, Meanwhile meanwhile) {
    meanwhile();
    const UnitChunk chunk = chunks[stage];
    for (uint i = 0; i < kUnitNumbers; ++i) {
      const uint row = unit_row(i / 2, thread_index), column = unit_column(i / 2, thread_index) + i % 2;
      float sum = 0.0f;
      for (uint key = 0; key < kUnitKeys; ++key)
        sum += element(chunk, of_queries, row, key) * memory[key * kUnitColumns + column];
      products[i] = sum;
    }
  }
  // The products of the inverse or its transpose with a tile.
  template <bool TRANSPOSED>
  void solve(uint tile) {
    multiply<TRANSPOSED>(chunks[stage].inverse, memory + (2 + tile) * kTile);
  }
  // The products of the scores of the chunk before, or of this one, with a tile.
  void weigh(uint tile, bool before) {
    multiply<false>(chunks[before ? 1 - stage : stage].scores, memory + (2 + tile) * kTile);
  }
  // Those of the scores' transpose with the chunk's rows, added to the products.
  void spread() {
    const UnitChunk chunk = chunks[stage];
    for (uint i = 0; i < kUnitNumbers; ++i) {
      const uint row = unit_row(i / 2, thread_index), column = unit_column(i / 2, thread_index) + i % 2;
      for (uint j = 0; j < chunk.count; ++j)
        products[i] += whole(chunk.scores, j, row) * static_cast<float>(chunk.rows[j * chunk.row_stride + column]);
    }
  }
  // Multiplies the matrix by a factor, and adds the products of keys and a tile, and of queries and another one.
  template <bool BOTH, typename Meanwhile>
  void learn(float factor, Meanwhile meanwhile) {
    meanwhile();
    const UnitChunk chunk = chunks[stage];
    for (uint i = 0; i < kUnitNumbers; ++i) {
      const uint row = unit_row(i / 2, thread_index), column = unit_column(i / 2, thread_index) + i % 2;
      const uint key = thread_index / 128 * 64 + row;
      float sum = 0.0f;
      for (uint j = 0; j < 64; ++j) {
        sum += element(chunk, false, j, key) * memory[(2 + kUnitErrors) * kTile + j * kUnitColumns + column];
        if (BOTH) sum += element(chunk, true, j, key) * memory[(2 + kUnitResults) * kTile + j * kUnitColumns + column];
      }
      state[i] = state[i] * factor + sum;
    }
  }

 private:
  static float element(UnitChunk chunk, bool of_queries, uint row, uint key) {
    if (row >= chunk.count) return 0.0f;
    return static_cast<float>(of_queries ? chunk.queries[row * chunk.query_stride + key]
                                         : chunk.keys[row * chunk.key_stride + key]);
  }
  static float whole(device const bfloat* parts, uint row, uint column) {
    parts += row * 64 + column;
    return static_cast<float>(parts[0]) + (static_cast<float>(parts[4096]) + static_cast<float>(parts[2 * 4096]));
  }
  void put(threadgroup float* to, thread const float* numbers, float first_factor, float second_factor) {
    for (uint i = 0; i < kUnitNumbers; ++i)
      to[unit_row(i / 2, thread_index) * kUnitColumns + unit_column(i / 2, thread_index) + i % 2] =
          numbers[i] * (i / 2 % 2 ? second_factor : first_factor);
  }
  template <bool TRANSPOSED>
  void multiply(device const bfloat* parts, threadgroup const float* tile) {
    for (uint i = 0; i < kUnitNumbers; ++i) {
      const uint row = unit_row(i / 2, thread_index), column = unit_column(i / 2, thread_index) + i % 2;
      float sum = 0.0f;
      for (uint j = 0; j < 64; ++j)
        sum += whole(parts, TRANSPOSED ? j : row, TRANSPOSED ? row : j) * tile[j * kUnitColumns + column];
      products[i] = sum;
    }
  }
};

template <typename Memory>
METAL_FUNC UnitState metalcore_unit_state(Memory memory, uint thread_index, long) {
  return UnitState(memory, thread_index);
}
