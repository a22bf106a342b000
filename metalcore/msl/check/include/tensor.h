// Declarations of <metal_tensor>, <metal_cooperative_tensor> and mpp::tensor_ops. Only types matter here.
#pragma once

#include "prelude.h"

#define MSL_CONSTANT const __global  // the second reading defines __global as nothing

namespace metal {

constexpr MSL_CONSTANT size_t dynamic_extent = size_t(-1);

template <class I, size_t... E>
struct extents {
  using index_type = I;
  using size_type = size_t;
  using rank_type = size_t;
  constexpr extents() {}
  template <class... T, class = enable_if_t<(sizeof...(T) > 0) && (is_convertible_v<T, I> && ...)>>
  constexpr explicit extents(T...) {}
  template <class T, size_t N>
  constexpr extents(array<T, N>) {}
  template <class T, size_t... Others>
  constexpr extents(extents<T, Others...>) {}
  static constexpr size_t rank() { return sizeof...(E); }
  static constexpr size_t rank_dynamic() { return ((E == size_t(-1) ? 1 : 0) + ... + 0); }
  static constexpr size_t static_extent(size_t) { return 0; }
  constexpr I extent(size_t) const { return I(); }
};

}  // namespace metal

namespace msl {

template <class I, size_t n, size_t... E>
struct dynamic_extents : dynamic_extents<I, n - 1, size_t(-1), E...> {};
template <class I, size_t... E>
struct dynamic_extents<I, 0, E...> {
  using type = metal::extents<I, E...>;
};

// An element's index, which converts to an array.
template <class I, size_t N>
struct index {
  I operator[](ulong) const;
  operator metal::array<I, N>() const;
};

}  // namespace msl

namespace metal {

template <class I, size_t Rank>
using dextents = typename msl::dynamic_extents<I, Rank>::type;

struct tensor_handle {};
struct tensor_inline {};
struct tensor_offset {};

struct int2b_format {};
struct uint2b_format {};
struct int4b_format {};
struct uint4b_format {};
struct metal_fp4_e2m1_format {};
struct metal_fp8_e4m3_format {};
struct metal_fp8_e5m2_format {};
struct metal_fp8_ue8m0_format {};
struct tensor_plane_scales {};
template <class Plane, class Scale, size_t inner, size_t outer = 1>
struct tensor_blockwise {
  template <class Bytes>
  explicit constexpr tensor_blockwise(Bytes) {}
};

}  // namespace metal

namespace msl {

// Formats that a program gives as bytes.
template <class T>
struct is_format {
  static constexpr bool value = false;
};
#define MSL_FORMAT(name)               \
  template <>                          \
  struct is_format<metal::name> {      \
    static constexpr bool value = true; \
  };
MSL_FORMAT(int2b_format)
MSL_FORMAT(uint2b_format)
MSL_FORMAT(int4b_format)
MSL_FORMAT(uint4b_format)
MSL_FORMAT(metal_fp4_e2m1_format)
MSL_FORMAT(metal_fp8_e4m3_format)
MSL_FORMAT(metal_fp8_e5m2_format)
#undef MSL_FORMAT

}  // namespace msl

