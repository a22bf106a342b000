// simdgroup_matrix<T, 8, 8>: a matrix spread over the 32 lanes of a simdgroup, two neighbouring elements of a row in
// each. The mapping of lanes to elements is the one Apple's GPUs have, which programs rely on through thread_elements().
#pragma once

#include "metal/simdgroup.h"

namespace msl {

struct MatrixPlace {
  uint32_t row, column;  // of a lane's first element; the second is in the next column
};
METAL_FUNC MatrixPlace matrix_place(uint32_t lane) {
  uint32_t quad = lane / 4;
  return {(quad & 4) + lane / 2 % 4, (quad & 2) * 2 + lane % 2 * 2};
}
// The lane that holds an element; the inverse of matrix_place.
METAL_FUNC uint32_t matrix_lane(uint32_t row, uint32_t column) {
  return (row & 4) << 2 | (column & 4) << 1 | (row & 3) << 1 | (column >> 1 & 1);
}

}  // namespace msl

namespace metal {

template <class T, int Cols, int Rows = Cols>
struct simdgroup_matrix {
  static_assert(Cols == 8 && Rows == 8, "simdgroup_matrix is 8 by 8");
  using element_type = T;
  using storage_type = vec<T, 2>;

  simdgroup_matrix() = default;
  // The scalar on the diagonal, zero elsewhere.
  METAL_FUNC explicit simdgroup_matrix(T diagonal) {
    msl::MatrixPlace place = msl::matrix_place(msl::self().lane);
    elements = storage_type(place.row == place.column ? diagonal : T(0), place.row == place.column + 1 ? diagonal : T(0));
  }

  METAL_FUNC storage_type& thread_elements() { return elements; }
  METAL_FUNC const storage_type& thread_elements() const { return elements; }

 private:
  storage_type elements;
};

template <class T, int Cols, int Rows = Cols>
METAL_FUNC simdgroup_matrix<T, Cols, Rows> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, Cols, Rows> result;
  result.thread_elements() = vec<T, 2>(value);
  return result;
}
template <class T, int Cols, int Rows = Cols>
METAL_FUNC simdgroup_matrix<T, Cols, Rows> make_diagonal_simdgroup_matrix(T value) {
  return simdgroup_matrix<T, Cols, Rows>(value);
}

// `origin` is the (column, row) in memory at which the matrix begins.
template <class T>
METAL_FUNC void simdgroup_load(simdgroup_matrix<T, 8, 8>& matrix, const T* source, ulong elements_per_row = 8,
                               ulong2 origin = 0, bool transposed = false) {
  msl::MatrixPlace place = msl::matrix_place(msl::self().lane);
  source += origin.y * elements_per_row + origin.x;
  ulong step = transposed ? elements_per_row : 1;
  source += transposed ? place.column * elements_per_row + place.row : place.row * elements_per_row + place.column;
  matrix.thread_elements() = vec<T, 2>(source[0], source[step]);
}
template <class T>
METAL_FUNC void simdgroup_store(const simdgroup_matrix<T, 8, 8>& matrix, T* target, ulong elements_per_row = 8,
                                ulong2 origin = 0, bool transposed = false) {
  msl::MatrixPlace place = msl::matrix_place(msl::self().lane);
  target += origin.y * elements_per_row + origin.x;
  ulong step = transposed ? elements_per_row : 1;
  target += transposed ? place.column * elements_per_row + place.row : place.row * elements_per_row + place.column;
  target[0] = matrix.thread_elements().x;
  target[step] = matrix.thread_elements().y;
}

}  // namespace metal

namespace msl {

// This lane's two elements of a * b + c, summed in float. Each lane publishes its parts of a and b in one exchange.
template <class A, class B>
METAL_FUNC metal::vec<float, 2> matrix_product(const metal::vec<A, 2>& a, const metal::vec<B, 2>& b,
                                               metal::vec<float, 2> c, uint32_t line) {
  struct Parts {
    metal::vec<A, 2> a;
    metal::vec<B, 2> b;
  };
  Lanes<Parts> lanes = publish(Parts{a, b}, kSimd, line);
  MatrixPlace place = matrix_place(lanes.lane);
  for (uint32_t k = 0; k < 8; k += 2) {
    metal::vec<A, 2> left = lanes[matrix_lane(place.row, k)].a;
    metal::vec<B, 2> first = lanes[matrix_lane(k, place.column)].b, second = lanes[matrix_lane(k + 1, place.column)].b;
    c.x = math::multiply_add(float(left.x), float(first.x), c.x);
    c.y = math::multiply_add(float(left.x), float(first.y), c.y);
    c.x = math::multiply_add(float(left.y), float(second.x), c.x);
    c.y = math::multiply_add(float(left.y), float(second.y), c.y);
  }
  return c;
}

}  // namespace msl

namespace metal {

template <class D, class A, class B, class C>
METAL_FUNC void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                                              const simdgroup_matrix<B, 8, 8>& b, const simdgroup_matrix<C, 8, 8>& c,
                                              uint32_t line = __builtin_LINE()) {
  d.thread_elements() =
      vec<D, 2>(msl::matrix_product(a.thread_elements(), b.thread_elements(), vec<float, 2>(c.thread_elements()), line));
}
template <class D, class A, class B>
METAL_FUNC void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                                   const simdgroup_matrix<B, 8, 8>& b, uint32_t line = __builtin_LINE()) {
  d.thread_elements() =
      vec<D, 2>(msl::matrix_product(a.thread_elements(), b.thread_elements(), vec<float, 2>(0.0f), line));
}
template <class T>
METAL_FUNC simdgroup_matrix<T, 8, 8> operator*(const simdgroup_matrix<T, 8, 8>& a, const simdgroup_matrix<T, 8, 8>& b) {
  simdgroup_matrix<T, 8, 8> result;
  simdgroup_multiply(result, a, b);
  return result;
}

}  // namespace metal

#define MSL_SIMDGROUP_MATRIX(T)                                    \
  using simdgroup_##T##8x8 = metal::simdgroup_matrix<T, 8, 8>;     \
  namespace metal {                                                \
  using ::simdgroup_##T##8x8;                                      \
  }
MSL_SIMDGROUP_MATRIX(float)
MSL_SIMDGROUP_MATRIX(half)
MSL_SIMDGROUP_MATRIX(bfloat)
#undef MSL_SIMDGROUP_MATRIX
