// Functions across a simdgroup and a quadgroup, and simdgroup_matrix.
#pragma once

namespace msl {

template <class T>
struct lane_value : metal::bool_constant<metal::is_arithmetic_v<T> && sizeof(T) <= 4 && !metal::is_same_v<T, bool>> {};
template <class T, int N>
struct lane_value<metal::vec<T, N>> : lane_value<T> {};
// Lanes exchange numbers of at most 32 bits, and vectors of them.
template <class T>
using lane = metal::enable_if_t<lane_value<T>::value, T>;
template <class T>
using integer_lane = metal::enable_if_t<lane_value<T>::value && metal::is_integral_v<metal::make_scalar_t<T>>, T>;

struct Vote {
  using vote_t = ulong;
  constexpr explicit Vote(vote_t) {}
  constexpr explicit operator vote_t() const { return 0; }
  bool all() const;
  bool any() const;
};

}  // namespace msl

namespace metal {

using simd_vote = msl::Vote;
using quad_vote = msl::Vote;

#define MSL_REDUCTION(name) \
  template <class T>        \
  msl::lane<T> name(T);
#define MSL_BITWISE(name) \
  template <class T>      \
  msl::integer_lane<T> name(T);
#define MSL_SHUFFLE(name) \
  template <class T>      \
  msl::lane<T> name(T, ushort);
#define MSL_FILL(name)                    \
  template <class T>                      \
  msl::lane<T> name(T, T, ushort);        \
  template <class T>                      \
  msl::lane<T> name(T, T, ushort, ushort);
#define MSL_GROUP(prefix)                                                                                     \
  MSL_REDUCTION(prefix##_sum) MSL_REDUCTION(prefix##_product) MSL_REDUCTION(prefix##_min)                     \
  MSL_REDUCTION(prefix##_max) MSL_BITWISE(prefix##_and) MSL_BITWISE(prefix##_or) MSL_BITWISE(prefix##_xor) \
  MSL_REDUCTION(prefix##_prefix_inclusive_sum) MSL_REDUCTION(prefix##_prefix_exclusive_sum)                   \
  MSL_REDUCTION(prefix##_prefix_inclusive_product) MSL_REDUCTION(prefix##_prefix_exclusive_product)           \
  MSL_REDUCTION(prefix##_broadcast_first) MSL_SHUFFLE(prefix##_broadcast) MSL_SHUFFLE(prefix##_shuffle)       \
  MSL_SHUFFLE(prefix##_shuffle_up) MSL_SHUFFLE(prefix##_shuffle_down) MSL_SHUFFLE(prefix##_shuffle_xor)       \
  MSL_SHUFFLE(prefix##_shuffle_rotate_up) MSL_SHUFFLE(prefix##_shuffle_rotate_down)                           \
  MSL_FILL(prefix##_shuffle_and_fill_up) MSL_FILL(prefix##_shuffle_and_fill_down)                             \
  msl::Vote prefix##_ballot(bool);                                                                            \
  msl::Vote prefix##_active_threads_mask();                                                                   \
  bool prefix##_all(bool);                                                                                    \
  bool prefix##_any(bool);                                                                                    \
  bool prefix##_is_first();                                                                                   \
  bool prefix##_is_helper_thread();
MSL_GROUP(simd)
MSL_GROUP(quad)
#undef MSL_GROUP
#undef MSL_FILL
#undef MSL_SHUFFLE
#undef MSL_BITWISE
#undef MSL_REDUCTION

template <class T, int Columns, int Rows>
struct simdgroup_matrix {
  static_assert(is_floating_point_v<T> && Columns == 8 && Rows == 8,
                "simdgroup_matrix is 8x8 of float, half or bfloat");
  using storage_type = vec<T, 2>;
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T);
  __private vec<T, 2>& thread_elements();
  const __private vec<T, 2>& thread_elements() const;
  storage_type elements;
};
template <class T, int C = 8, int R = 8>
simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(T);
template <class T, int C = 8, int R = 8>
simdgroup_matrix<T, C, R> make_diagonal_simdgroup_matrix(T);

#define MSL_MATRIX_MEMORY(space)                                                                                \
  template <class T, int C, int R>                                                                              \
  void simdgroup_load(__private simdgroup_matrix<T, C, R>&, const space T*, ulong = C, ulong2 = ulong2(0),      \
                      bool = false);                                                                            \
  template <class T, int C, int R>                                                                              \
  void simdgroup_store(simdgroup_matrix<T, C, R>, space T*, ulong = C, ulong2 = ulong2(0), bool = false);
MSL_MATRIX_MEMORY(device)
#ifdef __OPENCL_CPP_VERSION__
MSL_MATRIX_MEMORY(threadgroup)
#endif
#undef MSL_MATRIX_MEMORY

template <class D, class A, class B, class E, int C, int R>
void simdgroup_multiply_accumulate(__private simdgroup_matrix<D, C, R>&, simdgroup_matrix<A, C, R>,
                                   simdgroup_matrix<B, C, R>, simdgroup_matrix<E, C, R>);
template <class D, class A, class B, int C, int R>
void simdgroup_multiply(__private simdgroup_matrix<D, C, R>&, simdgroup_matrix<A, C, R>, simdgroup_matrix<B, C, R>);
template <class T, int C, int R>
simdgroup_matrix<T, C, R> operator*(simdgroup_matrix<T, C, R>, simdgroup_matrix<T, C, R>);

}  // namespace metal

#define MSL_SIMDGROUP_MATRIX(T)                                \
  using simdgroup_##T##8x8 = metal::simdgroup_matrix<T, 8, 8>; \
  namespace metal {                                            \
  using ::simdgroup_##T##8x8;                                  \
  }
MSL_SIMDGROUP_MATRIX(float) MSL_SIMDGROUP_MATRIX(half) MSL_SIMDGROUP_MATRIX(bfloat)
#undef MSL_SIMDGROUP_MATRIX

namespace msl {

// The type of a conditional expression whose arms have the types A and B.
template <class A, class B>
struct chosen {
  using type = decltype(true ? A() : B());
};
template <class A>
struct chosen<A, A> {
  using type = A;
};
template <class B>
struct chosen<bfloat, B> {
  using type = metal::conditional_t<metal::is_integral_v<B>, bfloat, decltype(float() + B())>;
};
template <class A>
struct chosen<A, bfloat> : chosen<bfloat, A> {};
template <>
struct chosen<bfloat, bfloat> {
  using type = bfloat;
};
template <class A, class B, class R = typename chosen<A, B>::type>
constexpr R choose(bool condition, A a, B b) {
  return condition ? R(a) : R(b);
}

// Stands for a variable in threadgroup memory. The check reads its size from the function's last template argument.
template <class T, int site, int alignment = 1, ulong bytes = sizeof(T)>
__local T& threadgroup_variable() {  // it has a body, since T may be a type without linkage
  static_assert(__is_trivially_constructible(metal::remove_addrspace_t<metal::remove_all_extents_t<T>>),
                "the type of a threadgroup variable must have a trivial default constructor");
  return *(__local T*)nullptr;
}
template <class T>
struct initial {
  T value;
};
#ifdef __OPENCL_CPP_VERSION__
template <class T>
struct initial<__local T> : initial<T> {};
#endif
template <class T, class V>
void initialize_threadgroup(__local T&, initial<V>);

// What a method returns of an object in device.
template <class T>
device T& in_device(__global T&);
template <class T>
device T* in_device(__global T*);

// A string is in the constant address space.
template <ulong N>
const __global char (&literal(const __constant char (&)[N]))[N];

}  // namespace msl
