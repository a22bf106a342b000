// The devices, and the way from a program to a pipeline. A kernel is the simulator's kernel of the same name.
//
// The environment makes it a worse machine:
//   METAL_RUNTIME_DEVICES=0         no GPU, until metal_runtime_add_device() is called
//   METAL_RUNTIME_DEVICES=default   the list of GPUs is empty, and there is a default one
//   METAL_RUNTIME_MACOS=<n>         that version of macOS: 14, or else 15
//   METAL_RUNTIME_CORES=<n>         IOKit's registry says so many cores, and not 8; 0: it says nothing
//   METAL_RUNTIME_REFUSES=<a>,<b>   no pipelines of kernels whose names begin so
//   METAL_RUNTIME_THREADS=<n>       pipelines take no more threads a threadgroup
#import "runtime.h"
#include "static_memory.h"

#include "../../csrc/backends/mps/io_registry.h"
#include "../../csrc/backends/simulator/launch.h"
#include "../../csrc/backends/simulator/library.h"
#include "../../csrc/backends/simulator/modes.h"

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

// Since macOS 15 the mode and the functions of floating-point arithmetic have properties of their own, which take the
// place of the old switch, and which are fast by default.
@interface RuntimeCompileOptions : MTLCompileOptions {
 @public
  BOOL fast_math_;
  NSInteger math_mode_, math_functions_;
  MTLLanguageVersion version_;
}
@end

static bool is_macos_14() {
  const char* version = std::getenv("METAL_RUNTIME_MACOS");
  return version && std::string(version) == "14";
}

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
  math_mode_ = 2;  // MTLMathModeFast
  return self;
}
- (BOOL)respondsToSelector:(SEL)selector {
  const bool is_new = sel_isEqual(selector, @selector(setMathMode:)) ||
                      sel_isEqual(selector, @selector(setMathFloatingPointFunctions:));
  return is_new && is_macos_14() ? NO : [super respondsToSelector:selector];
}
- (void)setMathMode:(NSInteger)mode {
  require(!is_macos_14(), "unrecognized selector setMathMode: of macOS 14's MTLCompileOptions");
  math_mode_ = mode;
}
- (void)setMathFloatingPointFunctions:(NSInteger)functions {
  require(!is_macos_14(), "unrecognized selector setMathFloatingPointFunctions: of macOS 14's MTLCompileOptions");
  math_functions_ = functions;
}
- (BOOL)fastMathEnabled {
  return fast_math_;
}
- (void)setFastMathEnabled:(BOOL)enabled {
  require(is_macos_14(), "fastMathEnabled is set, which macOS 15 deprecates");
  fast_math_ = enabled;
}
- (MTLLanguageVersion)languageVersion {
  return version_;
}
- (void)setLanguageVersion:(MTLLanguageVersion)version {
  version_ = version;
}
@end

static void require_ieee(const RuntimeCompileOptions* options) {
  if (is_macos_14()) return require(!options->fast_math_, "a program is compiled with fast math");
  require(options->math_mode_ == 0, "a program is compiled with another math mode than MTLMathModeSafe");
  require(options->math_functions_ == 1, "a program is compiled with the fast floating-point functions");
}

@interface RuntimeLibrary : NSObject <MTLLibrary> {
 @public
  std::string* program;
}
@end

@implementation RuntimeLibrary
- (id<MTLFunction>)newFunctionWithName:(NSString*)name {
  const std::string wanted = metal_runtime::text(name);
  const auto has = [&](const std::string& part) { return program->find(part) != std::string::npos; };
  if (!has("host_name(\"" + wanted + "\")") && !has(" " + wanted + "(") && !has("\n" + wanted + "(")) return nil;
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
  require_ieee(static_cast<RuntimeCompileOptions*>(options));
  const std::string text = metal_runtime::text(source);
  constexpr const char* kMacro = "METALCORE_HALF_SUBNORMALS";
  if (text.find(kMacro) != std::string::npos)
    require((text.find(std::string("#define ") + kMacro + " 0\n") == 0) == simulator::flushes_subnormals(),
            "a program counts on subnormal numbers of float16 where they become zero, or avoids them where not");
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

static std::string devices() {
  const char* given = std::getenv("METAL_RUNTIME_DEVICES");
  return given ? given : "1";
}

// nil, as it may be for a process without CoreGraphics, except where it is the only way.
extern "C" id<MTLDevice> MTLCreateSystemDefaultDevice() {
  return devices() == "default" ? [metal_runtime::device() retain] : nil;
}

static std::atomic<bool> has_device = devices() == "1";

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

// IOKit's registry has one GPU. Objects are counted, and each has to be given back.
namespace {

constexpr uint32_t kIterator = 1, kGpu = 2;
std::atomic<int> given = 0;
std::atomic<bool> asked = false;
int32_t registry_cores = 0;

}  // namespace

extern "C" {

CFMutableDictionaryRef IOServiceMatching(const char* name) {
  return std::string(name) == "AGXAccelerator" ? reinterpret_cast<CFMutableDictionaryRef>(&registry_cores) : nullptr;
}

kern_return_t IOServiceGetMatchingServices(mach_port_t, CFDictionaryRef matching, io_iterator_t* existing) {
  const char* cores = std::getenv("METAL_RUNTIME_CORES");
  registry_cores = cores ? std::atoi(cores) : 8;
  asked = false;
  if (static_cast<const void*>(matching) != &registry_cores || registry_cores == 0) return 1;
  *existing = kIterator;
  ++given;
  return 0;
}

io_object_t IOIteratorNext(io_iterator_t iterator) {
  require(iterator == kIterator, "what is asked for the next object is no iterator");
  if (asked.exchange(true)) return 0;
  ++given;
  return kGpu;
}

CFTypeRef IORegistryEntryCreateCFProperty(io_object_t entry, CFStringRef key, CFAllocatorRef, uint32_t) {
  require(entry == kGpu, "a property of what is no entry of the registry");
  if (metal_runtime::text((NSString*)key) != "gpu-core-count") return nullptr;
  ++given;
  return &registry_cores;
}

kern_return_t IOObjectRelease(io_object_t object) {
  require(object != 0 && given-- > 0, "an object of IOKit's is released twice");
  return 0;
}

Boolean CFNumberGetValue(CFNumberRef number, CFNumberType type, void* value) {
  require(static_cast<const void*>(number) == &registry_cores && type == kCFNumberSInt32Type,
          "this is no number of 32 bits");
  *static_cast<int32_t*>(value) = registry_cores;
  return 1;
}

void CFRelease(CFTypeRef object) { require(object != nullptr && given-- > 0, "an object is released twice"); }

}  // extern "C"

extern "C" __attribute__((visibility("default"))) int metal_runtime_registry_objects() { return given; }
