// One-sided Jacobi (Hestenes 1958; Demmel and Veselić 1992). Plane rotations act on pairs of columns of X until all
// columns are orthogonal. They act on V's columns too, which makes V the product of the rotations.
//
// Each of LANES lanes holds COLUMNS columns, and SIMDGROUPS simdgroups share the rows: a thread has the rows 4 (X4
// simdgroup + i) + {0, 1, 2, 3} of X for i < X4, and rows of V likewise with V4. Shuffles within a simdgroup move
// columns between lanes. Only sums over rows go through threadgroup memory. These are the same in every simdgroup, so
// all simdgroups decide alike.
//
// The columns of one register in all lanes are a set. A sweep pairs every two columns once: first columns of different
// sets, lane by lane, while one of the sets moves on; then columns of one set, in lanes whose exclusive or is 1, 2, 3
// …. The larger column of a pair becomes the first (de Rijk 1989), which saves sweeps.
#pragma once

#include <metal_stdlib>

#include "column_tile.h"

// Squares of norms below this count as zero: such columns are not rotated, and have no direction. Matrices are scaled
// to entries of 2^52, so this is 2^-100 of the largest entry. A square that a GPU may take for zero, below 2^-126, is
// less than 2^-30 of this. The squares of a 128 x 128 matrix add up to less than 2^120.
constant constexpr float kJacobiFloor = 0x1p-96f;
constant constexpr float kJacobiScale = 0x1p52f;
constant constexpr uint kJacobiSweeps = 60;  // 6 to 10 are usual; more if rows differ by dozens of magnitudes

// Sums and maxima over the threads that have the same lane in all simdgroups. Each takes one barrier, because two
// halves of `memory` take turns.
template <uint SIMDGROUPS, uint COLUMNS>
struct OverSimdgroups {
  static constexpr constant uint kFloats = SIMDGROUPS == 1 ? 1 : 2 * SIMDGROUPS * COLUMNS * 32;

  threadgroup float* memory;
  uint simdgroup, lane;
  uint turn;

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
    if (SIMDGROUPS == 1) return;
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
    if (SIMDGROUPS == 1) return value;
    threadgroup const float* const published = publish(&value, 1);
#pragma unroll
    for (uint s = 0; s < SIMDGROUPS; ++s) value = metal::max(value, published[s * COLUMNS * 32]);
    return value;
  }
};

template <uint COLUMNS_, uint LANES_, uint SIMDGROUPS_, uint X4_, uint V4_, typename T = float>
struct JacobiTile {
  typedef T Number;  // float or float2
  typedef typename FourOf<T>::Type Four;
  static constexpr constant uint COLUMNS = COLUMNS_, LANES = LANES_, SIMDGROUPS = SIMDGROUPS_, X4 = X4_, V4 = V4_;
  static constexpr constant uint SLOTS = COLUMNS_ * LANES_;
  typedef OverSimdgroups<SIMDGROUPS_, COLUMNS_ * FourOf<T>::kParts> Shared;

  Four y[COLUMNS_][X4_ + V4_];  // X above V
  float square[COLUMNS_];       // squares of the norms of X's columns; -1 for padding, which sorts last

  static uint row_of(uint simdgroup, uint i) { return 4 * (X4_ * simdgroup + i); }
  static uint v_row_of(uint simdgroup, uint i) { return 4 * (V4_ * simdgroup + i); }
};

