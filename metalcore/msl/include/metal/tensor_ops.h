// mpp::tensor_ops: products of matrices by the threads of a scope, and sums, maxima and minima of rows and columns.
// Products of integers are summed in int, all others in float, in the order of the inner dimension.
#pragma once

#include "metal/cooperative_tensor.h"
#include "metal/tensor_argument.h"
#include "target/tensor_product.h"

namespace mpp::tensor_ops {

template <class T>
struct dynamic_length {
  static constexpr T value = metal::numeric_limits<T>::max();
};
template <class T>
constexpr T dynamic_length_v = dynamic_length<T>::value;

enum class reduction_operation { sum, max, min };

template <class T>
struct reduction_operation_identity {
  static constexpr T sum_identity = T(0);
  static constexpr T max_identity = metal::numeric_limits<T>::lowest();
  static constexpr T min_identity = metal::numeric_limits<T>::max();
};

struct matmul2d_descriptor {
  enum class mode { multiply, multiply_accumulate };

  int m, n, k;  // k may be unknown to the compiler: 0, dynamic_extent or dynamic_length_v
  bool transpose_left, transpose_right;
  bool relaxed_precision;
  mode matmul_mode;

  METAL_FUNC constexpr matmul2d_descriptor(int m, int n, int k = int(metal::dynamic_extent),
                                           bool transpose_left = false, bool transpose_right = false,
                                           bool relaxed_precision = false, mode matmul_mode = mode::multiply)
      : m(m),
        n(n),
        k(k),
        transpose_left(transpose_left),
        transpose_right(transpose_right),
        relaxed_precision(relaxed_precision),
        matmul_mode(matmul_mode) {}

  METAL_FUNC constexpr bool has_dynamic_k() const { return k <= 0 || k == dynamic_length_v<int>; }
};

}  // namespace mpp::tensor_ops

namespace msl {

template <class Scope>
constexpr int simdgroups_of = -1;
template <int n>
constexpr int simdgroups_of<metal::execution_threads<n>> = 0;
template <int n>
constexpr int simdgroups_of<metal::execution_simdgroups<n>> = n;

template <class T>
constexpr bool is_tensor = metal::is_tensor_handle_v<T> || metal::is_tensor_inline_v<T>;
template <class T>
constexpr bool is_cooperative = false;
template <class T, class E, class L>
constexpr bool is_cooperative<metal::cooperative_tensor<T, E, L>> = true;

// Whether products of elements of this type are summed in int, if both operands are so.
template <class T>
constexpr bool is_integer = std::is_integral_v<T>;
template <>
inline constexpr bool is_integer<metal::int2b_format> = true;
template <>
inline constexpr bool is_integer<metal::uint2b_format> = true;
template <>
inline constexpr bool is_integer<metal::int4b_format> = true;
template <>
inline constexpr bool is_integer<metal::uint4b_format> = true;

// Whether matmul2d multiplies L by R into D.
template <class L, class R, class D>
constexpr bool has_product() {
  using metal::bfloat, metal::half;
  if constexpr (is_format<R> && is_integer<R>) {
    constexpr bool is_signed = is_among<R, metal::int2b_format, metal::int4b_format>;
    if constexpr (is_among<L, half, bfloat>) return is_among<D, L, float>;
    return (is_signed ? is_among<L, char, int8_t> : std::is_same_v<L, uint8_t>) && std::is_same_v<D, int32_t>;
  } else if constexpr (is_format<R>) {
    return is_among<L, half, R> && is_among<D, half, float>;
  } else if constexpr (std::is_same_v<L, uint8_t>) {
    return std::is_same_v<R, uint8_t> ? std::is_same_v<D, int32_t>
                                      : !is_among<R, char, int8_t> && has_product<int8_t, R, D>();
  } else if constexpr (std::is_same_v<R, uint8_t>) {
    return !is_among<L, char, int8_t> && has_product<L, int8_t, D>();
  } else if constexpr (std::is_same_v<L, char>) {
    return has_product<int8_t, R, D>();
  } else if constexpr (std::is_same_v<R, char>) {
    return has_product<L, int8_t, D>();
  } else if constexpr (std::is_same_v<L, int8_t> && std::is_same_v<R, int8_t>) {
    return std::is_same_v<D, int32_t>;
  } else if constexpr (!is_among<L, int8_t, half, bfloat, float> || !is_among<R, int8_t, half, bfloat, float>) {
    return false;
  } else if constexpr (std::is_same_v<D, float>) {
    return true;
  } else if constexpr (std::is_same_v<L, float> || std::is_same_v<R, float>) {
    return false;
  } else {
    return std::is_same_v<D, half> ? is_among<half, L, R> : std::is_same_v<D, bfloat> && is_among<bfloat, L, R>;
  }
}

// Numbers that tell operations apart, among them where tensors in memory are.
template <class... Numbers>
METAL_FUNC constexpr uint64_t mixed(uint64_t all, Numbers... numbers) {
  ((all = (all ^ all >> 29 ^ uint64_t(numbers)) * 0x9e3779b97f4a7c15u), ...);
  return all;
}
template <class Tensor>
METAL_FUNC uint64_t digest_of(const Tensor& tensor) {
  uint64_t all = 1;
  if constexpr (!is_cooperative<Tensor>) {
    all = mixed(all, uintptr_t(tensor.get_data_handle()));
    for (size_t i = 0; i < tensor.get_rank(); ++i) all = mixed(all, tensor.get_extent(i), tensor.get_stride(i));
  }
  return all;
}

struct NoPart {};
template <class T>
struct Part {
  T elements[kSlots];
};

// An operand in memory, or one that the simdgroup holds. `Transposed` operands have the inner dimension elsewhere.
template <class Tensor, bool is_left, bool transposed, bool is_held = is_cooperative<Tensor>>
struct OperandReader {
  const Tensor& tensor;

