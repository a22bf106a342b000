// What a threadgroup of a product in tiles works on.
#pragma once

#include <metal_stdlib>

#include "gemm/gemm.h"

// The rows, the terms and the matrices that a threadgroup works with.
struct Job {
  uint begin_row, end_row;
  uint begin_term, end_term;
  uint member;  // of the batch
  bool exists;
};

// Tiles of rows are counted group by group: none has rows of two groups. Behind the last group come the rows that no
// group has, whose results are zero. Ends that are no ends count as the nearest place that is possible.
template <uint kTile>
inline Job job_of(constant GemmParams& p, device const int* ends, uint tile) {
  Job job = {0, p.rows, 0, p.terms, tile / p.row_tiles, true};
  if (p.grouped == GEMM_GROUPED_ROWS) {
    uint begin = 0, group = 0, first = tile;
    for (; group <= p.groups; ++group) {
      const uint end = group < p.groups ? clamp(uint(max(ends[group], 0)), begin, p.rows) : p.rows;
      const uint tiles = (end - begin + kTile - 1) / kTile;
      if (first < tiles) return {begin + first * kTile, end, 0, p.terms, group, group < p.groups};
      first -= tiles;
      begin = end;
    }
    return {p.rows, p.rows, 0, 0, 0, false};
  }
  job.begin_row = tile % p.row_tiles * kTile;
  if (p.grouped == GEMM_GROUPED_TERMS) {
    uint begin = 0;
    for (uint group = 0; group < job.member; ++group) begin = clamp(uint(max(ends[group], 0)), begin, p.terms);
    job.begin_term = begin;
    job.end_term = clamp(uint(max(ends[job.member], 0)), begin, p.terms);
  }
  return job;
}
