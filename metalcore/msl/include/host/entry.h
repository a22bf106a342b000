// How a kernel is called. One descriptor per argument says where its value comes from, and kernel<…>() makes the two
// functions of the contract (kernel_abi.h) from the kernel and its descriptors.
#pragma once

#include "metal/positions.h"

#define MSL_KERNEL inline __attribute__((always_inline))

namespace msl {

using msl_abi::Dispatch;
using msl_abi::Thread;

// Thread positions ------------------------------------------------------------------------------------------------

// The i-th thread of a row whose first thread is `first`. All threads of a row are in one threadgroup and have
// consecutive x.
#define MSL_POSITION(name, expression)                                                                  \
  struct name {                                                                                         \
    static METAL_FUNC Uint3 at(const Dispatch& d, const Thread& first, uint32_t i) { return expression; } \
  };
MSL_POSITION(position_in_grid,
             (Uint3{first.position_in_grid.x + i, first.position_in_grid.y, first.position_in_grid.z}))
MSL_POSITION(position_in_threadgroup, (Uint3{first.position_in_threadgroup.x + i, first.position_in_threadgroup.y,
                                             first.position_in_threadgroup.z}))
MSL_POSITION(threadgroup_position, first.threadgroup_position)
MSL_POSITION(threads_per_grid, d.threads_per_grid)
MSL_POSITION(grid_origin, (Uint3{0, 0, 0}))
MSL_POSITION(threads_per_threadgroup, first.threadgroup_size)
MSL_POSITION(dispatch_threads_per_threadgroup, d.threads_per_threadgroup)
MSL_POSITION(threadgroups_per_grid, d.threadgroups_per_grid)
#undef MSL_POSITION

#define MSL_INDEX(name, expression)                                                                       \
  struct name {                                                                                           \
    static METAL_FUNC Uint3 at(const Dispatch& d, const Thread& first, uint32_t i) { return {expression, 0, 0}; } \
  };
MSL_INDEX(index_in_threadgroup, first.index_in_threadgroup + i)
MSL_INDEX(index_in_simdgroup, (first.index_in_threadgroup + i) % kSimdWidth)
MSL_INDEX(simdgroup_index, (first.index_in_threadgroup + i) / kSimdWidth)
MSL_INDEX(simdgroups, first.simdgroups)
MSL_INDEX(dispatch_simdgroups,
          (d.threads_per_threadgroup.x * d.threads_per_threadgroup.y * d.threads_per_threadgroup.z + kSimdWidth - 1) /
              kSimdWidth)
MSL_INDEX(threads_per_simdgroup, kSimdWidth)
MSL_INDEX(index_in_quadgroup, (first.index_in_threadgroup + i) % 4)
MSL_INDEX(quadgroup_index, (first.index_in_threadgroup + i) / 4)
MSL_INDEX(quadgroups, (first.threadgroup_size.x * first.threadgroup_size.y * first.threadgroup_size.z + 3) / 4)
MSL_INDEX(dispatch_quadgroups,
          (d.threads_per_threadgroup.x * d.threads_per_threadgroup.y * d.threads_per_threadgroup.z + 3) / 4)
#undef MSL_INDEX

// Arguments -------------------------------------------------------------------------------------------------------

template <uint32_t index>
struct buffer {
  static METAL_FUNC void* address(const Dispatch& d) { return d.buffers[index]; }
};

template <uint32_t index>
struct threadgroup_argument {
  static METAL_FUNC void* address(const Dispatch& d) {
    return runtime->threadgroup_memory(64 + index, d.threadgroup_lengths[index], 16);
  }
};

struct absent {
  static METAL_FUNC void* address(const Dispatch&) { return nullptr; }
};

template <bool condition, class Descriptor>
using given = std::conditional_t<condition, Descriptor, absent>;

// The description of an argument for the executor, which does not need those of thread positions.
template <class Descriptor>
struct binding {
  static constexpr bool exists = false;
  static constexpr uint32_t kind = 0, index = 0;
};
template <uint32_t i>
struct binding<buffer<i>> {
  static constexpr bool exists = true;
  static constexpr uint32_t kind = msl_abi::kBuffer, index = i;
};
template <uint32_t i>
struct binding<threadgroup_argument<i>> {
  static constexpr bool exists = true;
  static constexpr uint32_t kind = msl_abi::kThreadgroup, index = i;
};

template <class T>
constexpr uint32_t size_of() {
  if constexpr (std::is_void_v<T>)
    return 1;
  else
    return sizeof(T);
}

// What an argument points to.
template <class Parameter>
struct pointee {
  using type = std::remove_pointer_t<std::remove_reference_t<Parameter>>;
};

template <class Parameter>
constexpr msl_abi::Argument describe(const char* name, uint32_t kind, uint32_t index) {
  using T = typename pointee<Parameter>::type;
  return {name, kind, index, size_of<T>(), !std::is_const_v<T>, std::is_reference_v<Parameter>};
}

// A slot holds an argument's data for all threads of a row: an address, or a copy of a small constant, so that the
// compiler knows that no store of the kernel changes it.
template <int position, class Descriptor, class Parameter, class = void>
struct Slot {
  METAL_FUNC Slot(const Dispatch&) {}
  METAL_FUNC std::remove_const_t<Parameter> at(const Dispatch& d, const Thread& first, uint32_t i) const {
    return from_uint3<std::remove_const_t<Parameter>>::make(Descriptor::at(d, first, i));
  }
};
template <int position, class Descriptor, class T>
struct Slot<position, Descriptor, T*, std::void_t<decltype(&Descriptor::address)>> {
  T* pointer;
  METAL_FUNC Slot(const Dispatch& d) : pointer(static_cast<T*>(Descriptor::address(d))) {}
  METAL_FUNC T* at(const Dispatch&, const Thread&, uint32_t) const { return pointer; }
};
template <int position, class Descriptor, class T>
struct Slot<position, Descriptor, T&, std::void_t<decltype(&Descriptor::address)>> {
  T* pointer;
  METAL_FUNC Slot(const Dispatch& d) : pointer(static_cast<T*>(Descriptor::address(d))) {}
  METAL_FUNC T& at(const Dispatch&, const Thread&, uint32_t) const { return *pointer; }
};

template <int... positions>
struct Positions {};
template <int n, int... positions>
struct MakePositions : MakePositions<n - 1, n - 1, positions...> {};
template <int... positions>
struct MakePositions<0, positions...> {
  using type = Positions<positions...>;
};

// Entries ---------------------------------------------------------------------------------------------------------

template <auto function, const char* const* names, class P, class... Descriptors>
struct Entry;

template <class... Parameters, void (*function)(Parameters...), const char* const* names, int... positions,
          class... Descriptors>
struct Entry<function, names, Positions<positions...>, Descriptors...> {
  struct Slots : Slot<positions, Descriptors, Parameters>... {
    METAL_FUNC Slots(const Dispatch& d) : Slot<positions, Descriptors, Parameters>(d)... {}
    METAL_FUNC void call(const Dispatch& d, const Thread& first, uint32_t i) const {
      function(static_cast<const Slot<positions, Descriptors, Parameters>&>(*this).at(d, first, i)...);
    }
  };

