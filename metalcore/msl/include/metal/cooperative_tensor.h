// cooperative_tensor<T, Extents, Layout>: a matrix of one or two dimensions that is spread over the threads of an
// operation's scope. Programs ask for an element's index, since the layout is the operation's affair. Programs exist
// that count on the layout of M5 GPUs, so this is the layout here, too, except in checking mode: there left operands,
// right operands and destinations each have a layout of their own, and a lane's first elements are none of the tensor's,
// so that such programs are found.
//
// A simdgroup holds a matrix in fragments of 16 by 16 elements, in the order of rows. A lane has 8 elements of each: 4
// neighbours of a row, and those 8 rows below.
#pragma once

#include "metal/limits.h"
#include "metal/tensor.h"

namespace msl {

enum class Operand { left, right, destination };

constexpr int kFragment = 16;
constexpr int kSlots = 8;  // a lane's elements of a fragment

METAL_FUNC constexpr int fragments_of(int length) { return (length + kFragment - 1) / kFragment; }

// The place of a lane's elements in a fragment, and the lane and slot of an element. In checking mode lanes and slots
// are permuted: the lane that has an element is multiplied by an odd number, which has an inverse modulo 32.
template <Operand operand>
struct FragmentPlace {
  static constexpr uint32_t factor = !kCheckingTensors           ? 1
                                     : operand == Operand::left  ? 5
                                     : operand == Operand::right ? 11
                                                                 : 13;
  static constexpr uint32_t inverse = !kCheckingTensors           ? 1
                                      : operand == Operand::left  ? 13
                                      : operand == Operand::right ? 3
                                                                  : 5;
  static constexpr uint32_t flips = !kCheckingTensors           ? 0
                                    : operand == Operand::left  ? 5
                                    : operand == Operand::right ? 3
                                                                : 6;

  static METAL_FUNC uint32_t row(uint32_t lane, uint32_t slot) {
    const uint32_t at = lane * factor & 31u;
    return (at >> 2 & 4u) | (at >> 1 & 3u) | ((slot ^ flips) << 1 & 8u);
  }
  static METAL_FUNC uint32_t column(uint32_t lane, uint32_t slot) {
    const uint32_t at = lane * factor & 31u;
    return (at & 8u) | (at << 2 & 4u) | ((slot ^ flips) & 3u);
  }
  static METAL_FUNC uint32_t lane(uint32_t row, uint32_t column) {
    return ((row << 2 & 16u) | (row << 1 & 6u) | (column & 8u) | (column >> 2 & 1u)) * inverse & 31u;
  }
  static METAL_FUNC uint32_t slot(uint32_t row, uint32_t column) { return ((row >> 1 & 4u) | (column & 3u)) ^ flips; }
  // The lane whose place has other bits in its row or its column.
  static METAL_FUNC uint32_t neighbour(uint32_t lane, uint32_t rows, uint32_t columns) {
    return FragmentPlace::lane(row(lane, 0) ^ rows, column(lane, 0) ^ columns);
  }
};

struct ElementPlace {
  int row, column;
  bool is_valid;
};

// A matrix that the lanes of `simdgroups` simdgroups hold; 0 simdgroups are one thread.
template <int rows_, int columns_, int simdgroups_, Operand operand_>
struct MatrixLayout {
  static constexpr int rows = rows_, columns = columns_, simdgroups = simdgroups_, rank = 2;
  static constexpr Operand operand = operand_;
  using Place = FragmentPlace<operand>;
  static constexpr int fragments = fragments_of(rows) * fragments_of(columns);
  // How many fragments a simdgroup has. Some of the last one may have one less.
  static constexpr int share = simdgroups ? (fragments + simdgroups - 1) / (simdgroups ? simdgroups : 1) : 0;
  // A lane's slots before those of its fragments, which are not valid and have the indices of the first fragment.
  static constexpr int padding = kCheckingTensors && simdgroups ? kSlots : 0;
  static constexpr int capacity = simdgroups ? padding + share * kSlots : rows * columns;