namespace metal {

template <class T, class E, class Descriptor = tensor_handle, class... Tags>
struct tensor {
  using element_type = T;
  using value_type = msl_bare<T>;
  using extents_type = E;
  using index_type = typename E::index_type;
  using size_type = typename E::size_type;
  using rank_type = size_t;
  using reference = T&;
  using data_handle_type = T*;
  tensor() = default;
  tensor(T*, E) {}
  template <class S, size_t N>
  tensor(T*, E, array<S, N>) {}
  template <class Bytes, class = enable_if_t<sizeof(Bytes) && msl::is_format<msl_bare<T>>::value>>
  tensor(Bytes, E) {}
  template <class Bytes, class S, size_t N, class... Scales,
            class = enable_if_t<sizeof(Bytes) && msl::is_format<msl_bare<T>>::value>>
  tensor(Bytes, E, array<S, N>, Scales...) {}
  static constexpr size_t get_rank() { return E::rank(); }
  static constexpr size_t get_rank_dynamic() { return E::rank_dynamic(); }
  static constexpr size_t get_static_extent(size_t i) { return E::static_extent(i); }
  E extents() const;
  index_type get_extent(size_t) const;
  index_type get_stride(size_t) const;
  template <class I>
  T& operator[](array<I, E::rank()>) const;
  template <class I>
  T& operator[](msl::index<I, E::rank()>) const;
  template <class I, class = enable_if_t<is_integral_v<I> && E::rank() == 1>>
  T& operator[](I) const;
  template <class... I, class = enable_if_t<sizeof...(I) == E::rank()>>
  tensor<T, dextents<index_type, E::rank()>, Descriptor> slice(I...) const;
  template <size_t First, size_t... Parts, class... I, class = enable_if_t<sizeof...(I) == sizeof...(Parts) + 1>>
  tensor<T, metal::extents<index_type, First, Parts...>, Descriptor> slice(I...) const;
};
template <class T, class E>
tensor(T*, E) -> tensor<T, E, tensor_inline>;
template <class T, class E, class S, size_t N>
tensor(T*, E, array<S, N>) -> tensor<T, E, tensor_inline>;

template <int n>
struct execution_threads {};
template <int n>
struct execution_simdgroups {};
using execution_thread = execution_threads<1>;
using execution_simdgroup = execution_simdgroups<1>;

template <class T, class E, class Layout>
struct cooperative_tensor {
  using element_type = T;
  using value_type = T;
  using index_type = typename E::index_type;
  using layout = Layout;
  struct iterator {
    __private T& operator*() const;
    iterator& operator++();
    iterator operator++(int);
    iterator& operator--();
    iterator operator--(int);
    iterator operator+(int) const;
    iterator operator-(int) const;
    bool operator==(iterator) const;
    bool operator!=(iterator) const;
    bool is_valid_element() const;
    msl::index<index_type, E::rank()> get_multidimensional_index() const;
  };
  using const_iterator = iterator;
  static constexpr size_t get_rank() { return E::rank(); }
  ushort get_capacity() const;
  bool is_valid_element(ushort) const;
  bool is_valid_element(iterator) const;
  msl::index<index_type, E::rank()> get_multidimensional_index(ushort) const;
  msl::index<index_type, E::rank()> get_multidimensional_index(iterator) const;
  __private T& operator[](ushort);
  const __private T& operator[](ushort) const;
  T get(ushort) const;
  void set(ushort, T);
  iterator begin();
  iterator end();
  iterator get_iterator(ushort);
  template <class Other>
  iterator map_iterator(Other);
  template <class U, class F, class D, class... Tags, class = enable_if_t<is_same_v<msl_bare<U>, T>>>
  void load(tensor<U, F, D, Tags...>);
  template <class U, class F, class D, class... Tags, class = enable_if_t<is_same_v<msl_bare<U>, T>>>
  void store(tensor<U, F, D, Tags...>) const;
};

}  // namespace metal

namespace mpp {
namespace tensor_ops {

template <class T>
constexpr MSL_CONSTANT T dynamic_length_v = T(0);

enum class reduction_operation { sum, max, min };
template <class T>
struct reduction_operation_identity {
  static constexpr MSL_CONSTANT T sum_identity = T(0);
  static constexpr MSL_CONSTANT T max_identity = T(0);
  static constexpr MSL_CONSTANT T min_identity = T(0);
};

struct matmul2d_descriptor {
  enum class mode { multiply, multiply_accumulate };
  int m, n, k;
  bool transpose_left, transpose_right, relaxed_precision;
  mode matmul_mode;
  constexpr matmul2d_descriptor(int m, int n, int k = -1, bool transpose_left = false, bool transpose_right = false,
                                bool relaxed_precision = false, mode matmul_mode = mode::multiply)
      : m(m), n(n), k(k), transpose_left(transpose_left), transpose_right(transpose_right),
        relaxed_precision(relaxed_precision), matmul_mode(matmul_mode) {}
  // An argument of a template is a number before C++20.
  constexpr operator size_t() const { return size_t(m) << 44 | size_t(n) << 24 | (size_t(k) & 0xfffff); }
  static constexpr matmul2d_descriptor from(size_t code) {
    return matmul2d_descriptor(int(code >> 44), int(code >> 24 & 0xfffff), int(code & 0xfffff));
  }
};

template <size_t Code, class Scope, class... Arguments>
class matmul2d {
  template <class T, class C, int operand, size_t rank>
  using held = metal::cooperative_tensor<T, metal::dextents<C, rank>, matmul2d<Code + operand, Scope>>;

