// Translated libraries. Each is opened once, bound to the executor and never closed.
#pragma once

#include "host/kernel_abi.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace metalcore::simulator {

// The places of an opened library in memory: its code, and the constants that instrumented code reads.
class Segments {
 public:
  explicit Segments(const void* symbol_of_library);
  bool contain(const char* address, size_t size) const;
  bool is_code(const char* address) const;  // signal handlers may call it
  const char* base() const { return base_; }

 private:
  struct Range {
    const char *begin, *end;
    bool code;
  };
  const char* base_ = nullptr;
  std::vector<Range> ranges_;
};

// The services that a translated library is bound to.
const msl_abi::Runtime* normal_runtime();
const msl_abi::Runtime* checking_runtime();
const msl_abi::Runtime* counting_runtime();

struct Library {
  std::string path;
  std::string source;  // of built-in kernels: the path of the .metal file below kernels/; "" for other libraries
  const msl_abi::Library* abi;
  uint32_t id;
  Segments segments;

  bool checking() const { return abi->checking == 1; }
  bool counting() const { return abi->checking == 2; }
  bool is_code_of_kernels(const char* address) const {  // signal handlers may call it
    return segments.is_code(address) && (address < abi->callbacks_begin || address >= abi->callbacks_end);
  }
  const msl_abi::Kernel* find(std::string_view kernel) const;  // nullptr where there is none
};

struct KernelReference {
  const Library* library;
  const msl_abi::Kernel* kernel;
};

// "kernel 'x' of softmax.metal", so that errors can tell kernels apart; "kernel 'x'" where the source has no file.
std::string describe(const KernelReference& kernel);

// Opens the library at `path`, or returns it if it is open. Throws std::runtime_error that says what is wrong with it.
const Library& load_library(const std::string& path);
// The library with this id. Throws std::out_of_range.
const Library& library(uint32_t id);

// Built-in kernels lie in <library path>/<isa>/<family>.so, and in checking/<family>.so for checking mode; in which
// family, says gpu::KernelIndex. Where kernels flush subnormal numbers, a library in the folder of this name with
// -flushing behind it comes first. It is opened when one of its kernels is first asked for. A generated kernel is
// compiled then. Throws std::runtime_error for an unknown kernel.
KernelReference find_kernel(std::string_view kernel, bool checking);
// The same kernel in a library that counts, which is compiled where no one has before (compile_counting).
KernelReference find_counting_kernel(std::string_view kernel);
void set_library_path(const std::string& path);
std::string library_path();
// The name of the folder of built-in libraries that suits this CPU best among those that exist.
std::string builtin_isa();

}  // namespace metalcore::simulator
