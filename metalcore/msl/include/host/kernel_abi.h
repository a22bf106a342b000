// The binary contract between a translated MSL library (one shared object per source) and the CPU executor. It has only
// plain structs and function pointers. A library from the on-disk cache may be older than the executor, so both sides
// compare kVersion first. Raise kVersion whenever a struct below changes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace msl_abi {

constexpr uint32_t kVersion = 5;
constexpr uint32_t kSimdWidth = 32;

struct Uint3 {
  uint32_t x, y, z;
};

// One dispatch. All of its threads get the same.
struct Dispatch {
  void* const* buffers;                // buffers[i]: address bound at [[buffer(i)]] (setBytes data, too), or nullptr
  const uint32_t* threadgroup_lengths; // bytes set for [[threadgroup(i)]], 0 where unset
  Uint3 threads_per_grid;
  Uint3 threads_per_threadgroup;       // as dispatched; a threadgroup at the grid's edge may be smaller
  Uint3 threadgroups_per_grid;
};

// One thread of a dispatch.
struct Thread {
  Uint3 position_in_grid;
  Uint3 position_in_threadgroup;
  Uint3 threadgroup_position;
  Uint3 threadgroup_size;              // actual size of this threadgroup (differs from the dispatched one at the edge)
  uint32_t index_in_threadgroup;
  uint32_t lane;                       // thread_index_in_simdgroup
  uint32_t simdgroup;                  // simdgroup_index_in_threadgroup
  uint32_t simdgroups;                 // simdgroups_per_threadgroup
};

enum ArgumentKind : uint32_t {
  kBuffer = 0,       // pointer or reference in device/constant address space, [[buffer(index)]]
  kThreadgroup = 1,  // pointer in threadgroup address space, [[threadgroup(index)]]
};

struct Argument {
  const char* name;
  uint32_t kind;
  uint32_t index;
  uint32_t element_size;   // sizeof the pointee
  uint32_t writable;       // 1 unless the pointee is const or in the constant address space
  uint32_t by_reference;   // 1 for `constant T& x`: exactly one element is read
};

enum KernelFlags : uint32_t {
  kSynchronizes = 1,  // it calls a barrier, a simd_/quad_ function or a simdgroup_matrix: threads must be fibers
};

struct Kernel {
  const char* name;                 // host_name where given, else the function's name
  uint32_t flags;
  uint32_t max_total_threads;       // [[max_total_threads_per_threadgroup(n)]], or 0
  const Argument* arguments;
  uint32_t argument_count;
  // Runs one thread to its end, on a fiber if kSynchronizes is set.
  void (*run_thread)(const Dispatch*, const Thread*);
  // Runs `count` threads of one threadgroup with consecutive x, beginning with *first. It is nullptr if kSynchronizes
  // is set.
  void (*run_row)(const Dispatch*, const Thread* first, uint32_t count);
};

// Bytes from one lane's value to the next in an Exchange of values of this size. It is a constant for compilers, so
// that they can make vector instructions of a reduction over lanes.
constexpr uint32_t exchange_stride(uint32_t size) {
  uint32_t stride = 4;
  while (stride < size) stride *= 2;
  return stride;
}

// The result of simd_exchange: lane i's bytes lie at values + i * stride, for each bit i of active; stride is
// exchange_stride of the values' size. The simdgroup's other lanes have zeros (in checking mode, values on which the
// outcome must not depend), and so has lane kSimdWidth, which does not exist.
struct Exchange {
  const unsigned char* values;
  uint32_t stride;
  uint32_t active;
};

enum AccessKind : uint32_t {
  kRead = 0,
  kWrite = 1,
  kAtomic = 2,       // read-modify-write: fetch_add, exchange, compare_exchange …
  kAtomicRead = 3,   // atomic_load
  kAtomicWrite = 4,  // atomic_store
  kAligned = 8,      // added to one of these: by its type the address is a multiple of the size
};

// The finding of a check that the compiler has put into a checking library. It comes before the access.
struct Finding {
  enum Kind : uint32_t {
    kIndex,       // `index` of an array, vector or matrix of `count` elements
    kReadBeyond,  // a read beyond the variable that a pointer points to
    kWriteBeyond,
    kDivision,    // a division of an integer by zero
    kUnreachable,
    kNoReturn,    // the end of a function that returns a value
    kStop,        // abort() and the like
    kSlice,       // a slice that begins or ends at `index` of a dimension of `count` elements
    kUnwritten,   // a read of element `index` of the `count` that a thread has of a cooperative tensor: never written
    kScope,       // `index` threads come to an operation of `count` threads
    kOperation,   // no fault: the thread comes to an operation of `index` simdgroups that has the digest `count`
  };
  uint32_t kind;
  int64_t index;
  uint64_t count;
  const char* type;  // the type of the array or of the variable, as the compiler names it; "" if unknown
};

// The place of an object: buffers and constants, threadgroup memory, a thread's own variables, or nowhere (null).
enum class Space : uint32_t { memory = 0, threadgroup = 1, thread = 2, none = 3 };

// Services of the executor, which bind() hands to the library. `line` is the line of the call in the user's source. It
// distinguishes synchronization points, so that lanes of a divergent simdgroup meet only lanes at the same point.
struct Runtime {
  uint32_t version;
  // The thread that is running now.
  const Thread* (*self)();
  // threadgroup_barrier(flags): flags as in metal::mem_flags (bit 0 device, bit 1 threadgroup, bit 2 texture).
  void (*threadgroup_barrier)(uint32_t flags, uint32_t line);
  void (*simdgroup_barrier)(uint32_t flags, uint32_t line);
  // Publishes `size` bytes (at most 128) and waits until every active lane of the simdgroup (width 32) or of the quad
  // (width 4) has done so at the same line. The result is valid until this lane's next call.
  Exchange (*simd_exchange)(const void* value, uint32_t size, uint32_t width, uint32_t line);
  // The address of the threadgroup variable with this site, which the translator numbers per kernel. Every thread of
  // the threadgroup gets the same address. Sites below 64 are for variables; [[threadgroup(i)]] arguments use 64 + i.
  void* (*threadgroup_memory)(uint32_t site, uint32_t bytes, uint32_t alignment);
  // Lets the other threads of the threadgroup run, or returns at once where none can run. It is called after each
  // atomic load and each failed compare_exchange, so that a thread may wait for a flag that another one sets.
  void (*yield)();
  // The place of an address, as far as it is known.
  Space (*space)(const void* address);
  // Checking libraries call it before each access, with the address of the instruction after the call.
  void (*access)(const void* address, uint32_t size, uint32_t kind, const void* return_address);
  void (*finding)(const Finding*, const void* return_address);
};

struct Library {
  uint32_t version;
  uint32_t kernel_count;
  const Kernel* kernels;
  void (*bind)(const Runtime*);
  uint32_t checking;  // 1 if accesses are instrumented
  // The code of a checking library that is not the user's: what the compiler's checks call. Null in other libraries.
  const char *callbacks_begin, *callbacks_end;
};

}  // namespace msl_abi

// Every translated library exports this one symbol.
extern "C" const msl_abi::Library* msl_library();
