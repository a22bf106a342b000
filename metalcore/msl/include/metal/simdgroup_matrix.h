// simdgroup_matrix<T, 8, 8>: a matrix that is spread over the 32 lanes of a simdgroup. Each lane has two neighbouring
// elements of a row, which are the same as on Apple's GPUs: programs rely on it through thread_elements().
#pragma once

#include "metal/simdgroup.h"
#include "target/matrix_product.h"

namespace metal {

template <class T, int Cols, int Rows = Cols>
struct simdgroup_matrix {
  static_assert(Cols == 8 && Rows == 8, "simdgroup_matrix is 8 by 8");
  using element_type = T;
  using storage_type = vec<T, 2>;

  simdgroup_matrix() = default;
  // The scalar stands on the diagonal, and zero elsewhere.
  METAL_FUNC explicit simdgroup_matrix(T diagonal) {
    msl::MatrixPlace place = msl::place_of_lane();
    elements =
        storage_type(place.row == place.column ? diagonal : T(0), place.row == place.column + 1 ? diagonal : T(0));
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
  msl::MatrixPlace place = msl::place_of_lane();
  source += origin.y * elements_per_row + origin.x;
  ulong step = transposed ? elements_per_row : 1;
  source += transposed ? place.column * elements_per_row + place.row : place.row * elements_per_row + place.column;
  matrix.thread_elements() = vec<T, 2>(source[0], source[step]);
}
template <class T>
METAL_FUNC void simdgroup_store(const simdgroup_matrix<T, 8, 8>& matrix, T* target, ulong elements_per_row = 8,
                                ulong2 origin = 0, bool transposed = false) {
  msl::MatrixPlace place = msl::place_of_lane();
  target += origin.y * elements_per_row + origin.x;
  ulong step = transposed ? elements_per_row : 1;
  target += transposed ? place.column * elements_per_row + place.row : place.row * elements_per_row + place.column;
  target[0] = matrix.thread_elements().x;
  target[step] = matrix.thread_elements().y;
}

template <class D, class A, class B, class C>
METAL_FUNC void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                                              const simdgroup_matrix<B, 8, 8>& b, const simdgroup_matrix<C, 8, 8>& c,
                                              uint32_t line = __builtin_LINE()) {
  d.thread_elements() =
      vec<D, 2>(msl::matrix_product(a.thread_elements(), b.thread_elements(), vec<float, 2>(c.thread_elements()),
                                    line));
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
  using MSL_ROOT::simdgroup_##T##8x8;                                      \
  }
MSL_SIMDGROUP_MATRIX(float)
MSL_SIMDGROUP_MATRIX(half)
MSL_SIMDGROUP_MATRIX(bfloat)
#undef MSL_SIMDGROUP_MATRIX