  METAL_FUNC NoPart part(int, int) const { return {}; }
  METAL_FUNC int inner_length() const { return int(tensor.get_extent(is_left != transposed ? 0 : 1)); }
  // Element `inner` of row (or column) `outer`: zero outside of the tensor.
  template <class Sum, class Fragments>
  METAL_FUNC Sum value(const Fragments&, int outer, int inner) const {
    const ElementPlace place =
        is_left != transposed ? ElementPlace{outer, inner, true} : ElementPlace{inner, outer, true};
    return has(tensor, place) ? Sum(element_at(tensor, place)) : Sum(0);
  }
};

template <class Tensor, bool is_left, bool transposed>
struct OperandReader<Tensor, is_left, transposed, true> {
  using Layout = typename Tensor::layout;
  using Place = typename Layout::Place;
  using T = typename Tensor::value_type;
  // The inner dimension goes along the rows of a left operand and of a transposed right one.
  static constexpr bool inner_is_column = is_left != transposed;
  const Tensor& tensor;

  METAL_FUNC int inner_length() const { return inner_is_column ? Layout::columns : Layout::rows; }
  // This lane's part of a fragment; `outer` and `inner` count fragments.
  METAL_FUNC Part<T> part(int outer, int inner) const {
    const int number =
        inner_is_column ? outer * fragments_of(Layout::columns) + inner : inner * fragments_of(Layout::columns) + outer;
    Part<T> part;
    for (int slot = 0; slot < kSlots; ++slot) {
      const int i = Layout::slot_of_fragment(number) + slot;
      part.elements[slot] = Layout::place(i).is_valid ? tensor.value(i) : T(0);
    }
    return part;
  }
  // The lanes ask for the same `inner`. Their rows differ within 8 rows, and their columns by multiples of 4.
  template <class Sum, class Fragments>
  METAL_FUNC Sum value(const Fragments& fragments, int outer, int inner) const {
    const uint32_t row = uint32_t(inner_is_column ? outer : inner) % kFragment;
    const uint32_t column = uint32_t(inner_is_column ? inner : outer) % kFragment;
    const uint32_t lane = Place::lane(row, column), slot = Place::slot(row, column);
    if constexpr (is_left)
      return Sum(fragments.template left<inner_is_column ? 0 : 3>(lane, slot));
    else
      return Sum(fragments.template right<inner_is_column ? 4 : 0>(lane, slot));
  }
};

}  // namespace msl

