// tensor<T, Extents, Descriptor>: a view of memory, with an extent and a stride for each dimension. The first dimension
// is the innermost one. Slices keep the memory and move its origin.
#pragma once

#include "metal/array.h"
#include "metal/tensor_formats.h"
#include "metal/type_traits.h"
#include "metal/types.h"
#include "target/fragments.h"

namespace metal {

constexpr size_t dynamic_extent = size_t(-1);

// The lengths of the dimensions. Those that are not dynamic_extent are known to the compiler.
template <class Index, size_t... Extents>
struct extents {
  using index_type = Index;
  using size_type = std::make_unsigned_t<Index>;
  using rank_type = size_t;

  static METAL_FUNC constexpr rank_type rank() { return sizeof...(Extents); }
  static METAL_FUNC constexpr rank_type rank_dynamic() { return ((Extents == dynamic_extent ? 1 : 0) + ... + 0); }
  static METAL_FUNC constexpr size_t static_extent(rank_type i) {
    size_t at = 0, found = 0;
    ((at++ == i ? void(found = Extents) : void()), ...);
    return found;
  }

  METAL_FUNC constexpr extents() : values{(Extents == dynamic_extent ? Index(0) : Index(Extents))...} {}
  // Takes the dynamic extents in order, or all of them.
  template <class... T, class = std::enable_if_t<(sizeof...(T) > 0) && (std::is_convertible_v<T, Index> && ...) &&
                                                 (sizeof...(T) == rank() || sizeof...(T) == rank_dynamic())>>
  METAL_FUNC constexpr explicit extents(T... given) : extents() {
    const Index numbers[] = {Index(given)...};
    set<sizeof...(T) == rank()>(numbers);
  }
  template <class T, size_t N, class = std::enable_if_t<(N > 0) && (N == rank() || N == rank_dynamic())>>
  METAL_FUNC constexpr extents(const array<T, N>& given) : extents() {
    Index numbers[N] = {};
    for (size_t i = 0; i < N; ++i) numbers[i] = Index(given.elements[i]);
    set<N == rank()>(numbers);
  }
  template <class T, size_t... Others, class = std::enable_if_t<sizeof...(Others) == rank()>>
  METAL_FUNC constexpr extents(const extents<T, Others...>& other) : extents() {
    for (size_t i = 0; i < rank(); ++i)
      if (static_extent(i) == dynamic_extent) values[i] = Index(other.extent(i));
  }

  METAL_FUNC constexpr Index extent(rank_type i) const {
    return static_extent(i) == dynamic_extent ? values[i] : Index(static_extent(i));
  }
  template <class T, size_t... Others>
  METAL_FUNC constexpr bool operator==(const extents<T, Others...>& other) const {
    if (sizeof...(Others) != rank()) return false;
    for (size_t i = 0; i < rank(); ++i)
      if (extent(i) != Index(other.extent(i))) return false;
    return true;
  }
  template <class T, size_t... Others>
  METAL_FUNC constexpr bool operator!=(const extents<T, Others...>& other) const {
    return !(*this == other);
  }

 private:
  template <bool all>
  METAL_FUNC constexpr void set(const Index* given) {
    for (size_t i = 0; i < rank(); ++i)
      if (static_extent(i) == dynamic_extent) values[i] = all ? given[i] : *given++;
  }

  Index values[sizeof...(Extents) + (sizeof...(Extents) == 0)];
};

}  // namespace metal

namespace msl {

template <class Index, size_t n, size_t... extents>
struct dynamic_extents : dynamic_extents<Index, n - 1, metal::dynamic_extent, extents...> {};
template <class Index, size_t... extents>
struct dynamic_extents<Index, 0, extents...> {
  using type = metal::extents<Index, extents...>;
};

// Whether a list of types has a type.
template <class T, class... List>
constexpr bool is_among = (std::is_same_v<T, List> || ... || false);

}  // namespace msl

namespace metal {

template <class Index, size_t Rank>
using dextents = typename msl::dynamic_extents<Index, Rank>::type;

struct tensor_handle {};  // the host binds it to an argument of a kernel
struct tensor_inline {};  // a kernel makes it from a pointer
struct tensor_offset {};  // a tag of a tensor_handle's slices

}  // namespace metal