  // The number of this simdgroup's i-th fragment, which may be beyond the last one.
  static METAL_FUNC int fragment(int i) {
    return simdgroups > 1 ? i * simdgroups + int(index_of_simdgroup()) % (simdgroups ? simdgroups : 1) : i;
  }
  // The first slot of a fragment that the only simdgroup has.
  static METAL_FUNC constexpr int slot_of_fragment(int number) { return padding + number * kSlots; }
  static METAL_FUNC ElementPlace place(int i) {
    if constexpr (simdgroups == 0) {
      return {i / columns, i % columns, true};
    } else {
      const int number = i < padding ? 0 : fragment((i - padding) / kSlots);
      const uint32_t lane = index_of_lane(), slot = uint32_t(i) % kSlots;
      const int row = number / fragments_of(columns) * kFragment + int(Place::row(lane, slot));
      const int column = number % fragments_of(columns) * kFragment + int(Place::column(lane, slot));
      return {row, column, i >= padding && number < fragments && row < rows && column < columns};
    }
  }
};

// One element for each row (or column) of a destination. Each lane has those of its elements' rows (or columns).
template <class Matrix, bool is_of_rows>
struct ReductionLayout {
  static constexpr int rows = is_of_rows ? Matrix::rows : 1, columns = is_of_rows ? 1 : Matrix::columns, rank = 1;
  static constexpr int length = is_of_rows ? Matrix::rows : Matrix::columns;
  static constexpr int in_fragment = is_of_rows ? 2 : 4;
  static constexpr int capacity = Matrix::simdgroups ? fragments_of(length) * in_fragment : length;
  // Checking mode has the parts of a fragment in another order than the matrix.
  static constexpr int flips = kCheckingTensors ? in_fragment / 2 : 0;
  using matrix = Matrix;

  static METAL_FUNC int index(int i) {
    if constexpr (Matrix::simdgroups == 0) return i;
    using Place = typename Matrix::Place;
    const uint32_t part = uint32_t(i % in_fragment ^ flips), lane = index_of_lane();
    const uint32_t within = is_of_rows ? Place::row(lane, part * 4) : Place::column(lane, part);
    return i / in_fragment * kFragment + int(within);
  }
  static METAL_FUNC ElementPlace place(int i) {
    const int at = index(i);
    return {at, 0, at < length};
  }
  // The slot of the row (or column) of the matrix's slot i.
  static METAL_FUNC int slot_of(int i) {
    if constexpr (Matrix::simdgroups == 0) return is_of_rows ? i / Matrix::columns : i % Matrix::columns;
    const int number = i < Matrix::padding ? 0 : (i - Matrix::padding) / kSlots;
    const int across = fragments_of(Matrix::columns), part = is_of_rows ? i % kSlots / 4 : i % 4;
    return (is_of_rows ? number / across : number % across) * in_fragment + (part ^ flips);
  }
};

// Whether a layout has store(tensor, elements), as a target's own one has.
template <class Layout>
constexpr bool stores_itself = false;

// Whether a tensor has an element, and the element.
template <class Tensor>
METAL_FUNC bool has(const Tensor& tensor, ElementPlace place) {
  if constexpr (Tensor::extents_type::rank() == 1) return place.row < int64_t(tensor.get_extent(0));
  return place.column < int64_t(tensor.get_extent(0)) && place.row < int64_t(tensor.get_extent(1));
}
template <class Tensor>
METAL_FUNC decltype(auto) element_at(const Tensor& tensor, ElementPlace place) {
  using Step = ptrdiff_t;
  if constexpr (Tensor::extents_type::rank() == 1)
    return tensor.element(Step(place.row) * Step(tensor.get_stride(0)));
  else
    return tensor.element(Step(place.column) * Step(tensor.get_stride(0)) +
                          Step(place.row) * Step(tensor.get_stride(1)));
}

// The same for an index of four dimensions, which may be negative.
template <class Tensor>
METAL_FUNC bool has_pixel(const Tensor& tensor, const metal::array<int, 4>& index) {
  for (size_t i = 0; i < 4; ++i)
    if (index[i] < 0 || index[i] >= int64_t(tensor.get_extent(i))) return false;
  return true;
}
template <class Tensor>
METAL_FUNC auto& pixel_of(const Tensor& tensor, const metal::array<int, 4>& index) {
  ptrdiff_t offset = 0;
  for (size_t i = 0; i < 4; ++i) offset += ptrdiff_t(index[i]) * ptrdiff_t(tensor.get_stride(i));
  return tensor.element(offset);
}

// What checking mode knows of a thread's elements: a bit for each that the program could have written.
template <int capacity, bool is_checking = kCheckingTensors>
struct Touched {
  METAL_FUNC void touch(int) {}
  METAL_FUNC bool is_touched(int) const { return true; }
};
template <int capacity>
struct Touched<capacity, true> {
  uint32_t bits[(capacity + 31) / 32] = {};
  METAL_FUNC void touch(int i) { bits[i / 32] |= 1u << i % 32; }
  METAL_FUNC bool is_touched(int i) const { return bits[i / 32] >> i % 32 & 1; }
};

template <class T>
using stored_bits = std::conditional_t<sizeof(T) == 1, uint8_t, std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t>>;

// The bits of an element that nobody wrote: a NaN, or a large number that is no round one.
template <class T>
constexpr uint32_t unwritten_bits = std::is_same_v<T, float> ? 0x7fe5a5a5u
                                    : sizeof(T) == 4         ? 0xa5a5a5a5u
                                                             : 0x7fe5u;

}  // namespace msl