namespace mpp::tensor_ops {

// The product of an m by k matrix and a k by n matrix.
template <matmul2d_descriptor Descriptor, class Scope, class... Arguments>
class matmul2d {
  static constexpr int simdgroups = msl::simdgroups_of<Scope>;
  static_assert(Descriptor.m > 0 && Descriptor.n > 0, "the lengths of a matmul2d_descriptor are at least 1");
  static_assert(simdgroups >= 0,
                "the scope of matmul2d is execution_thread, execution_simdgroup or "
                "execution_simdgroups<N>");

  template <int rows, int columns, class T, class Coordinate, msl::Operand operand>
  using matrix =
      metal::cooperative_tensor<T, metal::extents<Coordinate, size_t(columns), size_t(rows)>,
                                std::conditional_t<operand == msl::Operand::destination,
                                                   msl::DestinationLayout<rows, columns, simdgroups>,
                                                   msl::MatrixLayout<rows, columns, simdgroups, operand>>>;
  template <class T, class Coordinate, bool is_of_rows>
  using reduction = metal::cooperative_tensor<
      T,
      metal::extents<Coordinate,
                     size_t(is_of_rows ? Descriptor.m : Descriptor.n)>,
      msl::ReductionLayout<
          msl::DestinationLayout<Descriptor.m, Descriptor.n, simdgroups>,
          is_of_rows>>;

 public:
  static constexpr matmul2d_descriptor descriptor = Descriptor;
  using scope = Scope;

 private:
  static constexpr int m = descriptor.m, n = descriptor.n, k = descriptor.has_dynamic_k() ? 1 : descriptor.k;
  static constexpr bool swaps_left = descriptor.transpose_left, swaps_right = descriptor.transpose_right;
  static constexpr bool may_hold_inputs = simdgroups == 1 && !descriptor.has_dynamic_k();

 public:
  template <class Left, class Right, class T, class Coordinate = int>
  using cooperative_tensor_left_input_t =
      matrix<swaps_left ? k : m, swaps_left ? m : k, Left, Coordinate, msl::Operand::left>;
  template <class Left, class Right, class T, class Coordinate = int>
  using cooperative_tensor_right_input_t =
      matrix<swaps_right ? n : k, swaps_right ? k : n, Right, Coordinate, msl::Operand::right>;
  template <class Left, class Right, class T, class Coordinate = int>
  using cooperative_tensor_destination_t = matrix<m, n, T, Coordinate, msl::Operand::destination>;
  template <class Left, class Right, class T, class Coordinate = int>
  using cooperative_tensor_row_reduction_destination_t = reduction<T, Coordinate, true>;
  template <class Left, class Right, class T, class Coordinate = int>
  using cooperative_tensor_column_reduction_destination_t = reduction<T, Coordinate, false>;

  template <class Left, class Right, class T, class Coordinate = int>
  METAL_FUNC auto get_left_input_cooperative_tensor() const {
    check_inputs<Left, Right, T>();
    return cooperative_tensor_left_input_t<Left, Right, T, Coordinate>();
  }
  template <class Left, class Right, class T, class Coordinate = int>
  METAL_FUNC auto get_right_input_cooperative_tensor() const {
    check_inputs<Left, Right, T>();
    return cooperative_tensor_right_input_t<Left, Right, T, Coordinate>();
  }
  template <class Left, class Right, class T, class Coordinate = int>
  METAL_FUNC auto get_destination_cooperative_tensor() const {
    static_assert(
        (msl::is_tensor<Left> || msl::is_cooperative<Left>) && (msl::is_tensor<Right> || msl::is_cooperative<Right>),
        "get_destination_cooperative_tensor() takes the types of the operands, which are tensors");
    check_types<typename Left::value_type, typename Right::value_type, T>();
    return cooperative_tensor_destination_t<Left, Right, T, Coordinate>();
  }
  template <class Left, class Right, class T, class Coordinate = int>
  METAL_FUNC auto get_row_reduction_destination_cooperative_tensor() const {
    return reduction<T, Coordinate, true>();
  }
  template <class Left, class Right, class T, class Coordinate = int>
  METAL_FUNC auto get_column_reduction_destination_cooperative_tensor() const {
    return reduction<T, Coordinate, false>();
  }

