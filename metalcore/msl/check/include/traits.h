// Scalar types and <metal_type_traits>, on Clang's builtins.
#pragma once

#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#pragma OPENCL EXTENSION __cl_clang_function_pointers : enable

using uchar = unsigned char;
using ushort = unsigned short;
using uint = unsigned int;
using ulong = unsigned long;
using int8_t = signed char;
using int16_t = short;
using int32_t = int;
using int64_t = long;
using uint8_t = uchar;
using uint16_t = ushort;
using uint32_t = uint;
using uint64_t = ulong;
using size_t = ulong;
using ptrdiff_t = long;
using intptr_t = long;
using uintptr_t = ulong;
#ifdef __OPENCL_CPP_VERSION__
struct bfloat;
#endif

#define METAL_FUNC inline
#define METAL_CONST const
#define METAL_ALIGN(n) alignas(n)
#define METAL_INTERNAL
#define METAL_PURE

namespace metal {

using ::bfloat; using ::uchar; using ::ushort; using ::uint; using ::ulong; using ::size_t; using ::ptrdiff_t;
using ::int8_t; using ::int16_t; using ::int32_t; using ::int64_t; using ::intptr_t;
using ::uint8_t; using ::uint16_t; using ::uint32_t; using ::uint64_t; using ::uintptr_t;

#ifdef __OPENCL_CPP_VERSION__
template <class T, int N>
struct vec;
#else
template <class T, int N>
using vec = T __attribute__((ext_vector_type(N)));
#endif

template <class T, T v>
struct integral_constant {
  using value_type = T;
  using type = integral_constant;
  static constexpr constant T value = v;
  constexpr operator T() const { return v; }
};
template <bool b>
using bool_constant = integral_constant<bool, b>;
using true_type = bool_constant<true>;
using false_type = bool_constant<false>;

template <bool, class T = void>
struct enable_if {};
template <class T>
struct enable_if<true, T> {
  using type = T;
};
template <bool b, class A, class B>
struct conditional {
  using type = A;
};
template <class A, class B>
struct conditional<false, A, B> {
  using type = B;
};
template <bool b, class T = void>
using enable_if_t = typename enable_if<b, T>::type;
template <bool b, class A, class B>
using conditional_t = typename conditional<b, A, B>::type;

#define MSL_TRANSFORM(name) \
  template <class T>        \
  using name##_t = typename name<T>::type;
#define MSL_REMOVE(name, pattern)                       \
  template <class T> struct name { using type = T; };   \
  template <class T> struct name<pattern> { using type = T; }; \
  MSL_TRANSFORM(name)
MSL_REMOVE(remove_const, const T)
MSL_REMOVE(remove_volatile, volatile T)
#undef MSL_REMOVE
template <class T> struct remove_cv : remove_const<remove_volatile_t<T>> {};
template <class T> struct remove_reference { using type = T; };
template <class T> struct remove_reference<T&> { using type = T; };
template <class T> struct remove_reference<T&&> { using type = T; };
template <class T> struct remove_pointer { using type = T; };
template <class T> struct remove_pointer<T*> { using type = T; };
// An address space is a qualifier of a type. This trait removes it.
template <class T> struct remove_addrspace { using type = T; };
#ifdef __OPENCL_CPP_VERSION__
template <class T> struct remove_addrspace<device T> { using type = T; };
template <class T> struct remove_addrspace<const device T> { using type = const T; };
template <class T> struct remove_addrspace<__global T> { using type = T; };
template <class T> struct remove_addrspace<const __global T> { using type = const T; };
template <class T> struct remove_addrspace<__local T> { using type = T; };
template <class T> struct remove_addrspace<const __local T> { using type = const T; };
template <class T> struct remove_addrspace<__private T> { using type = T; };
template <class T> struct remove_addrspace<const __private T> { using type = const T; };
template <class T> struct remove_addrspace<__generic T> { using type = T; };
template <class T> struct remove_addrspace<const __generic T> { using type = const T; };
#endif
template <class T> struct add_const { using type = const T; };
template <class T> struct add_volatile { using type = volatile T; };
template <class T> struct add_cv { using type = const volatile T; };
template <class T> struct remove_extent { using type = T; };
template <class T> struct remove_extent<T[]> { using type = T; };
template <class T, size_t n> struct remove_extent<T[n]> { using type = T; };
template <class T> struct remove_all_extents { using type = T; };
template <class T, size_t n> struct remove_all_extents<T[n]> : remove_all_extents<T> {};
template <class T> struct underlying_type { using type = __underlying_type(T); };
MSL_TRANSFORM(remove_cv) MSL_TRANSFORM(remove_reference) MSL_TRANSFORM(remove_pointer) MSL_TRANSFORM(remove_addrspace)
MSL_TRANSFORM(add_const) MSL_TRANSFORM(add_volatile) MSL_TRANSFORM(add_cv) MSL_TRANSFORM(remove_extent)
MSL_TRANSFORM(remove_all_extents) MSL_TRANSFORM(underlying_type)
template <class T>
using msl_bare = remove_cv_t<remove_addrspace_t<remove_reference_t<T>>>;
template <class T> struct decay { using type = msl_bare<T>; };
MSL_TRANSFORM(decay)
template <class T>
remove_reference_t<T>&& declval();

template <class A, class B> struct is_same : false_type {};
template <class A> struct is_same<A, A> : true_type {};
template <class A, class B>
constexpr constant bool is_same_v = __is_same(A, B);

#define MSL_TRAIT(name, value_)                        \
  template <class T>                                   \
  struct name : bool_constant<value_> {};              \
  template <class T>                                   \
  constexpr constant bool name##_v = value_;
#define MSL_BARE(T) remove_cv_t<remove_addrspace_t<T>>
MSL_TRAIT(is_integral, __is_integral(MSL_BARE(T)))
MSL_TRAIT(is_floating_point,
          __is_floating_point(MSL_BARE(T)) || __is_same(MSL_BARE(T), bfloat) || __is_same(MSL_BARE(T), half))
MSL_TRAIT(is_arithmetic, is_integral_v<T> || is_floating_point_v<T>)
MSL_TRAIT(is_fundamental, is_arithmetic_v<T> || __is_void(T))
MSL_TRAIT(is_enum, __is_enum(T))
MSL_TRAIT(is_pointer, __is_pointer(T))
MSL_TRAIT(is_scalar, is_arithmetic_v<T> || __is_enum(T) || __is_pointer(T))
MSL_TRAIT(is_signed, is_floating_point_v<T> || __is_signed(MSL_BARE(T)))
MSL_TRAIT(is_unsigned, __is_unsigned(MSL_BARE(T)))
MSL_TRAIT(is_void, __is_void(T))
MSL_TRAIT(is_class, __is_class(T) && !is_arithmetic_v<T>)
MSL_TRAIT(is_union, __is_union(T))
MSL_TRAIT(is_array, __is_array(T))
MSL_TRAIT(is_const, __is_const(T))
MSL_TRAIT(is_volatile, __is_volatile(T))
MSL_TRAIT(is_reference, __is_reference(T))
MSL_TRAIT(is_lvalue_reference, __is_lvalue_reference(T))
MSL_TRAIT(is_rvalue_reference, __is_rvalue_reference(T))
MSL_TRAIT(is_object, __is_object(T))
MSL_TRAIT(is_compound, __is_compound(T))
MSL_TRAIT(is_final, __is_final(T))
MSL_TRAIT(is_pod, __is_pod(T))
MSL_TRAIT(is_literal_type, __is_literal_type(T))
MSL_TRAIT(is_standard_layout, __is_standard_layout(T))
MSL_TRAIT(is_trivial, __is_trivial(T))
MSL_TRAIT(is_trivially_copyable, __is_trivially_copyable(T))
MSL_TRAIT(is_default_constructible, __is_constructible(T))
#undef MSL_TRAIT

#define MSL_RELATION(name, value_)                     \
  template <class A, class B>                          \
  struct name : bool_constant<value_> {};              \
  template <class A, class B>                          \
  constexpr constant bool name##_v = value_;
MSL_RELATION(is_base_of, __is_base_of(A, B))
MSL_RELATION(is_convertible, __is_convertible_to(A, B))
MSL_RELATION(is_assignable, __is_assignable(A, B))
#undef MSL_RELATION
template <class T, class... A> struct is_constructible : bool_constant<__is_constructible(T, A...)> {};
template <class T, class... A>
constexpr constant bool is_constructible_v = __is_constructible(T, A...);

template <class... T> struct conjunction : bool_constant<(T::value && ...)> {};
template <class... T> struct disjunction : bool_constant<(T::value || ...)> {};
template <class T> struct negation : bool_constant<!T::value> {};
template <class... T> constexpr constant bool conjunction_v = (T::value && ...);
template <class... T> constexpr constant bool disjunction_v = (T::value || ...);
template <class T> constexpr constant bool negation_v = !T::value;
template <class... T> struct _disjunction : disjunction<T...> {};
template <class... T> struct _conjunction : conjunction<T...> {};

template <class T> struct make_unsigned { using type = T; };
template <class T> struct make_signed { using type = T; };
#define MSL_SIGNS(S, U)                                         \
  template <> struct make_unsigned<S> { using type = U; };      \
  template <> struct make_signed<U> { using type = S; };        \
  template <int N> struct make_unsigned<vec<S, N>> { using type = vec<U, N>; }; \
  template <int N> struct make_signed<vec<U, N>> { using type = vec<S, N>; };
MSL_SIGNS(char, uchar) MSL_SIGNS(short, ushort) MSL_SIGNS(int, uint) MSL_SIGNS(long, ulong)
#undef MSL_SIGNS
MSL_TRANSFORM(make_unsigned) MSL_TRANSFORM(make_signed)

template <class T, class U = T> struct common_type { using type = decltype(true ? T() : U()); };
template <class... T>
using common_type_t = typename common_type<T...>::type;

template <class T> struct is_vector : false_type {};
template <class T, int N> struct is_vector<vec<T, N>> : true_type {};
template <class T>
constexpr constant bool is_vector_v = is_vector<T>::value;
template <class T> struct make_scalar { using type = T; };
template <class T, int N> struct make_scalar<vec<T, N>> { using type = T; };
MSL_TRANSFORM(make_scalar)
template <class T> struct vec_elements : integral_constant<int, 1> {};
template <class T, int N> struct vec_elements<vec<T, N>> : integral_constant<int, N> {};
template <class T> struct __is_valid_simdgroup_type : bool_constant<sizeof(T) <= 4 && is_scalar_v<T>> {};
template <class T, int N> struct __is_valid_simdgroup_type<vec<T, N>> : __is_valid_simdgroup_type<T> {};

template <class T>
using uniform = T;
template <class T>
constexpr T make_uniform(T value) {
  return value;
}
template <class T>
constexpr void swap(thread T& a, thread T& b) {
  T t = a;
  a = b;
  b = t;
}

}  // namespace metal