namespace msl {

// The scales among a tensor's tags.
template <class... Tags>
struct ScalesOf {
  using type = NoScales;
};
template <class Tag, class... Tags>
struct ScalesOf<Tag, Tags...> : ScalesOf<Tags...> {};
template <class Plane, class Scale, size_t inner, size_t outer, class... Tags>
struct ScalesOf<metal::tensor_blockwise<Plane, Scale, inner, outer>, Tags...> {
  using type = metal::tensor_blockwise<Plane, Scale, inner, outer>;
};

// Where elements begin: an object with [i] and +=, and what a program gives.
template <class T, class Scales, bool is_of_format = is_format<std::remove_cv_t<T>>>
struct TensorMemory {
  using Handle = T*;
  using Origin = T*;
  static METAL_FUNC constexpr Origin origin(Handle data, const Scales&) { return data; }
  static METAL_FUNC constexpr Handle handle(Origin origin) { return origin; }
};
template <class T, class Scales>
struct TensorMemory<T, Scales, true> {
  using Origin = FormatOrigin<T, Scales>;
  using Handle = typename Origin::Handle;
  static METAL_FUNC constexpr Origin origin(Handle data, const Scales& scales) { return {data, 0, scales}; }
  static METAL_FUNC constexpr Handle handle(const Origin& origin) {
    return origin.bytes + origin.first * Origin::Format::bits / 8;
  }
};

}  // namespace msl

namespace metal {

template <class T, class Extents, class Descriptor = tensor_handle, class... Tags>
struct tensor {
  static_assert(msl::is_among<Descriptor, tensor_handle, tensor_inline>,
                "the descriptor of a tensor is tensor_handle or tensor_inline");
  using scales_type = typename msl::ScalesOf<Tags...>::type;
  static constexpr bool has_scales = !std::is_same_v<scales_type, msl::NoScales>;
  static_assert(sizeof...(Tags) == size_t(has_scales) ||
                    (std::is_same_v<Descriptor, tensor_handle> && sizeof...(Tags) == 1 &&
                     (std::is_same_v<Tags, tensor_offset> && ...)),
                "a tensor's only tags are tensor_offset, which a tensor_handle may have, and tensor_blockwise");
  static_assert(!has_scales || (msl::is_format<std::remove_cv_t<T>> && std::is_same_v<Descriptor, tensor_inline>),
                "scales belong to a tensor_inline of floats of 4 or 8 bits");
  static_assert(Extents::rank() <= 16, "a tensor has at most 16 dimensions");

  using element_type = T;
  using value_type = std::remove_cv_t<T>;
  using extents_type = Extents;
  using index_type = typename Extents::index_type;
  using size_type = typename Extents::size_type;
  using rank_type = typename Extents::rank_type;
  using memory = msl::TensorMemory<T, scales_type>;
  using reference = decltype(std::declval<typename memory::Origin>()[0]);
  using data_handle_type = typename memory::Handle;
  using descriptor_type = Descriptor;

  tensor() = default;
  // Each row follows the row before it.
  METAL_FUNC constexpr tensor(data_handle_type data, const Extents& lengths)
      : origin(memory::origin(data, scales_type())), lengths(lengths) {
    index_type step = 1;
    for (size_t i = 0; i < get_rank(); ++i) {
      steps[i] = step;
      step = index_type(step * lengths.extent(i));
    }
  }
  template <class S, size_t N>
  METAL_FUNC constexpr tensor(data_handle_type data, const Extents& lengths, const array<S, N>& strides)
      : origin(memory::origin(data, scales_type())), lengths(lengths) {
    set_strides(strides);
  }
  template <class S, size_t N>
  METAL_FUNC constexpr tensor(data_handle_type data, const Extents& lengths, const array<S, N>& strides,
                              const scales_type& scales)
      : origin(memory::origin(data, scales)), lengths(lengths) {
    set_strides(strides);
  }
  // A slice, whose first number may lie within a byte.
  template <class S, size_t N, class Origin,
            class = std::enable_if_t<msl::is_format<value_type> && std::is_same_v<Origin, typename memory::Origin>>>
  METAL_FUNC constexpr tensor(const Origin& origin, const Extents& lengths, const array<S, N>& strides)
      : origin(origin), lengths(lengths) {
    set_strides(strides);
  }

  static METAL_FUNC constexpr rank_type get_rank() { return Extents::rank(); }
  static METAL_FUNC constexpr rank_type get_rank_dynamic() { return Extents::rank_dynamic(); }
  static METAL_FUNC constexpr size_t get_static_extent(rank_type i) { return Extents::static_extent(i); }
  METAL_FUNC constexpr const Extents& extents() const { return lengths; }
  METAL_FUNC constexpr index_type get_extent(rank_type i) const { return lengths.extent(i); }
  METAL_FUNC constexpr index_type get_stride(rank_type i) const { return steps[i]; }
  METAL_FUNC constexpr data_handle_type get_data_handle() const { return memory::handle(origin); }
  // The element that lies so many ones behind the first.
  METAL_FUNC reference element(ptrdiff_t offset) const { return origin[offset]; }

