// Implicit QL with Wilkinson's shifts (Dubrulle 1970), by a simdgroup, of tridiagonal matrices of up to 32 rows whose
// entries are at most about one. A lane holds an entry of the diagonal and the entry below it, and owns a row of the
// eigenvectors in threadgroup memory.
//
// The rotations of a step follow one another, and each needs the one before. A rotation therefore has one slow
// operation, a reciprocal root, and reads the entries of the next one ahead of time.
#pragma once

#include <metal_stdlib>

constant constexpr uint kQlSteps = 60;              // for an eigenvalue; 2 are usual
constant constexpr float kQlNegligible = 0x1p-40f;  // an off-diagonal entry that is small beside the matrix's norm
constant constexpr float kQlLeast = 0x1p-45f;       // of the magnitude of what a rotation turns, for its square's sake

// What a Newton step multiplies a number's reciprocal root by, so that it is as exact as other operations, given half
// of the number times it.
inline float newton_factor(float half_root, float reciprocal) { return metal::fma(-half_root, reciprocal, 1.5f); }

inline float not_zero(float value) { return metal::copysign(metal::max(metal::abs(value), kQlLeast), value); }

// Makes d the eigenvalues, in any order. z is the lane's row of the eigenvectors, the identity's at first; without
// VECTORS it is not used.
template <bool VECTORS>
inline void tridiagonal_ql(thread float& d, float e, uint n, uint lane, threadgroup float* z) {
  for (uint l = 0; l + 1 < n; ++l) {
    for (uint step = 0; step < kQlSteps; ++step) {
      const float size = metal::abs(d) + metal::abs(metal::simd_shuffle_down(d, 1));
      const bool ends =
          lane >= l && (lane + 1 >= n || metal::abs(e) <= metal::max(0.5f * FLT_EPSILON * size, kQlNegligible));
      // Wilkinson's shift, while the lanes agree about the end.
      const float d_l = metal::simd_shuffle(d, ushort(l)), e_l = metal::simd_shuffle(e, ushort(l));
      const float half_difference = 0.5f * (metal::simd_shuffle(d, ushort(l + 1)) - d_l), square = e_l * e_l;
      const float sum = metal::fma(half_difference, half_difference, square);
      const float root = sum * metal::rsqrt(sum);
      const float correction = metal::fast::divide(square, half_difference + metal::copysign(root, half_difference));
      const uint m = metal::ctz(static_cast<uint>(static_cast<metal::simd_vote::vote_t>(metal::simd_ballot(ends))));
      if (m == l) break;
      float above = metal::simd_shuffle(d, ushort(m));
      float g = not_zero(above - d_l + correction);
      float sine = 1.0f, cosine = 1.0f, shift = 0.0f;
      float new_d = d, new_e = e;
      float carried = VECTORS ? z[m] : 0.0f;
      float d_i = metal::simd_shuffle(d, ushort(m - 1)), e_i = metal::simd_shuffle(e, ushort(m - 1));
      for (uint i = m; i-- > l;) {
        const ushort next = ushort((i - 1) % 32);  // of what is not used, after the last
        const float next_d = metal::simd_shuffle(d, next), next_e = metal::simd_shuffle(e, next);
        const float f = sine * e_i, b = cosine * e_i;
        const float squares = metal::fma(f, f, g * g), inverse = metal::rsqrt(squares);
        const float half_length = 0.5f * squares * inverse, factor = newton_factor(half_length, inverse);
        if (lane == i + 1) new_e = 2.0f * half_length * factor;
        sine = f * inverse * factor, cosine = g * inverse * factor;
        g = above - shift;
        const float r = metal::fma(d_i - g, sine, 2.0f * cosine * b);
        shift = sine * r;
        if (lane == i + 1) new_d = g + shift;
        g = not_zero(metal::fma(cosine, r, -b));
        if (VECTORS) {
          const float other = z[i];
          z[i + 1] = metal::fma(sine, other, cosine * carried);
          carried = metal::fma(cosine, other, -sine * carried);
        }
        above = d_i, d_i = next_d, e_i = next_e;
      }
      if (VECTORS) z[l] = carried;
      d = lane == l ? d - shift : new_d;
      e = lane == l ? g : lane == m ? 0.0f : new_e;
    }
  }
}

// The number of the n lanes whose value is smaller, or as large in an earlier lane.
inline uint rank_among(float value, uint n, uint lane) {
  uint rank = 0;
  for (uint i = 0; i < n; ++i) {
    const float other = metal::simd_shuffle(value, ushort(i));
    rank += other < value || (other == value && i < lane) ? 1 : 0;
  }
  return rank;
}