#ifdef __OPENCL_CPP_VERSION__
// A bfloat converts to a float implicitly, and an integer to a bfloat; a float converts to a bfloat explicitly only.
struct alignas(2) bfloat {
  ushort bits;
  bfloat() = default;
  template <class S, metal::enable_if_t<metal::is_integral_v<S>, int> = 0>
  constexpr bfloat(S) : bits() {}
  template <class S, metal::enable_if_t<metal::is_scalar_v<S> && !metal::is_integral_v<S>, int> = 0>
  constexpr explicit bfloat(S) : bits() {}
  template <class C, metal::enable_if_t<
                         __is_class(C) && !metal::is_same_v<C, bfloat> && metal::is_convertible_v<C, float>, int> = 0>
  constexpr bfloat(C) : bits() {}
  constexpr operator float() const { return 0; }
#define MSL_OPERATOR(op)                                                                       \
  template <class S, class = metal::enable_if_t<metal::is_integral_v<S> || metal::is_same_v<S, bfloat>>> \
  bfloat& operator op(S);
  MSL_OPERATOR(+=) MSL_OPERATOR(-=) MSL_OPERATOR(*=) MSL_OPERATOR(/=)
#undef MSL_OPERATOR
  bfloat& operator++();
  bfloat& operator--();
};
#define MSL_OPERATOR(op)                                                   \
  constexpr bfloat operator op(bfloat, bfloat) { return bfloat(0); }        \
  template <class S, class = metal::enable_if_t<metal::is_integral_v<S>>>  \
  constexpr bfloat operator op(bfloat, S) { return bfloat(0); }             \
  template <class S, class = metal::enable_if_t<metal::is_integral_v<S>>>  \
  constexpr bfloat operator op(S, bfloat) { return bfloat(0); }
MSL_OPERATOR(+) MSL_OPERATOR(-) MSL_OPERATOR(*) MSL_OPERATOR(/)
#undef MSL_OPERATOR
constexpr bfloat operator-(bfloat) { return bfloat(0); }
constexpr bfloat operator+(bfloat) { return bfloat(0); }
#endif