  // A destination of another product as an input of this one.
  template <class Left, class Right, class T, class S, class E, class L>
  METAL_FUNC bool is_compatible_as_left_input(const metal::cooperative_tensor<S, E, L>&) const {
    check_source<S, L, Left, m, k, swaps_left>();
    return true;
  }
  template <class Left, class Right, class T, class S, class E, class L>
  METAL_FUNC bool is_compatible_as_right_input(const metal::cooperative_tensor<S, E, L>&) const {
    check_source<S, L, Right, k, n, swaps_right>();
    return true;
  }
  template <class Left, class Right, class T, class Coordinate = int, class S, class E, class L>
  METAL_FUNC auto get_left_input_cooperative_tensor(const metal::cooperative_tensor<S, E, L>& source,
                                                    uint32_t line = __builtin_LINE()) const {
    check_source<S, L, Left, m, k, swaps_left>();
    return moved<cooperative_tensor_left_input_t<Left, Right, T, Coordinate>>(source, line);
  }
  template <class Left, class Right, class T, class Coordinate = int, class S, class E, class L>
  METAL_FUNC auto get_right_input_cooperative_tensor(const metal::cooperative_tensor<S, E, L>& source,
                                                     uint32_t line = __builtin_LINE()) const {
    check_source<S, L, Right, k, n, swaps_right>();
    return moved<cooperative_tensor_right_input_t<Left, Right, T, Coordinate>>(source, line);
  }

  // All threads of the scope call it. Elements outside of operands in memory are zero, and nothing is written outside.
  template <class Left, class Right, class Destination>
  METAL_FUNC void run(Left& left, Right& right, Destination& destination, uint32_t line = __builtin_LINE()) const {
    using D = typename Destination::value_type;
    check_types<typename Left::value_type, typename Right::value_type, D>();
    constexpr bool holds_input = msl::is_cooperative<Left> || msl::is_cooperative<Right>;
    static_assert(!holds_input || may_hold_inputs,
                  "cooperative tensors as inputs need execution_simdgroup and a fixed k");
    check_operand<Left, cooperative_tensor_left_input_t<typename Left::value_type, void, void>>();
    check_operand<Right, cooperative_tensor_right_input_t<void, typename Right::value_type, void>>();
    check_operand<Destination, cooperative_tensor_destination_t<void, void, D>>();
    constexpr uint64_t flags = swaps_left + 2 * swaps_right + 4 * int(descriptor.matmul_mode);
    msl::check_scope<simdgroups>(line, msl::mixed(flags, m, n, descriptor.has_dynamic_k() ? 0 : k, msl::digest_of(left),
                                                  msl::digest_of(right), msl::digest_of(destination)));
    const msl::OperandReader<Left, true, swaps_left> a{left};
    const msl::OperandReader<Right, false, swaps_right> b{right};
    const int length = descriptor.has_dynamic_k() ? a.inner_length() : k;
    if constexpr (has_tiles<Left, Right, Destination>()) {
      using Tiles = Product<Left>;
      using Places = typename Tiles::Layout;
      float sums[Places::capacity];  // in registers, so that no loop may remain
#pragma unroll
      for (int i = 0; i < Places::capacity; ++i) sums[i] = old<Left, Right, Places>(destination, i);
      if (Tiles::can_add()) {
        Tiles::add(left, right, length, sums);
      } else {
        float products[Places::capacity];
#pragma unroll 1
        for (int i = 0; i < Places::capacity; ++i) products[i] = product(a, b, Places::place(i), length, 0.0f);
#pragma unroll
        for (int i = 0; i < Places::capacity; ++i) sums[i] += products[i];
      }
      D results[Places::capacity];
#pragma unroll
      for (int i = 0; i < Places::capacity; ++i) results[i] = D(sums[i]);
      if constexpr (msl::is_cooperative<Destination>) {
#pragma unroll
        for (int i = 0; i < Places::capacity; ++i) destination.give(i, results[i]);
      } else {
        Places::store(destination, results);
      }
    } else if constexpr (multiplies_held<Left, Right, Destination>()) {
      constexpr bool adds = descriptor.matmul_mode == matmul2d_descriptor::mode::multiply_accumulate;
      msl::HeldProduct<Left, Right, Destination>::template multiply<swaps_left, swaps_right, adds>(left, right,
                                                                                                  destination);
    } else if constexpr (holds_input) {
      for (int number = 0; number < Layout::fragments; ++number) multiply_held(a, b, destination, number, line);
    } else {
      for (int i = 0; i < Layout::capacity; ++i)
        give<Layout>(destination, i,
                     D(product(a, b, Layout::place(i), length, old<Left, Right, Layout>(destination, i))));
    }
  }