namespace metal {

template <class T, class Extents, class Layout>
struct cooperative_tensor {
  using element_type = T;
  using value_type = T;
  using extents_type = Extents;
  using index_type = typename Extents::index_type;
  using layout = Layout;
  using reference = T&;
  using const_reference = const T&;
  using thread_index_type = uint16_t;
  using thread_size_type = uint16_t;

  // An element of the tensor, in the order in which a thread has them.
  template <class Tensor, class Reference>
  struct basic_iterator {
    Tensor* tensor;
    thread_index_type index;

    METAL_FUNC Reference operator*() const { return (*tensor)[index]; }
    METAL_FUNC basic_iterator& operator++() { return ++index, *this; }
    METAL_FUNC basic_iterator operator++(int) { return {tensor, index++}; }
    METAL_FUNC basic_iterator& operator--() { return --index, *this; }
    METAL_FUNC basic_iterator operator--(int) { return {tensor, index--}; }
    METAL_FUNC basic_iterator operator+(int n) const { return {tensor, thread_index_type(index + n)}; }
    METAL_FUNC basic_iterator operator-(int n) const { return {tensor, thread_index_type(index - n)}; }
    METAL_FUNC bool operator==(const basic_iterator& other) const { return index == other.index; }
    METAL_FUNC bool operator!=(const basic_iterator& other) const { return index != other.index; }
    METAL_FUNC bool is_valid_element() const { return tensor->is_valid_element(index); }
    METAL_FUNC auto get_multidimensional_index() const { return tensor->get_multidimensional_index(index); }
  };
  using iterator = basic_iterator<cooperative_tensor, reference>;
  using const_iterator = basic_iterator<const cooperative_tensor, const_reference>;

  METAL_FUNC cooperative_tensor() {
    if constexpr (msl::kCheckingTensors)
      for (int i = 0; i < Layout::capacity; ++i) elements[i] = unwritten();
  }

  static METAL_FUNC constexpr size_t get_rank() { return Layout::rank; }
  static METAL_FUNC constexpr thread_size_type get_capacity() { return Layout::capacity; }
  METAL_FUNC bool is_valid_element(thread_index_type i) const { return Layout::place(i).is_valid; }
  METAL_FUNC bool is_valid_element(const_iterator it) const { return is_valid_element(it.index); }
  METAL_FUNC bool is_valid_element(iterator it) const { return is_valid_element(it.index); }
  // The index in the tensor, with the innermost dimension first.
  METAL_FUNC array<index_type, Layout::rank> get_multidimensional_index(thread_index_type i) const {
    const msl::ElementPlace place = Layout::place(i);
    if constexpr (Layout::rank == 1) {
      return {index_type(place.row)};
    } else if constexpr (Layout::rank == 2) {
      return {index_type(place.column), index_type(place.row)};
    } else {
      const auto index = Layout::index(place);
      return {index_type(index[0]), index_type(index[1]), index_type(index[2]), index_type(index[3])};
    }
  }
  METAL_FUNC auto get_multidimensional_index(const_iterator it) const { return get_multidimensional_index(it.index); }
  METAL_FUNC auto get_multidimensional_index(iterator it) const { return get_multidimensional_index(it.index); }

