// One-sided Jacobi (Hestenes 1958; Demmel and Veselić 1992). Plane rotations act on pairs of columns of X until all
// columns are orthogonal. They act on V's columns too, which makes V the product of the rotations.
//
// Each of LANES lanes holds COLUMNS columns, and SPLITS lanes of a simdgroup and SIMDGROUPS simdgroups share the rows.
// A thread has part `simdgroup SPLITS + split` of them: the rows 4 (X4 part + i) + {0, 1, 2, 3} of X for i < X4, and
// rows of V likewise with V4. Shuffles within a simdgroup move columns between lanes, and add parts of sums over rows.
// Those of several simdgroups go through threadgroup memory. The sums are the same in all parts, which therefore decide
// alike.
//
// The columns of one register in all lanes are a set. A sweep pairs every two columns once, and always in one lane:
// first columns of different sets, while one of the sets moves on from lane to lane. Then the two sets of a half of the
// lanes become the lower halves of the sets, and those of the other half the upper ones, and the same begins again with
// half of the lanes, down to one. The larger column of a pair becomes the first (de Rijk 1989), which saves sweeps.
#pragma once

#include <metal_stdlib>

#include "column_tile.h"

// Squares of norms below this count as zero: such columns are not rotated, and have no direction. Matrices are scaled
// to entries of 2^52, so this is 2^-100 of the largest entry. A square that a GPU may take for zero, below 2^-126, is
// less than 2^-30 of this. The squares of a 128 x 128 matrix add up to less than 2^120.
constant constexpr float kJacobiFloor = 0x1p-96f;
constant constexpr float kJacobiScale = 0x1p52f;
constant constexpr uint kJacobiSweeps = 60;  // 6 to 10 are usual; more if rows differ by dozens of magnitudes

// Sums and maxima over the threads that have the same columns. Those over simdgroups take one barrier, because two
// halves of `memory` take turns.
template <uint SIMDGROUPS, uint LANES, uint SPLITS, uint COLUMNS>
struct OverParts {
  static constexpr constant uint kFloats = SIMDGROUPS == 1 ? 1 : 2 * SIMDGROUPS * COLUMNS * 32;

  threadgroup float* memory;
  uint simdgroup, lane;
  uint turn;

  uint part() const thread { return simdgroup * SPLITS + lane / LANES % SPLITS; }

  threadgroup const float* publish(thread const float* values, uint count) thread {
    threadgroup float* const half_of_memory = memory + turn * SIMDGROUPS * COLUMNS * 32;
    turn ^= 1;
#pragma unroll
    for (uint c = 0; c < count; ++c) half_of_memory[(simdgroup * COLUMNS + c) * 32 + lane] = values[c];
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    return half_of_memory + lane;
  }

  template <uint COUNT>
  void sum(thread float* values) thread {
#pragma unroll
    for (ushort distance = LANES; distance < LANES * SPLITS; distance *= 2)
#pragma unroll
      for (uint c = 0; c < COUNT; ++c) values[c] += metal::simd_shuffle_xor(values[c], distance);
    if (SIMDGROUPS == 1) return;
    threadgroup const float* const published = publish(values, COUNT);
#pragma unroll
    for (uint c = 0; c < COUNT; ++c) {
      float total = published[c * 32];
#pragma unroll(4)
      for (uint s = 1; s < SIMDGROUPS; ++s) total += published[(s * COLUMNS + c) * 32];
      values[c] = total;
    }
  }
  template <uint COUNT>
  void sum(thread float2* values) thread {
    if (SIMDGROUPS * SPLITS == 1) return;
    float parts[2 * COUNT];
#pragma unroll
    for (uint c = 0; c < COUNT; ++c) {
      parts[2 * c] = values[c].x;
      parts[2 * c + 1] = values[c].y;
    }
    sum<2 * COUNT>(parts);
#pragma unroll
    for (uint c = 0; c < COUNT; ++c) values[c] = float2(parts[2 * c], parts[2 * c + 1]);
  }

  // The values must not be NaN.
  float max(float value) thread {
#pragma unroll
    for (ushort distance = LANES; distance < LANES * SPLITS; distance *= 2)
      value = metal::max(value, metal::simd_shuffle_xor(value, distance));
    if (SIMDGROUPS == 1) return value;
    threadgroup const float* const published = publish(&value, 1);
#pragma unroll
    for (uint s = 0; s < SIMDGROUPS; ++s) value = metal::max(value, published[s * COLUMNS * 32]);
    return value;
  }
};

