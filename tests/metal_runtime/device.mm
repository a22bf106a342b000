// The way from a program to a pipeline. A kernel is the simulator's kernel of the same name.
#import "runtime.h"
#include "static_memory.h"

#include "../../csrc/backends/simulator/launch.h"
#include "../../csrc/backends/simulator/library.h"

#import <objc/runtime.h>

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
  // Without the attribute Metal may allow fewer than 1024 threads, where a thread has many registers.
  return kernel->max_total_threads ? kernel->max_total_threads : 384;
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

@interface RuntimeLibrary : NSObject <MTLLibrary>
@end

@implementation RuntimeLibrary
- (id<MTLFunction>)newFunctionWithName:(NSString*)name {
  RuntimeFunction* function = [[RuntimeFunction alloc] init];
  function->name = new std::string(metal_runtime::text(name));
  return function;
}
@end

@interface RuntimeDevice : NSObject <MTLDevice>
@end

@implementation RuntimeDevice
- (NSUInteger)maxThreadgroupMemoryLength {
  return 32 * 1024;
}
- (BOOL)supportsFamily:(MTLGPUFamily)family {
  return family >= MTLGPUFamilyApple1 && family <= MTLGPUFamilyApple1 + 6;
}
- (id<MTLLibrary>)newLibraryWithSource:(NSString*)source options:(MTLCompileOptions*)options error:(NSError**)error {
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
  return [[RuntimeLibrary alloc] init];
}
- (id<MTLLibrary>)newLibraryWithURL:(NSURL*)url error:(NSError**)error {
  *error = metal_runtime::error(metal_runtime::path(url) + ": not for this machine");
  return nil;
}
- (id<MTLComputePipelineState>)newComputePipelineStateWithFunction:(id<MTLFunction>)function error:(NSError**)error {
  const std::string& name = *static_cast<RuntimeFunction*>(function)->name;
  try {
    const auto found = simulator::find_builtin(name, false);
    RuntimePipeline* pipeline = [[RuntimePipeline alloc] init];
    pipeline->name = new std::string(name);
    pipeline->kernel = found.kernel;
    pipeline->static_memory = metal_runtime::static_memory(found);
    return pipeline;
  } catch (const std::exception& failure) {
    *error = metal_runtime::error(failure.what());
    return nil;
  }
}
@end

id<MTLDevice> MTLCreateSystemDefaultDevice() { return [metal_runtime::device() retain]; }

namespace metalcore::metal_runtime {

id<MTLDevice> device() {
  static RuntimeDevice* const only = [[RuntimeDevice alloc] init];
  return only;
}

}  // namespace metalcore::metal_runtime
