// The parts of <type_traits>, <cstdint> and <cstddef> that metal/ uses: NVRTC does not have them. The names are inside
// the program's namespace, so they meet no other std.
#pragma once

using size_t = ::size_t;
using ptrdiff_t = long;
using int8_t = signed char;
using int16_t = short;
using int32_t = int;
using int64_t = long;
using intptr_t = long;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long;
using uintptr_t = unsigned long;

// The names that end in _v are concepts instead of variables: NVRTC would emit every variable that is instantiated.
namespace std {

template <class T, T v>
struct integral_constant {
  static constexpr T value = v;
  using value_type = T;
  using type = integral_constant;
  __device__ constexpr operator T() const { return v; }
  __device__ constexpr T operator()() const { return v; }
};
template <bool b>
using bool_constant = integral_constant<bool, b>;
using true_type = bool_constant<true>;
using false_type = bool_constant<false>;

template <class...>
using void_t = void;

template <bool b, class A, class B>
struct conditional { using type = A; };
template <class A, class B>
struct conditional<false, A, B> { using type = B; };
template <bool b, class A, class B>
using conditional_t = typename conditional<b, A, B>::type;

template <bool b, class T = void>
struct enable_if {};
template <class T>
struct enable_if<true, T> { using type = T; };
template <bool b, class T = void>
using enable_if_t = typename enable_if<b, T>::type;

template <class...>
struct conjunction : true_type {};
template <class A>
struct conjunction<A> : A {};
template <class A, class... Rest>
struct conjunction<A, Rest...> : conditional_t<bool(A::value), conjunction<Rest...>, A> {};
template <class...>
struct disjunction : false_type {};
template <class A>
struct disjunction<A> : A {};
template <class A, class... Rest>
struct disjunction<A, Rest...> : conditional_t<bool(A::value), A, disjunction<Rest...>> {};
template <class A>
struct negation : bool_constant<!bool(A::value)> {};
template <class... A>
concept conjunction_v = bool(conjunction<A...>::value);
template <class... A>
concept disjunction_v = bool(disjunction<A...>::value);
template <class A>
concept negation_v = bool(negation<A>::value);

// Traits that make a type from a type: each has its plain case and the patterns that change.
#define MSL_TRANSFORM(name)    \
  template <class T>           \
  using name##_t = typename name<T>::type;

template <class T> struct remove_const { using type = T; };
template <class T> struct remove_const<const T> { using type = T; };
template <class T> struct remove_volatile { using type = T; };
template <class T> struct remove_volatile<volatile T> { using type = T; };
template <class T> struct remove_cv { using type = T; };
template <class T> struct remove_cv<const T> { using type = T; };
template <class T> struct remove_cv<volatile T> { using type = T; };
template <class T> struct remove_cv<const volatile T> { using type = T; };
template <class T> struct remove_reference { using type = T; };
template <class T> struct remove_reference<T&> { using type = T; };
template <class T> struct remove_reference<T&&> { using type = T; };
template <class T> struct remove_pointer { using type = T; };
template <class T> struct remove_pointer<T*> { using type = T; };
template <class T> struct remove_pointer<T* const> { using type = T; };
template <class T> struct remove_pointer<T* volatile> { using type = T; };
template <class T> struct remove_pointer<T* const volatile> { using type = T; };
template <class T> struct remove_extent { using type = T; };
template <class T> struct remove_extent<T[]> { using type = T; };
template <class T, size_t n> struct remove_extent<T[n]> { using type = T; };
template <class T> struct remove_all_extents { using type = T; };
template <class T> struct remove_all_extents<T[]> : remove_all_extents<T> {};
template <class T, size_t n> struct remove_all_extents<T[n]> : remove_all_extents<T> {};
template <class T> struct add_const { using type = const T; };
template <class T> struct add_volatile { using type = volatile T; };
template <class T> struct add_cv { using type = const volatile T; };
MSL_TRANSFORM(remove_const) MSL_TRANSFORM(remove_volatile) MSL_TRANSFORM(remove_cv) MSL_TRANSFORM(remove_reference)
MSL_TRANSFORM(remove_pointer) MSL_TRANSFORM(remove_extent) MSL_TRANSFORM(remove_all_extents) MSL_TRANSFORM(add_const)
MSL_TRANSFORM(add_volatile) MSL_TRANSFORM(add_cv)

// A reference or a pointer to T, where C++ allows one.
template <class T, class = void> struct add_lvalue_reference { using type = T; };
template <class T> struct add_lvalue_reference<T, void_t<T&>> { using type = T&; };
template <class T, class = void> struct add_rvalue_reference { using type = T; };
template <class T> struct add_rvalue_reference<T, void_t<T&&>> { using type = T&&; };
template <class T, class = void> struct add_pointer { using type = T; };
template <class T> struct add_pointer<T, void_t<remove_reference_t<T>*>> { using type = remove_reference_t<T>*; };
MSL_TRANSFORM(add_lvalue_reference) MSL_TRANSFORM(add_rvalue_reference) MSL_TRANSFORM(add_pointer)

template <class T>
add_rvalue_reference_t<T> declval();

#define MSL_RELATION(name)                                \
  template <class A, class B>                             \
  concept name##_v = name<A, B>::value;
template <class A, class B> struct is_same : false_type {};
template <class A> struct is_same<A, A> : true_type {};
template <class A, class B> struct is_base_of : bool_constant<__is_base_of(A, B)> {};
template <class A, class B> struct is_convertible : bool_constant<__is_convertible_to(A, B)> {};
template <class A, class B> struct is_assignable : bool_constant<__is_assignable(A, B)> {};
MSL_RELATION(is_same) MSL_RELATION(is_base_of) MSL_RELATION(is_convertible) MSL_RELATION(is_assignable)
#undef MSL_RELATION
template <class T, class... A> struct is_constructible : bool_constant<__is_constructible(T, A...)> {};
template <class T, class... A>
concept is_constructible_v = is_constructible<T, A...>::value;

// Traits that ask one question about a type.
#define MSL_TRAIT(name, ...)                             \
  template <class T>                                     \
  struct name : bool_constant<bool(__VA_ARGS__)> {};     \
  template <class T>                                     \
  concept name##_v = name<T>::value;
#define MSL_ASKED(name) MSL_TRAIT(name, __##name(T))
MSL_ASKED(is_abstract) MSL_ASKED(is_class) MSL_ASKED(is_enum) MSL_ASKED(is_final) MSL_ASKED(is_function)
MSL_ASKED(is_literal_type) MSL_ASKED(is_pod) MSL_ASKED(is_polymorphic) MSL_ASKED(is_standard_layout)
MSL_ASKED(is_trivial) MSL_ASKED(is_trivially_copyable) MSL_ASKED(is_trivially_destructible) MSL_ASKED(is_union)
#undef MSL_ASKED

template <class T, class... Others>
concept is_one_of = (is_same<remove_cv_t<T>, Others>::value || ...);
MSL_TRAIT(is_void, is_one_of<T, void>)
MSL_TRAIT(is_null_pointer, is_one_of<T, decltype(nullptr)>)
MSL_TRAIT(is_integral, is_one_of<T, bool, char, signed char, unsigned char, wchar_t, char16_t, char32_t, short,
                                 unsigned short, int, unsigned, long, unsigned long, long long, unsigned long long,
                                 __int128, unsigned __int128>)
MSL_TRAIT(is_floating_point, is_one_of<T, float, double>)
MSL_TRAIT(is_arithmetic, is_integral_v<T> || is_floating_point_v<T>)
MSL_TRAIT(is_fundamental, is_arithmetic_v<T> || is_void_v<T> || is_null_pointer_v<T>)
MSL_TRAIT(is_compound, !is_fundamental_v<T>)
MSL_TRAIT(is_lvalue_reference, false)
template <class T> struct is_lvalue_reference<T&> : true_type {};
MSL_TRAIT(is_rvalue_reference, false)
template <class T> struct is_rvalue_reference<T&&> : true_type {};
MSL_TRAIT(is_reference, is_lvalue_reference<T>::value || is_rvalue_reference<T>::value)
MSL_TRAIT(is_array, false)
template <class T> struct is_array<T[]> : true_type {};
template <class T, size_t n> struct is_array<T[n]> : true_type {};
MSL_TRAIT(is_pointer, !is_same_v<remove_pointer_t<T>, T>)
MSL_TRAIT(is_const, !is_same_v<remove_const_t<T>, T>)
MSL_TRAIT(is_volatile, !is_same_v<remove_volatile_t<T>, T>)
MSL_TRAIT(is_scalar, is_arithmetic_v<T> || is_enum_v<T> || is_pointer_v<T> || is_null_pointer_v<T>)
MSL_TRAIT(is_object, !is_function_v<T> && !is_reference_v<T> && !is_void_v<T>)
MSL_TRAIT(is_copy_constructible, __is_constructible(T, add_lvalue_reference_t<const T>))
MSL_TRAIT(is_move_constructible, __is_constructible(T, add_rvalue_reference_t<T>))
MSL_TRAIT(is_default_constructible, __is_constructible(T))
MSL_TRAIT(is_trivially_default_constructible, __is_trivially_constructible(T))

template <class T, bool = is_arithmetic_v<T>>
struct is_signed : bool_constant<(T(-1) < T(0))> {};
template <class T>
struct is_signed<T, false> : false_type {};
template <class T>
concept is_signed_v = is_signed<T>::value;
MSL_TRAIT(is_unsigned, is_arithmetic_v<T> && !is_signed_v<T>)
#undef MSL_TRAIT

template <class T> struct rank : integral_constant<size_t, 0> {};
template <class T> struct rank<T[]> : integral_constant<size_t, rank<T>::value + 1> {};
template <class T, size_t n> struct rank<T[n]> : integral_constant<size_t, rank<T>::value + 1> {};
template <class T>
constexpr size_t rank_v = rank<T>::value;
template <class T, unsigned i = 0> struct extent : integral_constant<size_t, 0> {};
template <class T, size_t n> struct extent<T[n], 0> : integral_constant<size_t, n> {};
template <class T, unsigned i> struct extent<T[], i> : extent<T, i - 1> {};
template <class T, size_t n, unsigned i> struct extent<T[n], i> : extent<T, i - 1> {};
template <class T, unsigned i = 0>
constexpr size_t extent_v = extent<T, i>::value;

template <class T>
struct decay {
  using U = remove_reference_t<T>;
  using type = conditional_t<is_array_v<U>, remove_extent_t<U>*,
                             conditional_t<is_function_v<U>, typename add_pointer<U>::type, remove_cv_t<U>>>;
};
template <class T, bool = is_enum_v<T>>
struct underlying_type {};
template <class T>
struct underlying_type<T, true> { using type = __underlying_type(T); };
MSL_TRANSFORM(decay) MSL_TRANSFORM(underlying_type)

// The integer type of this size, with or without a sign.
template <size_t size, bool is_signed>
struct integer_of;
template <> struct integer_of<1, true> { using type = signed char; };
template <> struct integer_of<1, false> { using type = unsigned char; };
template <> struct integer_of<2, true> { using type = short; };
template <> struct integer_of<2, false> { using type = unsigned short; };
template <> struct integer_of<4, true> { using type = int; };
template <> struct integer_of<4, false> { using type = unsigned; };
template <> struct integer_of<8, true> { using type = long; };
template <> struct integer_of<8, false> { using type = unsigned long; };
template <class T> struct make_signed : integer_of<sizeof(T), true> {};
template <class T> struct make_unsigned : integer_of<sizeof(T), false> {};
MSL_TRANSFORM(make_signed) MSL_TRANSFORM(make_unsigned)
#undef MSL_TRANSFORM

}  // namespace std
