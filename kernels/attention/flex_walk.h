// The parameters of attention with functions, where a threadgroup works, and the tiles that it visits.
#pragma once

#include "attention.h"
#include <metal_stdlib>

// Tables of blocks are dense: the one of an item and a head has `rows` counts, and `columns` numbers of blocks for
// each.
struct FlexTables {
  int64_t batches, heads;  // that have a table; others have the one of their number modulo these
  int64_t rows, partial_columns, full_columns;
  int64_t q_block, k_block;  // queries and keys of a block
};

// Every number has 64 bits; metalcore/programs/flex/kernels.py writes them in this order.
struct FlexParams {
  AttentionStrides q, k, v, out, d_out, dq, dk, dv;
  FlexTables tables;
  int64_t heads, group;  // of queries; of queries that share a head of keys and values
  int64_t q_length, k_length, head_size, value_size;
  int64_t pieces;  // threadgroups for a block
  int64_t first;   // threadgroup of the dispatch: a long dispatch is made in pieces
  int64_t splits,
      out_part;     // threadgroups that share the keys of a block of queries, and from one's results to the next
  int64_t cuts;     // parts of `k_block / cuts` keys, rounded up, that a block of keys has for them
  int64_t vectors;  // rows can be loaded 16 bytes at a time
  int64_t chunk, first_piece, parts, items;  // of a head's pieces, those of a dispatch; tables for sums by places
  int64_t sequences, in_turn;                // heads of all batch items, and how many take turns
  int64_t has_full, has_order, has_lse_gradient;
  int64_t scale;  // the bits of a float

  float scale_number() const constant { return as_type<float>(uint(scale)); }
};

// Returns the number of the table of an item and a head.
METAL_FUNC uint flex_table(constant FlexParams& p, uint batch, uint head) {
  const uint heads = uint(p.tables.heads);
  return batch % uint(p.tables.batches) * heads + head % heads;
}

// Where a threadgroup works: a part of the rows of a block.
struct FlexPlace {
  uint batch, head, block, begin, end, part;
};
// Threadgroups of long walks come first: those of the blocks that `order` names first, if there is an order, which has
// a row for each table. Otherwise these are the last queries, or the first keys, which is right for a causal mask. Some
// heads take turns, so that they come first among all of these heads, and the last threadgroups to begin are short.
METAL_FUNC FlexPlace flex_place(constant FlexParams& p, device const int* order, uint index, uint heads,
                                uint block_rows, uint length, uint rows, bool from_last) {
  const uint pieces = uint(p.pieces), blocks = uint(p.tables.rows), chunk = uint(p.chunk);
  const uint heads_in_turn = uint(p.in_turn), first = index / (heads_in_turn * chunk) * heads_in_turn;
  const uint in_turn = metal::min(heads_in_turn, uint(p.sequences) - first), rest = index - first * chunk;
  const uint part = rest / in_turn, walk = uint(p.first_piece) + part, sequence = first + rest % in_turn;
  const uint batch = sequence / heads, head = sequence % heads, number = walk / pieces, piece = walk % pieces;
  uint block = from_last ? blocks - 1 - number : number;
  if (p.has_order != 0) {
    const uint q_head = head * (uint(p.heads) / heads);  // the first that shares a head of keys
    block = uint(order[int64_t(flex_table(p, batch, q_head)) * blocks + number]);
  }
  const uint begin = block * block_rows + (from_last ? pieces - 1 - piece : piece) * rows;
  const uint end = metal::min((block + 1) * block_rows, length);
  return {batch, head, block, begin, end, part};
}

// What a walk begins with: the numbers of blocks with a mask and without one, and the first of each.
struct FlexRow {
  int64_t at;
  uint partial, full, first_partial, first_full;
};
METAL_FUNC FlexRow flex_row(constant FlexParams& p, device const int* counts, device const int* indices,
                            device const int* full_counts, device const int* full_indices, uint batch, uint head,
                            uint block) {
  const int64_t at = int64_t(flex_table(p, batch, head)) * p.tables.rows + block;
  // The first blocks come along with the counts, and not behind them.
  const uint first = p.tables.partial_columns > 0 ? uint(indices[at * p.tables.partial_columns]) : 0;
  const uint first_full =
      p.has_full != 0 && p.tables.full_columns > 0 ? uint(full_indices[at * p.tables.full_columns]) : 0;
  return {at, uint(counts[at]), p.has_full != 0 ? uint(full_counts[at]) : 0, first, first_full};
}

// A walk over the tiles of the blocks that a row of the tables names: first blocks with a mask, then those without. The
// number of a block is loaded while the one before is visited.
struct FlexWalk {
  device const int* partial;
  device const int* full;
  uint partial_count, count, blocks, block_size, length, tile;
  uint cuts, cut_size;
  uint ahead;  // the number of the next block
  uint number, at, end;

  METAL_FUNC bool more() const { return number < count; }
  METAL_FUNC bool masked() const { return number < partial_count; }
  // The place of a part of the walk in its table, and the part's place in the block.
  METAL_FUNC metal::uint2 place(uint which) const {
    which = which < partial_count ? which : which - partial_count;
    const uint index = cuts == 1 ? which : which / cuts;
    return metal::uint2(index, which - index * cuts);
  }
  METAL_FUNC uint entry(uint which) const { return uint((which < partial_count ? partial : full)[place(which).x]); }
  METAL_FUNC void seek() {
    for (; number < count; ++number) {
      const uint cut = place(number).y * cut_size, block = ahead;
      if (number + 1 < count) ahead = entry(number + 1);
      if (block >= blocks) continue;  // such a number must not lead outside of the tensors
      at = block * block_size + cut;
      end = metal::min(at + metal::min(cut_size, block_size - cut), length);
      if (at < end) return;
    }
  }
  // Leaves one of several parts of the walk.
  METAL_FUNC void take(uint part, uint parts) {
    number = count * part / parts;
    count = count * (part + 1) / parts;
    if (number < count) ahead = entry(number);
    seek();
  }
  METAL_FUNC void next() {
    at += tile;
    if (at < end) return;
    ++number;
    seek();
  }
};
METAL_FUNC FlexWalk flex_walk(constant FlexParams& p, FlexRow row, device const int* indices,
                              device const int* full_indices, uint block_size, uint length, uint tile, uint cuts) {
  const uint partial = metal::min(row.partial, uint(p.tables.partial_columns));
  const uint full = metal::min(row.full, uint(p.tables.full_columns));
  FlexWalk walk = {indices + row.at * p.tables.partial_columns,
                   p.has_full != 0 ? full_indices + row.at * p.tables.full_columns : indices,
                   partial * cuts,
                   (partial + full) * cuts,
                   (length + block_size - 1) / block_size,
                   block_size,
                   length,
                   tile,
                   cuts,
                   (metal::min(block_size, length) + cuts - 1) / cuts,
                   partial > 0 ? row.first_partial : row.first_full,
                   0,
                   0,
                   0};
  walk.seek();
  return walk;
}