  METAL_FUNC reference operator[](thread_index_type i) {
    MSL_CHECK_INDEX(i, Layout::capacity);
    touched.touch(i);
    return elements[i];
  }
  METAL_FUNC const_reference operator[](thread_index_type i) const {
    MSL_CHECK_INDEX(i, Layout::capacity);
    check(i);
    return elements[i];
  }
  METAL_FUNC T get(thread_index_type i) const {
    if (!is_valid_element(i)) return T();
    return (*this)[i];
  }
  METAL_FUNC void set(thread_index_type i, T value) {
    if (is_valid_element(i)) (*this)[i] = value;
  }

  METAL_FUNC iterator begin() { return {this, 0}; }
  METAL_FUNC iterator end() { return {this, get_capacity()}; }
  METAL_FUNC const_iterator begin() const { return {this, 0}; }
  METAL_FUNC const_iterator end() const { return {this, get_capacity()}; }
  METAL_FUNC iterator get_iterator(thread_index_type i) { return {this, i}; }
  METAL_FUNC const_iterator get_iterator(thread_index_type i) const { return {this, i}; }
  // The element of this tensor, of one dimension, for the row or column of an element of a matrix.
  template <class Other>
  METAL_FUNC iterator map_iterator(Other it) {
    using From = typename std::remove_const_t<std::remove_pointer_t<decltype(it.tensor)>>::layout;
    static_assert(std::is_same_v<From, typename Layout::matrix>,
                  "map_iterator() maps the elements of a destination to those of its reduction");
    return {this, thread_index_type(Layout::slot_of(it.index))};
  }

  // Reads the elements from memory; those outside are zero. Nothing writes elements outside.
  template <class E, class D, class... Tags>
  METAL_FUNC void load(const tensor<T, E, D, Tags...>& from) {
    read(from);
  }
  template <class E, class D, class... Tags>
  METAL_FUNC void load(const tensor<const T, E, D, Tags...>& from) {
    read(from);
  }
  template <class E, class D, class... Tags>
  METAL_FUNC void store(const tensor<T, E, D, Tags...>& to) const {
    static_assert(E::rank() == Layout::rank, "a cooperative tensor is stored to a tensor of its rank");
    if constexpr (msl::stores_itself<Layout>) return Layout::store(to, elements);
    for (int i = 0; i < Layout::capacity; ++i) {
      const msl::ElementPlace place = Layout::place(i);
      if (!place.is_valid) continue;
      check(i);
      if constexpr (Layout::rank == 4) {
        const auto index = Layout::index(place);
        if (msl::has_pixel(to, index)) msl::pixel_of(to, index) = elements[i];
      } else {
        if (msl::has(to, place)) msl::element_at(to, place) = elements[i];
      }
    }
  }

  // For operations: an element's value, which somebody must have written, and a new value.
  METAL_FUNC T value(int i) const { return check(i), elements[i]; }
  METAL_FUNC void give(int i, T value) {
    touched.touch(i);
    elements[i] = msl::kCheckingTensors && !Layout::place(i).is_valid ? unwritten() : value;
  }

 private:
  static METAL_FUNC T unwritten() { return msl::bit_cast<T>(msl::stored_bits<T>(msl::unwritten_bits<T>)); }
  METAL_FUNC void check(int i) const {
    if constexpr (msl::kCheckingTensors) {
      bool is_written = touched.is_touched(i);
      if constexpr (sizeof(T) > 1)
        is_written = is_written &&
                     msl::bit_cast<msl::stored_bits<T>>(elements[i]) != msl::stored_bits<T>(msl::unwritten_bits<T>);
      if (!is_written && Layout::place(i).is_valid) msl::report_unwritten(i, Layout::capacity);
    }
  }
  template <class Tensor>
  METAL_FUNC void read(const Tensor& from) {
    static_assert(Tensor::extents_type::rank() == Layout::rank,
                  "a cooperative tensor is loaded from a tensor of its rank");
    for (int i = 0; i < Layout::capacity; ++i) {
      const msl::ElementPlace place = Layout::place(i);
      if (!place.is_valid) continue;
      if constexpr (Layout::rank == 4) {
        const auto index = Layout::index(place);
        give(i, msl::has_pixel(from, index) ? T(msl::pixel_of(from, index)) : T(0));
      } else {
        give(i, msl::has(from, place) ? T(msl::element_at(from, place)) : T(0));
      }
    }
  }

  T elements[Layout::capacity];
  msl::Touched<Layout::capacity> touched;
};

}  // namespace metal
