// The built-in kernels as Metal pipelines. A pipeline is made on the first use of its kernel and kept.
//
// A kernel that Metal refuses costs its family: it is marked, tell() gets Metal's message, and calls that need
// another kernel of it throw gpu::KernelRefused at once. Pipelines that were made before stay.
#pragma once

#import <Metal/Metal.h>

#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace metalcore::mps {

// How Metal compiles kernels (compile_options.mm): every GPU gives the results of the source as it is written.
// tools/build/metal_kernels.py has the same for the binaries. The object is autoreleased.
MTLCompileOptions* compile_options();

// The library that pipelines are part of defines the next two: the Python extension in python.mm, the library for C in
// csrc/c_api/metal/backend.mm.
//
// The folder with `index`, metal/<family>.metal and, where the package was built with Apple's compiler,
// metal/<family>.metallib.
std::filesystem::path library_folder();

// Has the user know that Metal refused something. No lock is held. May throw, where a warning is an error.
void tell(const std::string& notice);

struct Pipeline {
  id<MTLComputePipelineState> state;
  NSUInteger max_threads;    // per threadgroup
  NSUInteger static_memory;  // of a threadgroup, in bytes
};

// The pipelines of some kernels, in their order. Missing ones of a family are compiled together. That takes up to
// seconds, so no stream's queue may run it, nor should a thread with Python's GIL. Any thread may call this. Throws
// std::runtime_error for an unknown kernel.
std::vector<const Pipeline*> pipelines(id<MTLDevice> device, const std::vector<std::string_view>& kernels);

// Whether the GPU keeps float16's subnormal numbers. Kernels that decode packed weights count on it, and are compiled
// otherwise where it does not. The first answer is kept; it may take a compilation and a dispatch, as pipelines() does.
bool has_half_subnormals(id<MTLDevice> device);

// Marks the family of a kernel whose pipeline is of no use on this GPU, and throws gpu::KernelRefused.
[[noreturn]] void refuse_family(std::string_view kernel, const std::string& reason);

// The families that are marked, with the reasons.
std::map<std::string, std::string> refused_families();

// The families of all kernels, by the kernels' names.
const std::map<std::string, std::string, std::less<>>& kernel_families();

}  // namespace metalcore::mps
