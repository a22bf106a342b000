// The devices, and the way from a program to a pipeline. A kernel is the simulator's kernel of the same name.
//
// The environment makes it a worse machine:
//   METAL_RUNTIME_DEVICES=0         no GPU, until metal_runtime_add_device() is called
//   METAL_RUNTIME_REFUSES=<a>,<b>   no pipelines of kernels whose names begin so
//   METAL_RUNTIME_THREADS=<n>       pipelines take no more threads a threadgroup
#import "runtime.h"
#include "static_memory.h"

#include "../../csrc/backends/simulator/launch.h"
#include "../../csrc/backends/simulator/library.h"

#import <objc/runtime.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <sstream>

using namespace metalcore;
using metal_runtime::require;

@implementation RuntimeFunction
- (void)dealloc {
  delete name;
  [super dealloc];
}
@end

@implementation RuntimePipeline
- (NSUInteger)maxTotalThreadsPerThreadgroup {
  const char* most = std::getenv("METAL_RUNTIME_THREADS");
  // Without the attribute Metal may allow fewer than 1024 threads, where a thread has many registers.
  const NSUInteger threads = kernel->max_total_threads ? kernel->max_total_threads : 384;
  return most ? std::min<NSUInteger>(threads, std::strtoul(most, nullptr, 10)) : threads;
}
- (NSUInteger)staticThreadgroupMemoryLength {
  return static_memory;
}
- (void)dealloc {
  delete name;
  [super dealloc];
}
@end

@interface RuntimeCompileOptions : MTLCompileOptions {
  BOOL fast_math_;
  MTLLanguageVersion version_;
}
@end

@implementation MTLCompileOptions
@dynamic fastMathEnabled, languageVersion;
+ (instancetype)alloc {
  if ((Class)self == objc_getClass("RuntimeCompileOptions")) return [super alloc];
  return [RuntimeCompileOptions alloc];
}
@end

@implementation RuntimeCompileOptions
- (instancetype)init {
  fast_math_ = YES;
  return self;
}
- (BOOL)fastMathEnabled {
  return fast_math_;
}
- (void)setFastMathEnabled:(BOOL)enabled {
  fast_math_ = enabled;
}
- (MTLLanguageVersion)languageVersion {
  return version_;
}
- (void)setLanguageVersion:(MTLLanguageVersion)version {
  version_ = version;
}
@end

@interface RuntimeLibrary : NSObject <MTLLibrary> {
 @public
  std::string* program;
}
@end

@implementation RuntimeLibrary
- (id<MTLFunction>)newFunctionWithName:(NSString*)name {
  const std::string wanted = metal_runtime::text(name);
  if (program->find("host_name(\"" + wanted + "\")") == std::string::npos &&
      program->find(" " + wanted + "(") == std::string::npos)
    return nil;
  RuntimeFunction* function = [[RuntimeFunction alloc] init];
  function->name = new std::string(wanted);
  return function;
}
- (void)dealloc {
  delete program;
  [super dealloc];
}
@end

static bool is_refused(const std::string& name) {
  const char* beginnings = std::getenv("METAL_RUNTIME_REFUSES");
  std::istringstream list(beginnings ? beginnings : "");
  for (std::string beginning; std::getline(list, beginning, ',');)
    if (name.rfind(beginning, 0) == 0) return true;
  return false;
}

static std::atomic<int> compiled_programs, compiled_instantiations, made_pipelines;

static size_t count_of(const std::string& text, const std::string& part) {
  size_t count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

@interface RuntimeDevice : NSObject <MTLDevice>
@end

@implementation RuntimeDevice
- (NSUInteger)maxThreadgroupMemoryLength {
  return 32 * 1024;
}
- (NSUInteger)maxBufferLength {
  return metal_runtime::largest_buffer();
}
- (id<MTLCommandQueue>)newCommandQueue {
  return metal_runtime::new_queue();
}
- (id<MTLBuffer>)newBufferWithLength:(NSUInteger)length options:(MTLResourceOptions)options {
  require(options == MTLResourceStorageModeShared, "a buffer that the CPU does not share");
  return metal_runtime::new_buffer(length);
}
- (BOOL)supportsFamily:(MTLGPUFamily)family {
  return family >= MTLGPUFamilyApple1 && family <= MTLGPUFamilyApple1 + 6;
}
- (id<MTLLibrary>)newLibraryWithSource:(NSString*)source options:(MTLCompileOptions*)options error:(NSError**)error {
  metal_runtime::require_time("a program is compiled");
  require(options && options.languageVersion == MTLLanguageVersion3_1, "a program is not compiled as MSL 3.1");
  require(!options.fastMathEnabled, "a program is compiled with fast math");
  const std::string text = metal_runtime::text(source);
  if (const size_t at = text.find("#error"); at != std::string::npos) {
    *error = metal_runtime::error("program_source: " + text.substr(at, text.find('\n', at) - at));
    return nil;
  }
  require(text.find("#include \"") == std::string::npos, "a program includes a file, which Metal does not find");
  require(text.find("function_constant") == std::string::npos,
          "a program has function constants, to which newFunctionWithName: gives no values");
  RuntimeLibrary* library = [[RuntimeLibrary alloc] init];
  library->program = new std::string(text);
  ++compiled_programs;
  compiled_instantiations += static_cast<int>(count_of(text, "[[host_name("));
  return library;
}
- (id<MTLLibrary>)newLibraryWithURL:(NSURL*)url error:(NSError**)error {
  *error = metal_runtime::error(metal_runtime::path(url) + ": not for this machine");
  return nil;
}
- (id<MTLComputePipelineState>)newComputePipelineStateWithFunction:(id<MTLFunction>)function error:(NSError**)error {
  const std::string& name = *static_cast<RuntimeFunction*>(function)->name;
  metal_runtime::require_time("a pipeline is made");
  if (is_refused(name)) {
    *error = metal_runtime::error("Compiler encountered an internal error");
    return nil;
  }
  try {
    const auto found = simulator::find_kernel(name, false);
    RuntimePipeline* pipeline = [[RuntimePipeline alloc] init];
    pipeline->name = new std::string(name);
    pipeline->kernel = found.kernel;
    pipeline->static_memory = metal_runtime::static_memory(found);
    ++made_pipelines;
    return pipeline;
  } catch (const std::exception& failure) {
    *error = metal_runtime::error(failure.what());
    return nil;
  }
}
@end

// nil, as it may be for a process without CoreGraphics.
extern "C" id<MTLDevice> MTLCreateSystemDefaultDevice() { return nil; }

static std::atomic<bool> has_device = [] {
  const char* devices = std::getenv("METAL_RUNTIME_DEVICES");
  return !devices || std::string(devices) != "0";
}();

NSArray* MTLCopyAllDevices() { return metal_runtime::array(has_device ? metal_runtime::device() : nil); }

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED void metal_runtime_add_device() { has_device = true; }

// "<programs compiled from source> <instantiations of kernels in them>"
EXPORTED const char* metal_runtime_compiled() {
  static thread_local std::string text;
  text = std::to_string(compiled_programs) + " " + std::to_string(compiled_instantiations);
  return text.c_str();
}

namespace metalcore::metal_runtime {

int programs_and_pipelines() { return compiled_programs + made_pipelines; }

id<MTLDevice> device() {
  static RuntimeDevice* const only = [[RuntimeDevice alloc] init];
  return only;
}

}  // namespace metalcore::metal_runtime