 public:
  using scope = Scope;
  template <class L, class R, class T, class C = int>
  using cooperative_tensor_left_input_t = held<L, C, 0, 2>;
  template <class L, class R, class T, class C = int>
  using cooperative_tensor_right_input_t = held<R, C, 1, 2>;
  template <class L, class R, class T, class C = int>
  using cooperative_tensor_destination_t = held<T, C, 2, 2>;
  template <class L, class R, class T, class C = int>
  using cooperative_tensor_row_reduction_destination_t = held<T, C, 3, 1>;
  template <class L, class R, class T, class C = int>
  using cooperative_tensor_column_reduction_destination_t = held<T, C, 4, 1>;

#define MSL_GETTER(name)                       \
  template <class L, class R, class T, class C = int> \
  cooperative_tensor_##name##_t<L, R, T, C> get_##name##_cooperative_tensor() const;
  MSL_GETTER(left_input)
  MSL_GETTER(right_input)
  MSL_GETTER(destination)
  MSL_GETTER(row_reduction_destination)
  MSL_GETTER(column_reduction_destination)
#undef MSL_GETTER
#define MSL_CONVERSION(name)                                                                   \
  template <class L, class R, class T, class C = int, class S, class E, class Layout>          \
  cooperative_tensor_##name##_t<L, R, T, C> get_##name##_cooperative_tensor(                   \
      const __private metal::cooperative_tensor<S, E, Layout>&) const;                         \
  template <class L, class R, class T, class S, class E, class Layout>                         \
  bool is_compatible_as_##name(const __private metal::cooperative_tensor<S, E, Layout>&) const;
  MSL_CONVERSION(left_input)
  MSL_CONVERSION(right_input)
#undef MSL_CONVERSION

  template <class L, class R, class D>
  void run(__private L&, __private R&, __private D&) const;
};

enum class convolution2d_activation_layout { nhwc };
enum class convolution2d_weights_layout { hwio };
struct convolution2d_descriptor {
  enum class mode { multiply, multiply_accumulate };
  int4 destination_dimensions, source_dimensions;
  int2 kernel_dimensions;
  convolution2d_activation_layout activation_layout;
  convolution2d_weights_layout weights_layout;
  int2 strides, dilations;
  int groups;
  bool relaxed_precision;
  mode conv2d_mode;
  constexpr convolution2d_descriptor(int4 destination_dimensions, int4 source_dimensions, int2 kernel_dimensions,
                                     convolution2d_activation_layout activation_layout = convolution2d_activation_layout::nhwc,
                                     convolution2d_weights_layout weights_layout = convolution2d_weights_layout::hwio,
                                     int2 strides = int2(1, 1), int2 dilations = int2(1, 1), int groups = 1,
                                     bool relaxed_precision = false, mode conv2d_mode = mode::multiply)
      : destination_dimensions(destination_dimensions), source_dimensions(source_dimensions),
        kernel_dimensions(kernel_dimensions), activation_layout(activation_layout), weights_layout(weights_layout),
        strides(strides), dilations(dilations), groups(groups), relaxed_precision(relaxed_precision),
        conv2d_mode(conv2d_mode) {}
  constexpr operator size_t() const { return 0; }
  static constexpr convolution2d_descriptor from(size_t) {
    return convolution2d_descriptor(int4(1, 1, 1, 1), int4(1, 1, 1, 1), int2(1, 1));
  }
};
template <size_t Code, class Scope, class... Arguments>
class convolution2d {
 public:
  template <class A, class W, class T, class C = int, class... More>
  using cooperative_tensor_destination_t =
      metal::cooperative_tensor<T, metal::dextents<C, 4>, convolution2d<Code, Scope>>;
  template <class A, class W, class T, class C = int, class... More>
  cooperative_tensor_destination_t<A, W, T, C> get_destination_cooperative_tensor() const;
  void set_offsets(int2);
  template <class A, class W, class D>
  void run(__private A&, __private W&, __private D&) const;
};

#define MSL_REDUCE(name)                                                                                \
  template <class T, class E, class F, class L, class M>                                                \
  void name(__private metal::cooperative_tensor<T, E, L>&, __private metal::cooperative_tensor<T, F, M>&, \
            reduction_operation = reduction_operation::sum, typename metal::cooperative_tensor<T, E, L>::value_type = T(0));
MSL_REDUCE(reduce_rows)
MSL_REDUCE(reduce_columns)
#undef MSL_REDUCE
template <class T, class U, class E, class F, class L, class M>
bool is_iterator_compatible(const __private metal::cooperative_tensor<T, E, L>&,
                            const __private metal::cooperative_tensor<U, F, M>&);

}  // namespace tensor_ops
}  // namespace mpp

#undef MSL_CONSTANT
