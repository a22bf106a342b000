// Reads and writes through pointers that were cast from pointers to something smaller (metalcore/msl/language/unaligned.py). The
// GPU faults where an address is no multiple of the access's size. So an aligned access takes the usual instruction,
// and any other is done by elements, or by bytes where the elements are not aligned either. MSL_ALIGNED, which
// compile_shader's `aligned` sets, promises that all are aligned.
#pragma once

#include "metal/matrix.h"
#include "target/formats.h"

namespace msl::unaligned {

// The types that are moved: numbers, and vectors and matrices of them. (A struct's members are accessed in place.)
template <class T>
struct moved {
  using element = T;
  static constexpr uint32_t bytes = sizeof(T);
};
template <class T, int N>
struct moved<metal::vec<T, N>> {
  using element = T;
  static constexpr uint32_t bytes = N * sizeof(T);  // without the padding after three elements
};
template <class T, int N>
struct moved<metal::packed_vec<T, N>> : moved<metal::vec<T, N>> {};
template <class T, int C, int R>
struct moved<metal::matrix<T, C, R>> {
  using element = T;
  static constexpr uint32_t bytes = sizeof(metal::matrix<T, C, R>);
};
template <class T>
constexpr bool is_moved = is_scalar_v<typename moved<T>::element> && !std::is_enum_v<T> && alignof(T) > 1;

// An unsigned integer as large as an element.
template <class T>
using element_bits_t = typename std::integer_of<sizeof(typename moved<T>::element), false>::type;

template <class Part>
METAL_FUNC bool is_aligned_for(const void* address) {
  return (reinterpret_cast<uintptr_t>(address) & (alignof(Part) - 1)) == 0;
}

template <class T, class Part>
struct Parts {
  Part at[sizeof(T) / sizeof(Part)];
};
template <class Part, class T>
METAL_FUNC T read_parts(const T* from) {
  Parts<T, Part> parts = {};
  MSL_UNROLL
  for (uint32_t i = 0; i < moved<T>::bytes / sizeof(Part); ++i) parts.at[i] = reinterpret_cast<const Part*>(from)[i];
  return __builtin_bit_cast(T, parts);
}
template <class Part, class T>
METAL_FUNC void write_parts(T* to, T value) {
  using As = Parts<T, Part>;
  const As parts = __builtin_bit_cast(As, value);
  MSL_UNROLL
  for (uint32_t i = 0; i < moved<T>::bytes / sizeof(Part); ++i) reinterpret_cast<Part*>(to)[i] = parts.at[i];
}

// This rare case is out of line, so that it takes no room in the usual one.
template <class T>
METAL_NOINLINE T read_unaligned(const T* from) {
  if (is_aligned_for<element_bits_t<T>>(from)) return read_parts<element_bits_t<T>>(from);
  return read_parts<uint8_t>(from);
}
template <class T>
METAL_NOINLINE void write_unaligned(T* to, T value) {
  if (is_aligned_for<element_bits_t<T>>(to)) write_parts<element_bits_t<T>>(to, value);
  else write_parts<uint8_t>(to, value);
}

template <class T>
METAL_FUNC T read_moved(const T* from) {
  return is_aligned_for<T>(from) ? *from : read_unaligned(from);
}
template <class T>
METAL_FUNC void write_moved(T* to, T value) {
  if (is_aligned_for<T>(to)) *to = value;
  else write_unaligned(to, value);
}

// The target of an assignment through such a pointer.
template <class T>
struct Moved {
  T* at;

  METAL_FUNC operator T() const { return read_moved(at); }
  template <class U>
  METAL_FUNC T operator=(const U& value) const {
    const T converted = static_cast<T>(value);
    write_moved(at, converted);
    return converted;
  }
#define MSL_COMPOUND(op)                              \
  template <class U>                                  \
  METAL_FUNC T operator op##=(const U& value) const { \
    T changed = read_moved(at);                       \
    changed op##= value;                              \
    return *this = changed;                           \
  }
  MSL_COMPOUND(+) MSL_COMPOUND(-) MSL_COMPOUND(*) MSL_COMPOUND(/) MSL_COMPOUND(%) MSL_COMPOUND(&) MSL_COMPOUND(|)
  MSL_COMPOUND(^) MSL_COMPOUND(<<) MSL_COMPOUND(>>)
#undef MSL_COMPOUND
  METAL_FUNC T operator++() const { return *this += T(1); }
  METAL_FUNC T operator--() const { return *this -= T(1); }
  METAL_FUNC T operator++(int) const {
    const T old = *this;
    *this += T(1);
    return old;
  }
  METAL_FUNC T operator--(int) const {
    const T old = *this;
    *this -= T(1);
    return old;
  }
};

