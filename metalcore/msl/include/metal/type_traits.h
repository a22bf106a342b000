// MSL's type traits. They are templates of namespace metal, so that a program may specialize them, and they know half,
// bfloat and vectors.
#pragma once

#include "metal/values.h"

namespace metal {

template <class T, T v>
struct integral_constant : std::integral_constant<T, v> {};
using true_type = std::true_type;
using false_type = std::false_type;
template <bool b>
using bool_constant = std::bool_constant<b>;

using std::add_const;
using std::add_const_t;
using std::add_cv;
using std::add_cv_t;
using std::add_lvalue_reference;
using std::add_lvalue_reference_t;
using std::add_pointer;
using std::add_pointer_t;
using std::add_rvalue_reference;
using std::add_rvalue_reference_t;
using std::add_volatile;
using std::add_volatile_t;
using std::conditional;
using std::conditional_t;
using std::conjunction;
using std::conjunction_v;
using std::decay;
using std::decay_t;
using std::declval;
using std::disjunction;
using std::disjunction_v;
using std::enable_if;
using std::enable_if_t;
using std::extent;
using std::extent_v;
using std::make_signed;
using std::make_signed_t;
using std::make_unsigned;
using std::make_unsigned_t;
using std::negation;
using std::negation_v;
using std::rank;
using std::rank_v;
using std::remove_all_extents;
using std::remove_all_extents_t;
using std::remove_const;
using std::remove_const_t;
using std::remove_cv;
using std::remove_cv_t;
using std::remove_extent;
using std::remove_extent_t;
using std::remove_pointer;
using std::remove_pointer_t;
using std::remove_reference;
using std::remove_reference_t;
using std::remove_volatile;
using std::remove_volatile_t;
using std::underlying_type;
using std::underlying_type_t;

#define MSL_TRAIT(name)                             \
  template <class T>                                \
  struct name : std::bool_constant<std::name<T>::value> {}; \
  template <class T>                                \
  constexpr bool name##_v = name<T>::value;
MSL_TRAIT(is_abstract) MSL_TRAIT(is_array) MSL_TRAIT(is_class) MSL_TRAIT(is_const) MSL_TRAIT(is_copy_constructible)
MSL_TRAIT(is_default_constructible) MSL_TRAIT(is_enum) MSL_TRAIT(is_final)
MSL_TRAIT(is_function) MSL_TRAIT(is_integral) MSL_TRAIT(is_lvalue_reference) MSL_TRAIT(is_pointer)
MSL_TRAIT(is_polymorphic) MSL_TRAIT(is_reference) MSL_TRAIT(is_rvalue_reference) MSL_TRAIT(is_standard_layout)
MSL_TRAIT(is_trivial) MSL_TRAIT(is_trivially_copyable) MSL_TRAIT(is_trivially_default_constructible)
MSL_TRAIT(is_trivially_destructible) MSL_TRAIT(is_union) MSL_TRAIT(is_unsigned) MSL_TRAIT(is_void)
MSL_TRAIT(is_volatile) MSL_TRAIT(is_pod) MSL_TRAIT(is_move_constructible) MSL_TRAIT(is_literal_type)
MSL_TRAIT(is_null_pointer) MSL_TRAIT(is_compound)
#undef MSL_TRAIT

// Traits that count half and bfloat as numbers.
#define MSL_NUMBER_TRAIT(name, also)                                                                                 \
  template <class T>                                                                                                 \
  struct name                                                                                                        \
      : std::bool_constant<std::name<T>::value || (also && msl::is_small_float<std::remove_cv_t<T>>::value)> {};     \
  template <class T>                                                                                                 \
  constexpr bool name##_v = name<T>::value;
MSL_NUMBER_TRAIT(is_arithmetic, true) MSL_NUMBER_TRAIT(is_floating_point, true) MSL_NUMBER_TRAIT(is_fundamental, true)
MSL_NUMBER_TRAIT(is_scalar, true) MSL_NUMBER_TRAIT(is_signed, true) MSL_NUMBER_TRAIT(is_object, false)
#undef MSL_NUMBER_TRAIT

#define MSL_RELATION(name)                               \
  template <class T, class U>                            \
  struct name : std::bool_constant<std::name<T, U>::value> {}; \
  template <class T, class U>                            \
  constexpr bool name##_v = name<T, U>::value;
MSL_RELATION(is_assignable) MSL_RELATION(is_base_of) MSL_RELATION(is_convertible) MSL_RELATION(is_same)
#undef MSL_RELATION

template <class T>
constexpr bool spaces_are_known = false;

}  // namespace metal

