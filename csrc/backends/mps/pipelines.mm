#import "pipelines.h"

#include "../../gpu/kernel_index.h"

#import <Foundation/Foundation.h>

#include <dlfcn.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>
#include <stdexcept>

namespace metalcore::mps {
namespace {

namespace fs = std::filesystem;

// lib beside this extension, with metal/<family>.metal and, where the package was built with Apple's compiler,
// metal/<family>.metallib.
fs::path library_folder() {
  Dl_info here = {};
  if (!dladdr(reinterpret_cast<const void*>(&library_folder), &here) || !here.dli_fname)
    throw std::runtime_error("metalcore: cannot tell where the extension was loaded from");
  return fs::path(here.dli_fname).parent_path() / "lib";
}

std::string content(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  if (!file) throw std::runtime_error("metalcore: cannot read " + path.string());
  return text.str();
}

NSString* string(const std::string& text) {
  return [NSString stringWithCString:text.c_str() encoding:NSUTF8StringEncoding];
}

[[noreturn]] void refused(const std::string& what, NSError* error) {
  const char* reason = error ? error.localizedDescription.UTF8String : nullptr;
  throw std::runtime_error("metalcore: Metal refused " + what + ": " + (reason ? reason : "no reason given"));
}

// There is no fast math: every GPU gives the results of the source as it is written.
id<MTLLibrary> compile(id<MTLDevice> device, const fs::path& path) {
  MTLCompileOptions* options = [[[MTLCompileOptions alloc] init] autorelease];
  options.languageVersion = MTLLanguageVersion3_1;
  options.fastMathEnabled = NO;
  NSError* error = nil;
  id<MTLLibrary> library = [device newLibraryWithSource:string(content(path)) options:options error:&error];
  if (!library) refused(path.string(), error);
  return library;
}

id<MTLLibrary> open(id<MTLDevice> device, const fs::path& path) {
  NSError* error = nil;
  id<MTLLibrary> library = [device newLibraryWithURL:[NSURL fileURLWithPath:string(path.native())] error:&error];
  if (!library) refused(path.string(), error);
  return library;
}

class Kernels {
 public:
  Kernels() : folder_(library_folder() / "metal"), index_(library_folder()) {}

  const Pipeline& pipeline(id<MTLDevice> device, std::string_view kernel) {
    std::lock_guard lock(mutex_);
    if (const auto made = pipelines_.find(kernel); made != pipelines_.end()) return made->second;
    return pipelines_.emplace(kernel, make(device, index_.family(kernel), kernel)).first->second;
  }

  std::vector<std::string> names() const {
    std::vector<std::string> names;
    for (const auto& [kernel, family] : index_.families()) names.push_back(kernel);
    return names;
  }

 private:
  id<MTLLibrary> library(id<MTLDevice> device, const std::string& family) {
    id<MTLLibrary>& library = libraries_[family];
    if (!library) {
      const fs::path binary = folder_ / (family + ".metallib");
      library = fs::exists(binary) ? open(device, binary) : compile(device, folder_ / (family + ".metal"));
    }
    return library;
  }

  Pipeline make(id<MTLDevice> device, const std::string& family, std::string_view kernel) {
    const std::string what = "kernel '" + std::string(kernel) + "' of " + family + ".metal";
    id<MTLFunction> function = [[library(device, family) newFunctionWithName:string(std::string(kernel))] autorelease];
    if (!function) refused(what, nil);
    NSError* error = nil;
    id<MTLComputePipelineState> state = [device newComputePipelineStateWithFunction:function error:&error];
    if (!state) refused(what, error);
    return {state, state.maxTotalThreadsPerThreadgroup, state.staticThreadgroupMemoryLength};
  }

  const fs::path folder_;
  const gpu::KernelIndex index_;
  std::mutex mutex_;
  std::map<std::string, id<MTLLibrary>> libraries_;  // by family
  std::map<std::string, Pipeline, std::less<>> pipelines_;
};

// It is never destroyed: threads may still encode while the process ends.
Kernels& kernels() {
  static Kernels& made = *new Kernels;
  return made;
}

}  // namespace

const Pipeline& pipeline(id<MTLDevice> device, std::string_view kernel) { return kernels().pipeline(device, kernel); }

std::vector<std::string> kernel_names() { return kernels().names(); }

}  // namespace metalcore::mps
