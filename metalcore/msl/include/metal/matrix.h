// matrix<T, C, R>: C columns of R rows, stored by columns.
#pragma once

#include "metal/geometric.h"

namespace metal {

template <class T, int C, int R = C>
struct matrix {
  using column_type = vec<T, R>;

  column_type columns[C];

  matrix() = default;
  // The scalar stands on the diagonal, and zero elsewhere.
  template <class S, class = std::enable_if_t<msl::is_scalar_v<S>>>
  METAL_FUNC explicit constexpr matrix(S diagonal) : columns{} {
    for (int i = 0; i < (C < R ? C : R); ++i) columns[i][i] = T(diagonal);
  }
  // Constructs it from columns, or from scalars column by column.
  template <class A, class B, class... Rest>
  METAL_FUNC constexpr matrix(const A& a, const B& b, const Rest&... rest) : columns{} {
    if constexpr (msl::width_v<A> == 1) {
      static_assert(sizeof...(Rest) + 2 == C * R, "a matrix takes a scalar, its columns, or all its elements");
      const T elements[] = {T(a), T(b), T(rest)...};
      for (int i = 0; i < C * R; ++i) columns[i / R][i % R] = elements[i];
    } else {
      static_assert(sizeof...(Rest) + 2 == C, "a matrix takes a scalar, its columns, or all its elements");
      const column_type given[] = {column_type(a), column_type(b), column_type(rest)...};
      for (int i = 0; i < C; ++i) columns[i] = given[i];
    }
  }
  template <class U, class = std::enable_if_t<!std::is_same_v<T, U>>>
  METAL_FUNC explicit constexpr matrix(const matrix<U, C, R>& other) : columns{} {
    for (int i = 0; i < C; ++i) columns[i] = column_type(other.columns[i]);
  }

  METAL_FUNC constexpr column_type& operator[](int i) { return MSL_CHECK_INDEX(i, C), columns[i]; }
  METAL_FUNC constexpr const column_type& operator[](int i) const { return MSL_CHECK_INDEX(i, C), columns[i]; }

  friend METAL_FUNC constexpr matrix operator+(const matrix& a, const matrix& b) {
    matrix result = a;
    for (int i = 0; i < C; ++i) result.columns[i] += b.columns[i];
    return result;
  }
  friend METAL_FUNC constexpr matrix operator-(const matrix& a, const matrix& b) {
    matrix result = a;
    for (int i = 0; i < C; ++i) result.columns[i] -= b.columns[i];
    return result;
  }
  friend METAL_FUNC constexpr matrix operator-(const matrix& a) {
    matrix result = a;
    for (int i = 0; i < C; ++i) result.columns[i] = -a.columns[i];
    return result;
  }
  friend METAL_FUNC constexpr matrix operator*(const matrix& a, T s) {
    matrix result = a;
    for (int i = 0; i < C; ++i) result.columns[i] *= s;
    return result;
  }
  friend METAL_FUNC constexpr matrix operator*(T s, const matrix& a) { return a * s; }
  friend METAL_FUNC constexpr matrix operator/(const matrix& a, T s) {
    matrix result = a;
    for (int i = 0; i < C; ++i) result.columns[i] /= s;
    return result;
  }
  friend METAL_FUNC constexpr column_type operator*(const matrix& m, const vec<T, C>& v) {
    column_type result = m.columns[0] * v[0];
    for (int i = 1; i < C; ++i) result += m.columns[i] * v[i];
    return result;
  }
  friend METAL_FUNC constexpr vec<T, C> operator*(const column_type& v, const matrix& m) {
    vec<T, C> result{};
    for (int i = 0; i < C; ++i) result[i] = dot(v, m.columns[i]);
    return result;
  }
  friend METAL_FUNC constexpr matrix& operator+=(matrix& a, const matrix& b) { return a = a + b; }
  friend METAL_FUNC constexpr matrix& operator-=(matrix& a, const matrix& b) { return a = a - b; }
  friend METAL_FUNC constexpr matrix& operator*=(matrix& a, T s) { return a = a * s; }
  friend METAL_FUNC constexpr matrix& operator/=(matrix& a, T s) { return a = a / s; }
  friend METAL_FUNC constexpr bool operator==(const matrix& a, const matrix& b) {
    for (int i = 0; i < C; ++i)
      for (int j = 0; j < R; ++j)
        if (a.columns[i][j] != b.columns[i][j]) return false;
    return true;
  }
  friend METAL_FUNC constexpr bool operator!=(const matrix& a, const matrix& b) { return !(a == b); }
};

template <class T, int C, int K, int R>
METAL_FUNC constexpr matrix<T, C, R> operator*(const matrix<T, K, R>& a, const matrix<T, C, K>& b) {
  matrix<T, C, R> result{};
  for (int i = 0; i < C; ++i) result.columns[i] = a * b.columns[i];
  return result;
}
template <class T, int N>
METAL_FUNC constexpr matrix<T, N, N>& operator*=(matrix<T, N, N>& a, const matrix<T, N, N>& b) {
  return a = a * b;
}

template <class T, int C, int R>
METAL_FUNC constexpr matrix<T, R, C> transpose(const matrix<T, C, R>& m) {
  matrix<T, R, C> result{};
  for (int i = 0; i < C; ++i)
    for (int j = 0; j < R; ++j) result.columns[j][i] = m.columns[i][j];
  return result;
}

template <class T>
METAL_FUNC constexpr T determinant(const matrix<T, 2, 2>& m) {
  return T(m[0].x * m[1].y - m[1].x * m[0].y);
}
template <class T>
METAL_FUNC constexpr T determinant(const matrix<T, 3, 3>& m) {
  return dot(m[0], cross(m[1], m[2]));
}
// This is Laplace's expansion by the minors of the first two rows.
template <class T>
METAL_FUNC constexpr T determinant(const matrix<T, 4, 4>& m) {
  auto top = [&](int i, int j) { return m[i].x * m[j].y - m[j].x * m[i].y; };
  auto bottom = [&](int i, int j) { return m[i].z * m[j].w - m[j].z * m[i].w; };
  return T(top(0, 1) * bottom(2, 3) - top(0, 2) * bottom(1, 3) + top(0, 3) * bottom(1, 2) + top(1, 2) * bottom(0, 3) -
           top(1, 3) * bottom(0, 2) + top(2, 3) * bottom(0, 1));
}

}  // namespace metal

#define MSL_MATRIX(T, C, R)                     \
  using T##C##x##R = metal::matrix<T, C, R>;    \
  namespace metal {                             \
  using MSL_ROOT::T##C##x##R;                           \
  }
#define MSL_MATRICES(T) \
  MSL_MATRIX(T, 2, 2) MSL_MATRIX(T, 2, 3) MSL_MATRIX(T, 2, 4) MSL_MATRIX(T, 3, 2) MSL_MATRIX(T, 3, 3) \
  MSL_MATRIX(T, 3, 4) MSL_MATRIX(T, 4, 2) MSL_MATRIX(T, 4, 3) MSL_MATRIX(T, 4, 4)
MSL_MATRICES(float)
MSL_MATRICES(half)
MSL_MATRICES(bfloat)
#undef MSL_MATRICES
#undef MSL_MATRIX