 private:
  using Layout = msl::DestinationLayout<m, n, simdgroups>;
  template <class Left, class Right>
  using Sum = std::conditional_t<
      msl::is_integer<typename Left::value_type> && msl::is_integer<typename Right::value_type>, int32_t, float>;

  // Whether the target has a way of its own for operands in memory (see target/tensor_product.h).
  template <class Left>
  using Product = msl::TileProduct<typename Left::value_type, m, n, descriptor.has_dynamic_k() ? 0 : k, swaps_left,
                                   swaps_right, simdgroups>;
  template <class Left, class Right, class Destination>
  static METAL_FUNC constexpr bool has_tiles() {
    if constexpr (msl::is_cooperative<Left> || msl::is_cooperative<Right> ||
                  !std::is_same_v<typename Left::value_type, typename Right::value_type>)
      return false;
    else if constexpr (simdgroups == 0 || (simdgroups == 1 && msl::is_cooperative<Destination>))
      return false;
    else
      return Product<Left>::is_possible;
  }

  // The same for operands that the simdgroup holds (see target/held_products.h).
  template <class Left, class Right, class Destination>
  static METAL_FUNC constexpr bool multiplies_held() {
    if constexpr (msl::is_cooperative<Left> && msl::is_cooperative<Right> && msl::is_cooperative<Destination>)
      return msl::HeldProduct<Left, Right, Destination>::is_possible;
    else
      return false;
  }

  template <class Left, class Right, class D>
  static METAL_FUNC constexpr void check_types() {
    static_assert(msl::has_product<Left, Right, D>(), "matmul2d does not multiply these types into that one");
  }
  template <class Left, class Right, class D>
  static METAL_FUNC constexpr void check_inputs() {
    static_assert(may_hold_inputs, "cooperative tensors as inputs need execution_simdgroup and a fixed k");
    check_types<Left, Right, D>();
  }
  template <class Tensor, class Held>
  static METAL_FUNC constexpr void check_operand() {
    if constexpr (msl::is_cooperative<Tensor>)
      static_assert(std::is_same_v<typename Tensor::layout, typename Held::layout>,
                    "this operand is a cooperative tensor of another operation or another operand");
    else
      static_assert(Tensor::get_rank() == 2, "matmul2d multiplies tensors of two dimensions");
  }
  template <class S, class L, class T, int rows, int columns, bool swaps>
  static METAL_FUNC constexpr void check_source() {
    static_assert(L::rank == 2 && L::operand == msl::Operand::destination && L::simdgroups == 1 && may_hold_inputs,
                  "an input is made from the destination of a product of execution_simdgroup");
    static_assert(std::is_same_v<S, T>, "an input has the type of the destination that it is made from");
    static_assert(!swaps && L::rows == rows && L::columns == columns,
                  "an input that is made from a destination has its shape, and is not transposed");
  }

  // Elements of a destination, by the slots of the layout.
  template <class Left, class Right, class Places, class Destination>
  static METAL_FUNC Sum<Left, Right> old(const Destination& destination, int i) {
    using S = Sum<Left, Right>;
    if constexpr (descriptor.matmul_mode == matmul2d_descriptor::mode::multiply) {
      return S(0);
    } else if constexpr (msl::is_cooperative<Destination>) {
      return Places::place(i).is_valid ? S(destination.value(i)) : S(0);
    } else {
      const msl::ElementPlace place = Places::place(i);
      return place.is_valid && msl::has(destination, place) ? S(msl::element_at(destination, place)) : S(0);
    }
  }
  template <class Places, class Destination, class D>
  static METAL_FUNC void give(Destination& destination, int i, D value) {
    if constexpr (msl::is_cooperative<Destination>) {
      destination.give(i, value);
    } else {
      const msl::ElementPlace place = Places::place(i);
      if (place.is_valid && msl::has(destination, place)) msl::element_at(destination, place) = value;
    }
  }