  template <class I>
  METAL_FUNC reference operator[](const array<I, Extents::rank()>& index) const {
    ptrdiff_t offset = 0;
    for (size_t i = 0; i < get_rank(); ++i) {
      MSL_CHECK_INDEX(index.elements[i], lengths.extent(i));
      offset += ptrdiff_t(index.elements[i]) * steps[i];
    }
    return origin[offset];
  }
  template <class I, class = std::enable_if_t<std::is_integral_v<I> && Extents::rank() == 1>>
  METAL_FUNC reference operator[](I i) const {
    return MSL_CHECK_INDEX(i, lengths.extent(0)), origin[ptrdiff_t(i) * steps[0]];
  }

  // The part that begins at an index. It has the given extents, which it must have room for, or goes to the ends.
  template <size_t... Parts, class... I>
  METAL_FUNC auto slice(I... begin) const {
    static_assert(sizeof...(I) == Extents::rank(), "slice() takes one index for each dimension");
    static_assert(sizeof...(Parts) == 0 || sizeof...(Parts) == Extents::rank(),
                  "slice() takes one extent for each dimension");
    if constexpr (sizeof...(Parts) == 0)
      return part(dextents<index_type, Extents::rank()>(), index_type(begin)...);
    else
      return part(metal::extents<index_type, Parts...>(), index_type(begin)...);
  }

 private:
  template <class S, size_t N>
  METAL_FUNC constexpr void set_strides(const array<S, N>& strides) {
    static_assert(N == Extents::rank(), "a tensor has one stride for each dimension");
    for (size_t i = 0; i < get_rank(); ++i) steps[i] = index_type(strides.elements[i]);
  }
  template <class Part, class... I>
  METAL_FUNC auto part(const Part&, I... begin) const {
    const index_type first[] = {begin...};
    array<index_type, Extents::rank()> lengths_left, strides;
    auto begin_of_part = origin;
    for (size_t i = 0; i < get_rank(); ++i) {
      const index_type whole = lengths.extent(i);
      const bool is_fixed = Part::static_extent(i) != dynamic_extent;
      const index_type wanted = is_fixed ? index_type(Part::static_extent(i)) : index_type(0);
      MSL_CHECK_SLICE(first[i], wanted, whole);
      lengths_left.elements[i] = is_fixed ? wanted : first[i] < whole ? index_type(whole - first[i]) : index_type(0);
      strides.elements[i] = steps[i];
      begin_of_part += ptrdiff_t(first[i]) * steps[i];
    }
    if constexpr (std::is_same_v<Descriptor, tensor_handle>)
      return tensor<T, Part, Descriptor, tensor_offset>(begin_of_part, Part(lengths_left), strides);
    else
      return tensor<T, Part, Descriptor, Tags...>(begin_of_part, Part(lengths_left), strides);
  }

  typename memory::Origin origin;
  Extents lengths;
  index_type steps[Extents::rank() + (Extents::rank() == 0)];
};

template <class T, class Extents>
tensor(T*, Extents) -> tensor<T, Extents, tensor_inline>;
template <class T, class Extents, class S, size_t N>
tensor(T*, Extents, array<S, N>) -> tensor<T, Extents, tensor_inline>;

template <class T>
struct is_tensor_handle : std::false_type {};
template <class T, class E, class... Tags>
struct is_tensor_handle<tensor<T, E, tensor_handle, Tags...>> : std::true_type {};
template <class T>
constexpr bool is_tensor_handle_v = is_tensor_handle<T>::value;
template <class T>
struct is_tensor_inline : std::false_type {};
template <class T, class E, class... Tags>
struct is_tensor_inline<tensor<T, E, tensor_inline, Tags...>> : std::true_type {};
template <class T>
constexpr bool is_tensor_inline_v = is_tensor_inline<T>::value;
template <class T>
struct has_tensor_offset : std::false_type {};
template <class T, class E, class D, class... Tags>
struct has_tensor_offset<tensor<T, E, D, Tags...>> : std::bool_constant<msl::is_among<tensor_offset, Tags...>> {};
template <class T>
constexpr bool has_tensor_offset_v = has_tensor_offset<T>::value;

// The threads that execute an operation together.
template <int n>
struct execution_threads {
  static_assert(n == 1, "the only number of execution_threads is 1");
};
template <int n>
struct execution_simdgroups {
  static_assert(n > 0, "execution_simdgroups needs a positive number");
};
using execution_thread = execution_threads<1>;
using execution_simdgroup = execution_simdgroups<1>;

}  // namespace metal