// A thread's columns: ROWS rows of X in all parts, and V's where HAS_V.
template <uint COLUMNS_, uint LANES_, uint SPLITS_, uint SIMDGROUPS_, uint ROWS, bool HAS_V, typename T>
struct JacobiTile {
  typedef T Number;  // float or float2
  typedef typename FourOf<T>::Type Four;
  static constexpr constant uint COLUMNS = COLUMNS_, LANES = LANES_, SIMDGROUPS = SIMDGROUPS_;
  static constexpr constant uint SLOTS = COLUMNS_ * LANES_;
  static constexpr constant uint X4 = ROWS / (4 * SPLITS_ * SIMDGROUPS_);
  static constexpr constant uint V4 = HAS_V ? SLOTS / (4 * SPLITS_ * SIMDGROUPS_) : 0;
  typedef OverParts<SIMDGROUPS_, LANES_, SPLITS_, COLUMNS_ * FourOf<T>::kParts> Shared;

  Four y[COLUMNS_][X4 + V4];  // X above V
  float square[COLUMNS_];     // squares of the norms of X's columns; -1 for padding, which sorts last

  static uint row_of(uint part, uint i) { return 4 * (X4 * part + i); }
  static uint v_row_of(uint part, uint i) { return 4 * (V4 * part + i); }
};

// aᴴ b
template <uint COUNT, typename Four>
inline auto jacobi_dot(thread const Four* a, thread const Four* b) {
  auto sum = products_of(a[0], b[0]);
#pragma unroll
  for (uint i = 1; i < COUNT; ++i) add_products(sum, a[i], b[i]);
  return sum_of(sum);
}

template <uint COUNT, typename Four>
inline float jacobi_square(thread const Four* a) {
  float4 sum = squares_of(a[0]);
#pragma unroll
  for (uint i = 1; i < COUNT; ++i) sum = add_squares(sum, a[i]);
  return sum_of(sum);
}

template <typename Tile>
inline void jacobi_squares(thread Tile& tile, thread typename Tile::Shared& shared) {
  float squares[Tile::COLUMNS];
#pragma unroll
  for (uint c = 0; c < Tile::COLUMNS; ++c) squares[c] = jacobi_square<Tile::X4>(tile.y[c]);
  shared.template sum<Tile::COLUMNS>(squares);
#pragma unroll
  for (uint c = 0; c < Tile::COLUMNS; ++c) tile.square[c] = tile.square[c] < 0.0f ? -1.0f : squares[c];
}

// Makes columns p and q, |p| >= |q|, orthogonal: p' = p - s (q + tau p), q' = q + s (p - tau q). This form (Rutishauser
// 1966), which has tau = s / (1 + c) instead of c, keeps V orthogonal over thousands of rotations.
struct JacobiRotation {
  float s, tau;
  float p_square, q_square;
  bool rotates;
};

// What a rotation needs of two norms, before the product of the columns is known. A step of a sweep takes as long as
// its operations in a row, and roots and divisions are the slowest ones. A rotation's angle need not be exact to the
// last bit. Its sine and cosine must agree, and they do whatever the angle.
struct JacobiNorms {
  float p_square, q_square;
  float product, inverse;  // of the norms
  float difference;        // half of p's square less q's, over the product
  bool present;
};

inline JacobiNorms jacobi_norms(float p_square, float q_square) {
  const float p_inverse = metal::rsqrt(p_square), q_inverse = metal::rsqrt(q_square), inverse = p_inverse * q_inverse;
  return {p_square,
          q_square,
          (p_square * p_inverse) * (q_square * q_inverse),
          inverse,
          0.5f * (p_square - q_square) * inverse,
          q_square > kJacobiFloor};
}

// The rotation of columns with a cosine of this magnitude, whose square the caller has. s is not positive.
inline JacobiRotation jacobi_rotation(JacobiNorms norms, float size, float square, bool rotates) {
  JacobiRotation r;
  r.rotates = rotates;
  const float sum = metal::fma(norms.difference, norms.difference, square);
  const float root = norms.difference < 0x1p60f ? sum * metal::rsqrt(sum) : norms.difference;  // no overflow
  const float t = rotates ? metal::fast::divide(size, norms.difference + root) : 0.0f;
  const float c = metal::rsqrt(metal::fma(t, t, 1.0f));
  r.s = -c * t;
  r.tau = metal::fast::divide(r.s, 1.0f + c);
  const float change = rotates ? t * size * norms.product : 0.0f;
  r.p_square = norms.p_square + change;
  r.q_square = rotates ? metal::max(norms.q_square - change, 0.0f) : norms.q_square;
  return r;
}