  // Adds an element of the product of operands in memory to a sum.
  template <class Left, class Right, class S>
  static METAL_FUNC S product(const msl::OperandReader<Left, true, swaps_left>& a,
                              const msl::OperandReader<Right, false, swaps_right>& b, msl::ElementPlace place,
                              int length, S sum) {
    for (int inner = 0; place.is_valid && inner < length; ++inner)
      sum = msl::add_product(a.template value<S>(msl::NoPart(), place.row, inner),
                             b.template value<S>(msl::NoPart(), place.column, inner), sum);
    return sum;
  }
  // The same where the simdgroup holds an operand: its lanes exchange fragments.
  template <class Left, class Right, class Destination>
  static METAL_FUNC void multiply_held(const msl::OperandReader<Left, true, swaps_left>& a,
                                       const msl::OperandReader<Right, false, swaps_right>& b, Destination& destination,
                                       int number, uint32_t line) {
    using S = Sum<Left, Right>;
    constexpr int across = msl::fragments_of(n);
    const int begin = Layout::slot_of_fragment(number);
    S sums[msl::kSlots];
    for (int slot = 0; slot < msl::kSlots; ++slot)
      sums[slot] = old<Left, Right, Layout>(destination, begin + slot);
    for (int first = 0; first < k; first += msl::kFragment) {
      const int inner_number = first / msl::kFragment;
      const auto left = a.part(number / across, inner_number);
      const auto right = b.part(number % across, inner_number);
      const msl::Fragments<std::remove_const_t<decltype(left)>, std::remove_const_t<decltype(right)>> fragments(
          left, right, line);
      for (int inner = first; inner < first + msl::kFragment && inner < k; ++inner)
        for (int slot = 0; slot < msl::kSlots; ++slot) {
          const msl::ElementPlace place = Layout::place(begin + slot);
          sums[slot] = msl::add_product(a.template value<S>(fragments, place.row, inner),
                                        b.template value<S>(fragments, place.column, inner), sums[slot]);
        }
    }
    for (int slot = 0; slot < msl::kSlots; ++slot)
      give<Layout>(destination, begin + slot, typename Destination::value_type(sums[slot]));
  }

  // A tensor with another layout and the same elements.
  template <class To, class From>
  static METAL_FUNC To moved(const From& from, uint32_t line) {
    using T = typename From::value_type;
    using Source = typename From::layout;
    using Target = typename To::layout;
    To to;
    for (int number = 0; number < Source::fragments; ++number) {
      msl::Part<T> part;
      for (int slot = 0; slot < msl::kSlots; ++slot) {
        const int i = Source::slot_of_fragment(number) + slot;
        part.elements[slot] = Source::place(i).is_valid ? from.value(i) : T(0);
      }
      const msl::Fragments<msl::Part<T>, msl::NoPart> fragments(part, msl::NoPart(), line);
      for (int slot = 0; slot < msl::kSlots; ++slot) {
        const int i = Target::slot_of_fragment(number) + slot;
        const msl::ElementPlace place = Target::place(i);
        const uint32_t row = uint32_t(place.row) % msl::kFragment, column = uint32_t(place.column) % msl::kFragment;
        to.give(i,
                fragments.template left<0>(Source::Place::lane(row, column), Source::Place::slot(row, column)));
      }
    }
    return to;
  }
};

}  // namespace mpp::tensor_ops

