// Products of few terms of 16-bit elements on GPUs whose units multiply tensors: a threadgroup keeps a tile of one
// operand, which is the same for the whole batch, and walks along tiles of the other.
#include <metal_tensor>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>

#include "common/earlier.h"
#include "gemm/unit_results.h"
#include "gemm/unit_walk.h"

using namespace metal;
using namespace mpp::tensor_ops;

// A tile of the result.
struct WalkTile {
  uint row, column, member;
};

// kKeepsRows: whether a's tile stays, or else b's. In the first case tiles are counted member by member of a batch,
// which has one dimension; in the second there is none.
template <typename T, uint kRows, uint kColumns, uint kThreads, uint kTerms, bool kAcrossA, bool kAcrossB,
          bool kKeepsRows>
[[kernel]] [[max_total_threads_per_threadgroup(kThreads)]] void gemm_unit_walk(
    device T* a [[buffer(0)]], device T* b [[buffer(1)]], device const T* bias [[buffer(2)]],
    device const T* residual [[buffer(3)]], device T* result [[buffer(5)]], constant GemmParams& p [[buffer(6)]],
    uint3 group [[threadgroup_position_in_grid]]) {
  constexpr auto descriptor = matmul2d_descriptor(kRows, kColumns, kTerms, kAcrossA, kAcrossB);
  constexpr matmul2d<descriptor, execution_simdgroups<kThreads / 32>> multiply;
  const uint of_member = kKeepsRows ? (p.columns + kColumns - 1) / kColumns : (p.rows + kRows - 1) / kRows;
  const auto tile_at = [&](uint index) {
    const uint member = index / of_member, place = index - member * of_member;
    return kKeepsRows ? WalkTile{group.x * kRows, place * kColumns, member}
                      : WalkTile{place * kRows, group.x * kColumns, member};
  };
  const auto from_a = [&](WalkTile tile) { return a + tile.row * p.a.row; };
  const auto from_b = [&](WalkTile tile) { return b + tile.member * p.b.batch[0] + tile.column * p.b.column; };
  const auto left_of = [&](WalkTile tile) {
    return kAcrossA ? unit_part(from_a(tile), p.rows - tile.row, p.terms, p.a.column)
                    : unit_part(from_a(tile), p.terms, p.rows - tile.row, p.a.row);
  };
  const auto right_of = [&](WalkTile tile) {
    return kAcrossB ? unit_part(from_b(tile), p.terms, p.columns - tile.column, p.b.column)
                    : unit_part(from_b(tile), p.columns - tile.column, p.terms, p.b.row);
  };
  metalcore_begin_later_kernels(0);
  uint index = p.first + group.y;
  WalkTile tile = tile_at(index);
  auto left = left_of(tile);
  auto right = right_of(tile);
  device T* const operands[] = {from_a(tile), from_b(tile)};
  metalcore_await_earlier_kernels(operands, 0);
  auto walk =
      metalcore_unit_walk<kRows, kColumns, kTerms, kThreads / 32, kAcrossA, kAcrossB, kKeepsRows>(left, right, 0);
  for (; index < p.walk_tiles; index += p.walkers) {
    const bool has_next = index + p.walkers < p.walk_tiles;
    const WalkTile next = has_next ? tile_at(index + p.walkers) : tile;
    auto sums = multiply.template get_destination_cooperative_tensor<decltype(left), decltype(right), float>();
    if constexpr (kKeepsRows)
      walk.multiply(has_next, right_of(next), sums);
    else
      walk.multiply(has_next, left_of(next), sums);
    const UnitResults<T> results = {bias,   residual,   result + tile.member * p.result.batch[0], tile.row, tile.column,
                                    p.rows, tile.member};
    auto values = multiply.template get_destination_cooperative_tensor<decltype(left), decltype(right), T>();
    results.store(p, sums, values);
    tile = next;
  }
}

#define WALK(name, type, T, terms, across_a, across_b, keeps_rows)                                                   \
  template [[host_name(                                                                                              \
      "gemm_unit_" name                                                                                              \
      "_" type)]] [[kernel]] decltype(gemm_unit_walk<T, GEMM_UNIT_SMALL, GEMM_UNIT_COLUMNS, GEMM_UNIT_SHORT_THREADS, \
                                                     terms, across_a, across_b, keeps_rows>)                         \
      gemm_unit_walk<T, GEMM_UNIT_SMALL, GEMM_UNIT_COLUMNS, GEMM_UNIT_SHORT_THREADS, terms, across_a, across_b,      \
                     keeps_rows>;
#define WALKS(name, type, T, terms, keeps_rows)             \
  WALK("nn" name, type, T, terms, false, false, keeps_rows) \
  WALK("nt" name, type, T, terms, false, true, keeps_rows)  \
  WALK("tn" name, type, T, terms, true, false, keeps_rows)  \
  WALK("tt" name, type, T, terms, true, true, keeps_rows)
#define TYPE(type, T)                                             \
  WALKS("_along", type, T, GEMM_UNIT_SHORT_TERMS, true)           \
  WALKS("_along_short", type, T, GEMM_UNIT_SHORT_TERMS / 2, true) \
  WALKS("_down", type, T, GEMM_UNIT_SHORT_TERMS, false)
TYPE("half", half)
TYPE("bfloat", bfloat)