  static void run_thread(const Dispatch* dispatch, const Thread* thread) {
    Slots(*dispatch).call(*dispatch, *thread, 0);
  }

  // Threads of a kernel that does not synchronize may run in any order, so the loop may be vectorized. For that the
  // compiler must know that 32-bit indices do not wrap around: a separate function tells it.
  static void run_row(const Dispatch* dispatch, const Thread* first, uint32_t count) {
    if (first->position_in_grid.x < kGreatestIndex && count <= kGreatestRow) return run_loop(dispatch, first, count);
    Thread thread = *first;
    for (uint32_t i = 0; i < count; ++i) {
      run_thread(dispatch, &thread);
      ++thread.position_in_grid.x, ++thread.position_in_threadgroup.x, ++thread.index_in_threadgroup;
    }
  }

  static constexpr uint32_t kGreatestIndex = 1u << 28, kGreatestRow = 1u << 12;

  static __attribute__((noinline, flatten)) void run_loop(const Dispatch* dispatch, const Thread* first_thread,
                                                          uint32_t count) {
    const Dispatch d = *dispatch;
    const Thread first = *first_thread;
    if (first.position_in_grid.x >= kGreatestIndex || count > kGreatestRow) __builtin_unreachable();
    const Slots slots(d);
#pragma GCC ivdep
    for (uint32_t i = 0; i < count; ++i) slots.call(d, first, i);
  }

  static void run_alone(const Dispatch* dispatch, const Thread* thread) { run_row(dispatch, thread, 1); }

  static constexpr uint32_t count = (uint32_t(binding<Descriptors>::exists) + ... + 0);
  struct Table {
    msl_abi::Argument arguments[count + 1];
  };
  static constexpr Table make_table() {
    Table table{};
    uint32_t next = 0;
    ((binding<Descriptors>::exists
          ? void(table.arguments[next++] = describe<Parameters>(names[positions], binding<Descriptors>::kind,
                                                                binding<Descriptors>::index))
          : void()),
     ...);
    return table;
  }
  static constexpr Table table = make_table();
};

template <bool synchronizes, auto function, const char* const* names, class... Descriptors>
constexpr msl_abi::Kernel kernel(const char* name, uint32_t max_total_threads) {
  using E = Entry<function, names, typename MakePositions<sizeof...(Descriptors)>::type, Descriptors...>;
  if constexpr (synchronizes)
    return {name, msl_abi::kSynchronizes, max_total_threads, E::table.arguments, E::count, E::run_thread, nullptr};
  else
    return {name, 0, max_total_threads, E::table.arguments, E::count, E::run_alone, E::run_row};
}

}  // namespace msl

#ifndef MSL_CHECKING
#define MSL_CHECKING 0
#endif

#if MSL_CHECKING
// The linker's names for the ends of a section.
extern "C" __attribute__((visibility("hidden"))) const char __start_msl_callbacks[], __stop_msl_callbacks[];
#define MSL_CALLBACKS __start_msl_callbacks, __stop_msl_callbacks
#else
#define MSL_CALLBACKS nullptr, nullptr
#endif

#define MSL_LIBRARY(kernels, count)                                                                       \
  extern "C" __attribute__((visibility("default"))) const msl_abi::Library* msl_library() {               \
    static const msl_abi::Library library = {                                                             \
        msl_abi::kVersion, count,        kernels, [](const msl_abi::Runtime* r) { msl::runtime = r; },    \
        MSL_CHECKING,      MSL_CALLBACKS};                                                                \
    return &library;                                                                                      \
  }