inline JacobiRotation jacobi_rotation(float p_square, float q_square, float product, float tolerance) {
  const JacobiNorms norms = jacobi_norms(p_square, q_square);
  const float cosine = product * norms.inverse, size = metal::abs(cosine);
  JacobiRotation r = jacobi_rotation(norms, size, cosine * cosine, norms.present && size > tolerance);
  r.s = product < 0.0f ? -r.s : r.s;
  r.tau = product < 0.0f ? -r.tau : r.tau;
  return r;
}

// Complex columns: p' = p - (σ q + s tau p), q' = q + (σ* p - s tau q), in which σ is s times the phase that makes pᴴ q
// real.
struct ComplexJacobiRotation {
  float2 sigma;
  float s_tau;
  float p_square, q_square;
  bool rotates;
};

inline ComplexJacobiRotation jacobi_rotation(float p_square, float q_square, float2 product, float tolerance) {
  const JacobiNorms norms = jacobi_norms(p_square, q_square);
  const float2 cosine = product * norms.inverse;
  const float square = metal::fma(cosine.x, cosine.x, cosine.y * cosine.y), inverse = metal::rsqrt(square);
  const bool rotates = norms.present && square > tolerance * tolerance;
  const JacobiRotation r = jacobi_rotation(norms, square * inverse, square, rotates);
  const float2 sigma = rotates ? conjugate(cosine) * (inverse * r.s) : float2(0.0f);
  return {sigma, r.s * r.tau, r.p_square, r.q_square, r.rotates};
}

// The column after the rotation, the first of its pair or the second.
inline float4 jacobi_turned(float4 own, float4 other, bool first, JacobiRotation r) {
  const float4 s = first ? -r.s : r.s, tau = first ? r.tau : -r.tau;
  return metal::fma(s, metal::fma(tau, own, other), own);
}
inline Complex4 jacobi_turned(Complex4 own, Complex4 other, bool first, ComplexJacobiRotation r) {
  const float2 sigma = first ? -r.sigma : conjugate(r.sigma);
  const Complex4 change = minus_product(scaled_by(own, -r.s_tau), -sigma, other);
  return {own.re + change.re, own.im + change.im};
}

template <uint P, uint Q, typename Tile>
inline void jacobi_exchange(thread Tile& tile, bool exchanged = true) {
#pragma unroll
  for (uint i = 0; i < Tile::X4 + Tile::V4; ++i) {
    const typename Tile::Four p = tile.y[P][i];
    tile.y[P][i] = exchanged ? tile.y[Q][i] : p;
    tile.y[Q][i] = exchanged ? p : tile.y[Q][i];
  }
  const float p_square = tile.square[P];
  tile.square[P] = exchanged ? tile.square[Q] : p_square;
  tile.square[Q] = exchanged ? p_square : tile.square[Q];
}

// Rotates columns P and Q of each lane.
template <uint P, uint Q, typename Tile>
inline bool jacobi_rotate(thread Tile& tile, typename Tile::Number product, float tolerance) {
  const bool swap = tile.square[Q] > tile.square[P];
  product = swap ? conjugate(product) : product;
  if (metal::simd_any(swap)) jacobi_exchange<P, Q>(tile, swap);
  const auto r = jacobi_rotation(tile.square[P], tile.square[Q], product, tolerance);
  if (metal::simd_any(r.rotates)) {
#pragma unroll
    for (uint i = 0; i < Tile::X4 + Tile::V4; ++i) {
      const typename Tile::Four p = tile.y[P][i], q = tile.y[Q][i];
      tile.y[P][i] = jacobi_turned(p, q, true, r);
      tile.y[Q][i] = jacobi_turned(q, p, false, r);
    }
    tile.square[P] = r.p_square;
    tile.square[Q] = r.q_square;
  }
  return r.rotates || swap;
}

template <uint C, typename Tile>
inline void jacobi_move(thread Tile& tile, ushort distance) {
#pragma unroll
  for (uint i = 0; i < Tile::X4 + Tile::V4; ++i) tile.y[C][i] = moved(tile.y[C][i], distance);
  tile.square[C] = metal::simd_shuffle_xor(tile.square[C], distance);
}

// Exchanges the columns Q of lanes whose number lacks the bit `distance` with the columns P of those that have it.
template <uint P, uint Q, typename Tile>
inline void jacobi_trade(thread Tile& tile, uint lane, ushort distance) {
  const bool keeps_first = (lane & distance) == 0;
#pragma unroll
  for (uint i = 0; i < Tile::X4 + Tile::V4; ++i) {
    const typename Tile::Four other = moved(keeps_first ? tile.y[Q][i] : tile.y[P][i], distance);
    tile.y[P][i] = keeps_first ? tile.y[P][i] : other;
    tile.y[Q][i] = keeps_first ? other : tile.y[Q][i];
  }
  const float other = metal::simd_shuffle_xor(keeps_first ? tile.square[Q] : tile.square[P], distance);
  tile.square[P] = keeps_first ? tile.square[P] : other;
  tile.square[Q] = keeps_first ? other : tile.square[Q];
}