namespace msl {

template <class T>
METAL_FUNC T reduced(T a, T b, mpp::tensor_ops::reduction_operation operation) {
  using mpp::tensor_ops::reduction_operation;
  return operation == reduction_operation::sum   ? T(a + b)
         : operation == reduction_operation::max ? (a < b ? b : a)
                                                 : (b < a ? b : a);
}

// The number that changes no result.
template <class T>
METAL_FUNC T neutral(mpp::tensor_ops::reduction_operation operation) {
  using mpp::tensor_ops::reduction_operation;
  using Limits = metal::numeric_limits<T>;
  if (operation == reduction_operation::sum) return T(0);
  const bool is_largest = operation == reduction_operation::min;
  if constexpr (std::is_integral_v<T>)
    return is_largest ? Limits::max() : Limits::lowest();
  else
    return T(is_largest ? __builtin_inff() : -__builtin_inff());
}

template <bool is_of_rows, class Source, class Destination>
METAL_FUNC void reduce_matrix(const Source& source, Destination& destination,
                              mpp::tensor_ops::reduction_operation operation, typename Source::value_type identity,
                              uint32_t line) {
  using T = typename Source::value_type;
  using Layout = typename Source::layout;
  using Target = ReductionLayout<Layout, is_of_rows>;
  static_assert(Layout::simdgroups <= 1, "rows and columns are reduced in the scope of a thread or of a simdgroup");
  static_assert(std::is_same_v<typename Destination::layout, Target>,
                "the destination is of another operation, or of the other dimension");
  T results[Target::capacity];
  for (int i = 0; i < Target::capacity; ++i) results[i] = neutral<T>(operation);
  for (int i = 0; i < Layout::capacity; ++i)
    if (Layout::place(i).is_valid)
      results[Target::slot_of(i)] = reduced(results[Target::slot_of(i)], source.value(i), operation);
  for (int i = 0; i < Target::capacity; ++i) {
    T result = results[i];
    if constexpr (Layout::simdgroups == 1)
      for (uint32_t bit = is_of_rows ? 4 : 1; bit < (is_of_rows ? 16u : 8u); bit *= 2) {
        const Fragments<Part<T>, NoPart> fragments(Part<T>{{result}}, NoPart(), line);
        const uint32_t other = Layout::Place::neighbour(index_of_lane(), is_of_rows ? 0 : bit, is_of_rows ? bit : 0);
        result = reduced(result, fragments.template left<0>(other, 0), operation);
      }
    destination.give(i, reduced(identity, result, operation));
  }
}

template <class Source, class Destination>
constexpr bool is_reduction = false;
template <class Source, bool is_of_rows>
constexpr bool is_reduction<Source, ReductionLayout<Source, is_of_rows>> = true;

}  // namespace msl

namespace mpp::tensor_ops {

template <class T, class SourceExtents, class Extents, class SourceLayout, class Layout>
METAL_FUNC void reduce_rows(
    const metal::cooperative_tensor<T, SourceExtents, SourceLayout>& source,
    metal::cooperative_tensor<T, Extents, Layout>& destination,
    reduction_operation operation = reduction_operation::sum,
    typename msl::in_template<T, T>::type identity = reduction_operation_identity<T>::sum_identity,
    uint32_t line = __builtin_LINE()) {
  msl::reduce_matrix<true>(source, destination, operation, identity, line);
}
template <class T, class SourceExtents, class Extents, class SourceLayout, class Layout>
METAL_FUNC void reduce_columns(
    const metal::cooperative_tensor<T, SourceExtents, SourceLayout>& source,
    metal::cooperative_tensor<T, Extents, Layout>& destination,
    reduction_operation operation = reduction_operation::sum,
    typename msl::in_template<T, T>::type identity = reduction_operation_identity<T>::sum_identity,
    uint32_t line = __builtin_LINE()) {
  msl::reduce_matrix<false>(source, destination, operation, identity, line);
}

// Whether map_iterator() finds elements of the destination.
template <class S, class D, class SourceExtents, class Extents, class SourceLayout, class Layout>
METAL_FUNC bool is_iterator_compatible(const metal::cooperative_tensor<S, SourceExtents, SourceLayout>&,
                                       const metal::cooperative_tensor<D, Extents, Layout>&) {
  return msl::is_reduction<SourceLayout, Layout>;
}

}  // namespace mpp::tensor_ops