template <class P>
using pointer_t = std::remove_cv_t<std::remove_reference_t<P>>;
template <class P>
constexpr bool is_pointer_to_moved = false;
#if !MSL_ALIGNED
template <class T>
constexpr bool is_pointer_to_moved<T*> = is_moved<std::remove_const_t<T>>;
#endif

// Structs that are less aligned than a load is wide. Programs use them to move several elements at once.
template <class T>
constexpr uint32_t chunk_bytes = sizeof(T) % 16 == 0 ? 16 : sizeof(T) % 8 == 0 ? 8 : 0;
template <class T>
constexpr bool is_moved_in_chunks = std::is_class_v<T> && std::is_trivially_copyable_v<T> && !is_moved<T> &&
                                    !is_scalar_v<T> && alignof(T) < chunk_bytes<T>;
template <class P>
constexpr bool is_pointer_to_chunks = false;
template <class T>
constexpr bool is_pointer_to_chunks<T*> = is_moved_in_chunks<std::remove_const_t<T>>;

// A word at an address that is aligned as a smaller type is.
template <uint32_t alignment>
struct __attribute__((packed, aligned(alignment))) PackedWord {
  uint32_t word;
};
template <class T>
using packed_word_t = PackedWord<(alignof(T) < 4 ? alignof(T) : 4)>;

// Such a struct as words, in which the compiler keeps it together.
template <class T>
struct Words : Parts<T, uint32_t> {
  METAL_FUNC operator T() const { return __builtin_bit_cast(T, *this); }
};

// 16 bytes of global memory at any address that is a multiple of their alignment. Loads of 16 bytes are aligned: one
// where the address is, and otherwise two that have these bytes, which are shifted. No branch keeps the loads that
// follow waiting for these.
METAL_FUNC void read_16_bytes(uint32_t (&to)[4], const void* from) {
  const uint32_t shift = uint32_t(reinterpret_cast<uintptr_t>(from)) & 15u;
  uint32_t at[8];
  asm volatile(
      "{ .reg .pred parted; setp.ne.u32 parted, %9, 0;\n\t"
      "ld.global.v4.u32 {%0, %1, %2, %3}, [%8];\n\t"
      "@parted ld.global.v4.u32 {%4, %5, %6, %7}, [%8 + 16]; }"
      : "=r"(at[0]), "=r"(at[1]), "=r"(at[2]), "=r"(at[3]), "=r"(at[4]), "=r"(at[5]), "=r"(at[6]), "=r"(at[7])
      : "l"(static_cast<const char*>(from) - shift), "r"(shift)
      : "memory");
  MSL_UNROLL
  for (int i = 0; i < 6; ++i) at[i] = shift & 8 ? at[i + 2] : at[i];
  MSL_UNROLL
  for (int i = 0; i < 5; ++i) at[i] = shift & 4 ? at[i + 1] : at[i];
  MSL_UNROLL
  for (int i = 0; i < 4; ++i) at[i] = __funnelshift_r(at[i], at[i + 1], shift % 4 * 8);
  MSL_UNROLL
  for (int i = 0; i < 4; ++i) to[i] = at[i];
}

// This rare case is out of line, so that it takes no room in the usual one.
template <class T>
METAL_NOINLINE Words<T> read_members(const T* from) {
  const T value = *from;
  return __builtin_bit_cast(Words<T>, value);
}
template <class T>
METAL_FUNC Words<T> read_chunks(const T* from) {
  constexpr uint32_t words = chunk_bytes<T> / 4;
  struct alignas(chunk_bytes<T>) Chunk {
    uint32_t at[words];
  };
  Words<T> result;
#if !MSL_ALIGNED
  if constexpr (sizeof(T) == 16) {
    if (is_known(__isGlobal(from))) {
      read_16_bytes(result.at, from);
      return result;
    }
  }
  if (!is_aligned_for<Chunk>(from)) return read_members(from);
#endif
  MSL_UNROLL
  for (uint32_t i = 0; i < sizeof(T) / sizeof(Chunk); ++i) {
    const Chunk chunk = reinterpret_cast<const Chunk*>(from)[i];
    MSL_UNROLL
    for (uint32_t j = 0; j < words; ++j) result.at[i * words + j] = chunk.at[j];
  }
  return result;
}