namespace msl {

// A pointer, with the space that it points into, in the arguments of a template that is specialized for address spaces.
struct in_device {};
struct in_constant {};
struct in_threadgroup {};
struct in_thread {};
template <class Space, class Pointer>
struct spaced {};

template <class T>
struct unknown_space {
  static_assert(metal::spaces_are_known<T>,
                "the address space of this pointer is not known here: write it in the template's argument");
  static constexpr bool value = false;
};

}  // namespace msl

namespace metal {

// A pointer has the same type wherever it points, so whether two pointer types are the same in MSL is not known.
template <class T>
struct is_same<T*, T*> : msl::unknown_space<T> {};
template <class Space, class T>
struct is_same<msl::spaced<Space, T*>, T*> : msl::unknown_space<T> {};
template <class Space, class T>
struct is_same<T*, msl::spaced<Space, T*>> : msl::unknown_space<T> {};

// Names of Apple's headers that published programs use.
template <class... T>
struct _disjunction : std::disjunction<T...> {};
template <class... T>
struct _conjunction : std::conjunction<T...> {};
template <class T>
using remove_addrspace_t = T;

// A value that is the same for all threads. No code on the host depends on that.
template <class T>
using uniform = T;
template <class T>
METAL_FUNC constexpr T make_uniform(T value) {
  return value;
}

template <class T, class... Arguments>
struct is_constructible : std::is_constructible<T, Arguments...> {};
template <class T, class... Arguments>
constexpr bool is_constructible_v = is_constructible<T, Arguments...>::value;

template <class... T>
struct common_type {
  using type = msl::common_t<T...>;
};
template <class... T>
using common_type_t = typename common_type<T...>::type;

template <class T>
struct is_vector : std::false_type {};
template <class T, int N>
struct is_vector<vec<T, N>> : std::true_type {};
template <class T, int N>
struct is_vector<packed_vec<T, N>> : std::true_type {};
template <class T>
constexpr bool is_vector_v = is_vector<T>::value;

// The element type of a vector, or the scalar type itself.
template <class T>
struct make_scalar {
  using type = msl::element_t<T>;
};
template <class T>
using make_scalar_t = typename make_scalar<T>::type;

// Names of Apple's headers that published programs use: the number of a vector's elements (0 for a scalar), and whether
// Apple's simd_ functions accept a type.
template <class T>
struct vec_elements : std::integral_constant<int, 0> {};
template <class T, int N>
struct vec_elements<vec<T, N>> : std::integral_constant<int, N> {};
template <class T, int N>
struct vec_elements<packed_vec<T, N>> : std::integral_constant<int, N> {};
template <class T>
struct __is_valid_simdgroup_type
    : std::bool_constant<sizeof(T) <= 4 && !std::is_same_v<T, bool> && !std::is_same_v<T, bfloat> &&
                         msl::is_scalar_v<T>> {};
template <class T, int N>
struct __is_valid_simdgroup_type<vec<T, N>> : __is_valid_simdgroup_type<T> {};

template <class T>
METAL_FUNC constexpr std::remove_reference_t<T>&& move(T&& value) {
  return static_cast<std::remove_reference_t<T>&&>(value);
}
template <class T>
METAL_FUNC constexpr void swap(T& a, T& b) {
  T old = static_cast<T&&>(a);
  a = static_cast<T&&>(b);
  b = static_cast<T&&>(old);
}

}  // namespace metal