// In each group of `lanes` lanes, rotates all pairs of the first set with the second, and of the third with the fourth
// if there are four sets.
template <typename Tile>
inline bool jacobi_sets(thread Tile& tile, thread typename Tile::Shared& shared, uint lanes, float tolerance) {
  constexpr uint kPairs = Tile::COLUMNS / 2, kThird = kPairs == 2 ? 2 : 0, kFourth = kPairs == 2 ? 3 : 1;
  bool changed = false;
  for (uint step = 0; step < lanes; ++step) {
    typename Tile::Number products[kPairs];
    products[0] = jacobi_dot<Tile::X4>(tile.y[0], tile.y[1]);
    if (kPairs == 2) products[kPairs - 1] = jacobi_dot<Tile::X4>(tile.y[kThird], tile.y[kFourth]);
    shared.template sum<kPairs>(products);
    changed |= jacobi_rotate<0, 1>(tile, products[0], tolerance);
    if (kPairs == 2) changed |= jacobi_rotate<kThird, kFourth>(tile, products[kPairs - 1], tolerance);
    const ushort distance = (step ^ (step + 1)) & (lanes - 1);  // to the lane at distance step + 1 from its first
    jacobi_move<1>(tile, distance);
    if (kPairs == 2) jacobi_move<kFourth>(tile, distance);
  }
  return changed;
}

// Rotates all pairs of columns of different sets. In every place the set with the smaller number must be the first of
// its pair, or columns would be exchanged for ever: (0 1)(2 3), (0 2)(1 3), (0 3)(1 2).
template <typename Tile>
inline bool jacobi_all_sets(thread Tile& tile, thread typename Tile::Shared& shared, float tolerance) {
  if constexpr (Tile::COLUMNS == 2) {
    return jacobi_sets(tile, shared, Tile::LANES, tolerance);
  } else {
    bool changed = false;
    for (uint round = 0; round < 3; ++round) {
      changed |= jacobi_sets(tile, shared, Tile::LANES, tolerance);
      if (round == 1)
        jacobi_exchange<1, 3>(tile);
      else
        jacobi_exchange<1, 2>(tile);
      if (round == 2) jacobi_exchange<2, 3>(tile);
    }
    return changed;
  }
}

template <typename Tile>
inline void jacobi_trade_sets(thread Tile& tile, uint lane, ushort distance) {
  jacobi_trade<0, 1>(tile, lane, distance);
  if constexpr (Tile::COLUMNS == 4) jacobi_trade<2, 3>(tile, lane, distance);
}

// Sweeps until a sweep has neither rotated nor exchanged columns in any lane of the simdgroup: a sweep in which columns
// change places may miss pairs.
template <typename Tile>
inline void jacobi(thread Tile& tile, thread typename Tile::Shared& shared, float tolerance) {
  for (uint sweep = 0; sweep < kJacobiSweeps; ++sweep) {
    jacobi_squares(tile, shared);
    bool changed = jacobi_all_sets(tile, shared, tolerance);
    for (ushort half_of_lanes = Tile::LANES / 2; half_of_lanes > 0; half_of_lanes /= 2) {
      jacobi_trade_sets(tile, shared.lane, half_of_lanes);
      changed |= jacobi_sets(tile, shared, half_of_lanes, tolerance);
    }
    for (ushort distance = 1; distance < Tile::LANES; distance *= 2) jacobi_trade_sets(tile, shared.lane, distance);
    if (!metal::simd_any(changed)) break;
  }
  jacobi_squares(tile, shared);
}

// The rank of each column, the largest first and padding last, and the number of columns above the floor.
template <typename Tile>
inline uint jacobi_ranks(thread const Tile& tile, uint lane, thread uint* ranks) {
  uint present = 0;
#pragma unroll
  for (uint c = 0; c < Tile::COLUMNS; ++c) ranks[c] = 0;
#pragma unroll
  for (uint set = 0; set < Tile::COLUMNS; ++set)
    for (uint i = 0; i < Tile::LANES; ++i) {
      const float other = metal::simd_shuffle(tile.square[set], ushort(lane / Tile::LANES * Tile::LANES + i));
      present += other > kJacobiFloor;
#pragma unroll
      for (uint c = 0; c < Tile::COLUMNS; ++c) {
        const bool before = set * Tile::LANES + i < c * Tile::LANES + lane % Tile::LANES;
        ranks[c] += other > tile.square[c] || (other == tile.square[c] && before);
      }
    }
  return present;
}