// The target of an assignment. Words are stored as far as the struct is aligned, and the compiler joins these where it
// knows better.
template <class T>
struct InChunks {
  T* at;

  METAL_FUNC operator T&() const { return *at; }
  METAL_FUNC T& operator=(const Words<T>& value) const {
    MSL_UNROLL
    for (uint32_t i = 0; i < sizeof(T) / 4; ++i)
      reinterpret_cast<packed_word_t<T>*>(at)[i].word = value.at[i];
    return *at;
  }
  template <class U>
  METAL_FUNC T& operator=(const U& value) const {
    return *at = value;
  }
#define MSL_COMPOUND(op)                                           \
  template <class U>                                               \
  METAL_FUNC decltype(auto) operator op##=(const U& value) const { \
    return *at op##= value;                                        \
  }
  MSL_COMPOUND(+) MSL_COMPOUND(-) MSL_COMPOUND(*) MSL_COMPOUND(/) MSL_COMPOUND(%) MSL_COMPOUND(&) MSL_COMPOUND(|)
  MSL_COMPOUND(^) MSL_COMPOUND(<<) MSL_COMPOUND(>>)
#undef MSL_COMPOUND
  METAL_FUNC decltype(auto) operator++() const { return ++*at; }
  METAL_FUNC decltype(auto) operator--() const { return --*at; }
  METAL_FUNC decltype(auto) operator++(int) const { return (*at)++; }
  METAL_FUNC decltype(auto) operator--(int) const { return (*at)--; }
};

// p[i] or *p: read() where the program reads it, write() where it assigns to it.
template <class P, class... I>
METAL_FUNC decltype(auto) read(P&& p, I... i) {
  if constexpr (is_pointer_to_moved<pointer_t<P>>) return read_moved((p + ... + i));
  else if constexpr (sizeof...(I) == 0) return *p;
  else return (p[i], ...);
}
template <class P, class... I>
METAL_FUNC decltype(auto) write(P&& p, I... i) {
  using T = std::remove_pointer_t<pointer_t<P>>;
  if constexpr (is_pointer_to_moved<pointer_t<P>>) return Moved<T>{(p + ... + i)};
  else if constexpr (is_pointer_to_chunks<pointer_t<P>>) return InChunks<T>{(p + ... + i)};
  else if constexpr (sizeof...(I) == 0) return *p;
  else return (p[i], ...);
}

// The same as read() where the whole is assigned to a place in memory.
template <class P, class... I>
METAL_FUNC decltype(auto) copy(P&& p, I... i) {
  if constexpr (is_pointer_to_chunks<pointer_t<P>>) return read_chunks((p + ... + i));
  else return read(static_cast<P&&>(p), i...);
}

// The same where the program assigns to a component: a vector that is aligned as its elements are.
template <class T>
METAL_FUNC T& unpadded(T& value) {
  return value;
}
template <class T, int N>
METAL_FUNC auto& unpadded(metal::vec<T, N>& value) {
  if constexpr (N <= 4) return reinterpret_cast<metal::packed_vec<T, N>&>(value);
  else return value;
}
template <class T, int C, int R>
METAL_FUNC auto& unpadded(metal::matrix<T, C, R>& value) {
  struct Columns {
    metal::packed_vec<T, R> columns[C];
    METAL_FUNC auto& operator[](int i) { return columns[i]; }
  };
  if constexpr (R == 3) return value;
  else return reinterpret_cast<Columns&>(value);
}
template <class P, class... I>
METAL_FUNC auto& place(P&& p, I... i) {
  if constexpr (sizeof...(I) == 0) return unpadded(*p);
  else return unpadded((p[i], ...));
}

}  // namespace msl::unaligned