// aᴴ b
template <uint COUNT, typename Four>
inline auto jacobi_dot(thread const Four* a, thread const Four* b) {
  auto sum = products_of(a[0], b[0]);
#pragma unroll
  for (uint i = 1; i < COUNT; ++i) sum = add_products(sum, a[i], b[i]);
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

inline JacobiRotation jacobi_rotation(float p_square, float q_square, float product, float tolerance) {
  JacobiRotation r;
  r.rotates = q_square > kJacobiFloor &&
              metal::abs(product) > tolerance * (metal::precise::sqrt(p_square) * metal::precise::sqrt(q_square));
  const float zeta = 0.5f * (q_square - p_square) / product;
  const float size = metal::abs(zeta);
  const float root = size < 0x1p30f ? metal::precise::sqrt(metal::fma(size, size, 1.0f)) : size;  // no overflow
  const float t = r.rotates ? metal::copysign(1.0f / (size + root), -product) : 0.0f;
  const float c = metal::precise::rsqrt(metal::fma(t, t, 1.0f));
  r.s = c * t;
  r.tau = r.s / (1.0f + c);
  const float moved = r.rotates ? metal::abs(t * product) : 0.0f;
  r.p_square = p_square + moved;
  r.q_square = r.rotates ? metal::max(q_square - moved, 0.0f) : q_square;
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
  const float size = hypotenuse(product.x, product.y);
  const JacobiRotation r = jacobi_rotation(p_square, q_square, size, tolerance);
  const float2 sigma = r.rotates ? conjugate(product) * (1.0f / size) * r.s : float2(0.0f);
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

// The product as the first column's lane has it. The other lane's is the conjugate, with other roundings.
inline float jacobi_agreed(float product, bool, ushort) { return product; }
inline float2 jacobi_agreed(float2 product, bool first, ushort distance) {
  const float2 other = metal::simd_shuffle_xor(product, distance);
  return first ? product : other;
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

// Rotates all pairs of the first set with the second, and of the third with the fourth if there are four sets.
template <typename Tile>
inline bool jacobi_sets(thread Tile& tile, thread typename Tile::Shared& shared, float tolerance) {
  constexpr uint kPairs = Tile::COLUMNS / 2, kThird = kPairs == 2 ? 2 : 0, kFourth = kPairs == 2 ? 3 : 1;
  bool changed = false;
  for (uint step = 0; step < Tile::LANES; ++step) {
    typename Tile::Number products[kPairs];
    products[0] = jacobi_dot<Tile::X4>(tile.y[0], tile.y[1]);
    if (kPairs == 2) products[kPairs - 1] = jacobi_dot<Tile::X4>(tile.y[kThird], tile.y[kFourth]);
    shared.template sum<kPairs>(products);
    changed |= jacobi_rotate<0, 1>(tile, products[0], tolerance);
    if (kPairs == 2) changed |= jacobi_rotate<kThird, kFourth>(tile, products[kPairs - 1], tolerance);
    const ushort distance = (step ^ (step + 1)) % Tile::LANES;  // to the lane at distance step + 1 from its first
    jacobi_move<1>(tile, distance);
    if (kPairs == 2) jacobi_move<kFourth>(tile, distance);
  }
  return changed;
}

// Rotates all pairs of sets; one set has none. In every place the set with the smaller number must be the first of its
// pair, or columns would be exchanged for ever: (0 1)(2 3), (0 2)(1 3), (0 3)(1 2).
template <uint COLUMNS>
struct JacobiSets;
template <>
struct JacobiSets<1> {
  template <typename Tile>
  static bool rotate_all(thread Tile&, thread typename Tile::Shared&, float) {
    return false;
  }
};
template <>
struct JacobiSets<2> {
  template <typename Tile>
  static bool rotate_all(thread Tile& tile, thread typename Tile::Shared& shared, float tolerance) {
    return jacobi_sets(tile, shared, tolerance);
  }
};
template <>
struct JacobiSets<4> {
  template <typename Tile>
  static bool rotate_all(thread Tile& tile, thread typename Tile::Shared& shared, float tolerance) {
    bool changed = false;
    for (uint round = 0; round < 3; ++round) {
      changed |= jacobi_sets(tile, shared, tolerance);
      if (round == 1)
        jacobi_exchange<1, 3>(tile);
      else
        jacobi_exchange<1, 2>(tile);
      if (round == 2) jacobi_exchange<2, 3>(tile);
    }
    return changed;
  }
};

// Rotates columns FIRST to FIRST + COUNT - 1 of each lane with those of the same set in the lane at a distance.
template <uint FIRST, uint COUNT, typename Tile>
inline bool jacobi_lanes(thread Tile& tile, thread typename Tile::Shared& shared, ushort distance, float tolerance) {
  const bool first = (shared.lane ^ distance) > shared.lane;
  typedef typename Tile::Four Four;
  typename Tile::Number products[COUNT];
  bool changed = false;
  Four other[COUNT][Tile::X4];
#pragma unroll
  for (uint c = 0; c < COUNT; ++c) {
#pragma unroll
    for (uint i = 0; i < Tile::X4; ++i) other[c][i] = moved(tile.y[FIRST + c][i], distance);
    products[c] = jacobi_dot<Tile::X4>(tile.y[FIRST + c], other[c]);
  }
  shared.template sum<COUNT>(products);
#pragma unroll
  for (uint c = 0; c < COUNT; ++c) {
    const float other_square = metal::simd_shuffle_xor(tile.square[FIRST + c], distance);
    const float own_square = tile.square[FIRST + c];
    const float p_square = metal::max(own_square, other_square), q_square = metal::min(own_square, other_square);
    const bool swap = first ? own_square < other_square : own_square > other_square;
    tile.square[FIRST + c] = first ? p_square : q_square;
    if (metal::simd_any(swap)) {
#pragma unroll
      for (uint i = 0; i < Tile::X4; ++i) {
        const Four own = tile.y[FIRST + c][i];
        tile.y[FIRST + c][i] = swap ? other[c][i] : own;
        other[c][i] = swap ? own : other[c][i];
      }
#pragma unroll
      for (uint i = Tile::X4; i < Tile::X4 + Tile::V4; ++i) {
        const Four v = moved(tile.y[FIRST + c][i], distance);
        tile.y[FIRST + c][i] = swap ? v : tile.y[FIRST + c][i];
      }
    }
    const auto product = jacobi_agreed(products[c], first, distance);
    const auto r = jacobi_rotation(p_square, q_square, swap ? conjugate(product) : product, tolerance);
    changed |= r.rotates || swap;
    if (metal::simd_any(r.rotates)) {
#pragma unroll
      for (uint i = 0; i < Tile::X4; ++i)
        tile.y[FIRST + c][i] = jacobi_turned(tile.y[FIRST + c][i], other[c][i], first, r);
#pragma unroll
      for (uint i = Tile::X4; i < Tile::X4 + Tile::V4; ++i) {
        const Four v = moved(tile.y[FIRST + c][i], distance);
        tile.y[FIRST + c][i] = jacobi_turned(tile.y[FIRST + c][i], v, first, r);
      }
      tile.square[FIRST + c] = first ? r.p_square : r.q_square;
    }
  }
  return changed;
}

// Sweeps until a sweep has neither rotated nor exchanged columns in any lane of the simdgroup: a sweep in which columns
// change places may miss pairs.
template <typename Tile>
inline void jacobi(thread Tile& tile, thread typename Tile::Shared& shared, float tolerance) {
  for (uint sweep = 0; sweep < kJacobiSweeps; ++sweep) {
    jacobi_squares(tile, shared);
    bool changed = JacobiSets<Tile::COLUMNS>::rotate_all(tile, shared, tolerance);
    constexpr uint kAtOnce = Tile::COLUMNS < 2 ? Tile::COLUMNS : 2;
    for (ushort distance = 1; distance < Tile::LANES; ++distance) {
      changed |= jacobi_lanes<0, kAtOnce>(tile, shared, distance, tolerance);
      if (Tile::COLUMNS == 4)
        changed |= jacobi_lanes<Tile::COLUMNS - kAtOnce, kAtOnce>(tile, shared, distance, tolerance);
    }
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
