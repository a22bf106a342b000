// Matrices, metal::array, and the names of <simd/simd.h>.
#pragma once

// Elements of an object in an address space. The second reading knows one space.
#define MSL_INDEXED_SPACE(T, space)           \
  constexpr space T& operator[](ulong) space; \
  constexpr const space T& operator[](ulong) const space;
#ifdef __OPENCL_CPP_VERSION__
#define MSL_INDEXED_SPACES(T) MSL_INDEXED_SPACE(T, __local) MSL_INDEXED_SPACE(T, __global)
#else
#define MSL_INDEXED_SPACES(T)
#endif

namespace metal {

template <class T, int Columns, int Rows, class = enable_if_t<is_floating_point_v<T>>>
struct matrix {
  vec<T, Rows> columns[Columns];
  matrix() = default;
  constexpr explicit matrix(T) {}
  template <class... C, class = enable_if_t<(sizeof...(C) == Columns && (is_convertible_v<C, vec<T, Rows>> && ...)) ||
                                            (sizeof...(C) == Columns * Rows && (is_arithmetic_v<C> && ...))>>
  constexpr matrix(C...) : columns() {}
  template <class U>
  constexpr explicit matrix(matrix<U, Columns, Rows>) {}
  using Column = vec<T, Rows>;
  MSL_INDEXED_SPACE(Column, __private) MSL_INDEXED_SPACES(Column)
  matrix& operator+=(matrix);
  matrix& operator-=(matrix);
  matrix& operator*=(T);
  matrix& operator*=(matrix<T, Columns, Columns>);
};
template <class T, int C, int R>
constexpr matrix<T, C, R> operator+(matrix<T, C, R>, matrix<T, C, R>);
template <class T, int C, int R>
constexpr matrix<T, C, R> operator-(matrix<T, C, R>, matrix<T, C, R>);
template <class T, int C, int R>
constexpr matrix<T, C, R> operator-(matrix<T, C, R>);
template <class T, int C, int R, int K>
constexpr matrix<T, K, R> operator*(matrix<T, C, R>, matrix<T, K, C>);
template <class T, int C, int R>
constexpr vec<T, R> operator*(matrix<T, C, R>, vec<T, C>);
template <class T, int C, int R>
constexpr vec<T, C> operator*(vec<T, R>, matrix<T, C, R>);
template <class T, int C, int R, class S, class = enable_if_t<is_arithmetic_v<S>>>
constexpr matrix<T, C, R> operator*(matrix<T, C, R>, S);
template <class T, int C, int R, class S, class = enable_if_t<is_arithmetic_v<S>>>
constexpr matrix<T, C, R> operator*(S, matrix<T, C, R>);
template <class T, int C, int R, class S, class = enable_if_t<is_arithmetic_v<S>>>
constexpr matrix<T, C, R> operator/(matrix<T, C, R>, S);
template <class T, int C, int R>
constexpr bool operator==(matrix<T, C, R>, matrix<T, C, R>);
template <class T, int C, int R>
constexpr matrix<T, R, C> transpose(matrix<T, C, R>);
template <class T, int N>
constexpr T determinant(matrix<T, N, N>);

template <class T, size_t N>
struct array {
  T __elems[N];
  constexpr size_t size() const { return N; }
  constexpr bool empty() const { return N == 0; }
  MSL_INDEXED_SPACE(T, __private) MSL_INDEXED_SPACES(T)
  constexpr __private T* data() __private { return __elems; }
  constexpr __private T* begin() __private { return __elems; }
  constexpr __private T* end() __private { return __elems + N; }
};

}  // namespace metal

#define MSL_SIMD_VECTORS(T)                                                     \
  using vector_##T##2 = T##2; using vector_##T##3 = T##3; using vector_##T##4 = T##4; \
  using simd_##T##1 = T; using simd_##T##2 = T##2; using simd_##T##3 = T##3; using simd_##T##4 = T##4; \
  namespace simd { using ::T##2; using ::T##3; using ::T##4; }
MSL_SIMD_VECTORS(char) MSL_SIMD_VECTORS(uchar) MSL_SIMD_VECTORS(short) MSL_SIMD_VECTORS(ushort) MSL_SIMD_VECTORS(int)
MSL_SIMD_VECTORS(uint) MSL_SIMD_VECTORS(long) MSL_SIMD_VECTORS(ulong) MSL_SIMD_VECTORS(half) MSL_SIMD_VECTORS(float)
#undef MSL_SIMD_VECTORS

#define MSL_MATRICES(C, R)                                                         \
  using float##C##x##R = metal::matrix<float, C, R>;                               \
  using half##C##x##R = metal::matrix<half, C, R>;                                 \
  using matrix_float##C##x##R = float##C##x##R; using simd_float##C##x##R = float##C##x##R; \
  using matrix_half##C##x##R = half##C##x##R; using simd_half##C##x##R = half##C##x##R; \
  namespace metal { using ::float##C##x##R; using ::half##C##x##R; }               \
  namespace simd { using ::float##C##x##R; using ::half##C##x##R; }
MSL_MATRICES(2, 2) MSL_MATRICES(2, 3) MSL_MATRICES(2, 4) MSL_MATRICES(3, 2) MSL_MATRICES(3, 3) MSL_MATRICES(3, 4)
MSL_MATRICES(4, 2) MSL_MATRICES(4, 3) MSL_MATRICES(4, 4)
#undef MSL_MATRICES

// Clang cannot add an object that converts to an integer to a pointer in an address space.
namespace msl {
template <class P, class C, class = metal::enable_if_t<__is_pointer(P) && __is_class(C)>>
using moved = decltype(P() + long(*static_cast<__private C*>(nullptr)));
}
template <class P, class C, class = msl::moved<P, C>>
P& operator+=(P&, C);
template <class P, class C, class = msl::moved<P, C>>
P& operator-=(P&, C);
