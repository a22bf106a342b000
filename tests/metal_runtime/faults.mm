// Misuse of Metal, one rule of the validation at a time: metal_runtime_fault(name) returns the error that it caused.
#import "../../csrc/backends/mps/pipelines.h"
#import "../../csrc/backends/mps/stream.h"
#import "runtime.h"

#include <Python.h>

#include <array>
#include <cstring>
#include <exception>
#include <functional>
#include <map>
#include <mutex>

using namespace metalcore;

namespace {

using Raw = id<MTLComputeCommandEncoder>;

float memory[256];
constexpr const char* kKernel = "silu_dense_float";

// Calls `body` on the current stream's queue, as metalcore's backend does.
void on_queue(const std::function<void()>& body) {
  struct Work {
    const std::function<void()>& body;
    std::exception_ptr error;
  } work{body, nullptr};
  dispatch_sync_f(torch::mps::get_dispatch_queue(), &work, [](void* context) {
    @autoreleasepool {
      try {
        static_cast<Work*>(context)->body();
      } catch (...) {
        static_cast<Work*>(context)->error = std::current_exception();
      }
    }
  });
  if (work.error) std::rethrow_exception(work.error);
}

// Past metalcore's own checks, which would not let these through.
void encode_raw(const std::function<void(Raw)>& body) {
  at::mps::MPSStream* stream = at::mps::getCurrentMPSStream();
  on_queue([&] { body(stream->commandEncoder()); });
}

id<MTLBuffer> buffer_at(float* address) {
  return static_cast<id<MTLBuffer>>(metal_runtime::buffer_of(address, sizeof memory));
}

id<MTLBuffer> some_buffer() { return buffer_at(memory); }

struct OnStream {
  explicit OnStream(int stream) { metal_runtime::set_current_stream(stream); }
  ~OnStream() { metal_runtime::set_current_stream(0); }
};

// They are made before the queue, on which nothing may be compiled.
constexpr std::array kKernels = {kKernel, "softmax_thread_float", "softmax_block4_float", "jacobi_round"};
void make_pipelines() { mps::pipelines(metal_runtime::device(), {kKernels.begin(), kKernels.end()}); }

void set_pipeline(Raw encoder, const char* kernel = kKernel) {
  [encoder setComputePipelineState:mps::pipelines(metal_runtime::device(), {kernel}).front()->state];
}

void bind_all(Raw encoder) {
  for (int i = 0; i < 8; ++i) [encoder setBuffer:some_buffer() offset:0 atIndex:i];
}

void dispatch(Raw encoder, NSUInteger threads, NSUInteger group) {
  [encoder dispatchThreads:MTLSizeMake(threads, 1, 1) threadsPerThreadgroup:MTLSizeMake(group, 1, 1)];
}

// A result is read after its command buffer was committed, and `between`.
void read_after(const std::function<void()>& between) {
  memory[0] = memory[1] = 1;
  at::mps::MPSStream* stream = at::mps::getCurrentMPSStream();
  on_queue([&] {
    Raw encoder = stream->commandEncoder();
    set_pipeline(encoder);
    [encoder setBuffer:some_buffer() offset:0 atIndex:0];
    [encoder setBuffer:some_buffer() offset:4 atIndex:1];
    dispatch(encoder, 1, 1);
    stream->synchronize(at::mps::SyncType::COMMIT);
  });
  between();
  metal_runtime::require(memory[1] != 1, "a result is read before it is there");
}

}  // namespace

// The setters of macOS 15.
@protocol Since15
- (void)setMathMode:(NSInteger)mode;
- (void)setMathFloatingPointFunctions:(NSInteger)functions;
@end

namespace {

id<Since15> since_15(MTLCompileOptions* options) { return static_cast<id>(options); }

// Compiles a program with the backend's options, which `change` changes.
void compile(const char* source, void (*change)(MTLCompileOptions* options) = [](MTLCompileOptions*) {}) {
  NSError* error = nil;
  std::exception_ptr failure;
  @autoreleasepool {
    try {
      MTLCompileOptions* options = mps::compile_options();
      change(options);
      [metal_runtime::device() newLibraryWithSource:[NSString stringWithCString:source encoding:NSUTF8StringEncoding]
                                            options:options
                                              error:&error];
    } catch (...) {
      failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
}

void with_gil(const std::function<void()>& body) {
  const PyGILState_STATE state = PyGILState_Ensure();
  std::exception_ptr failure;
  try {
    body();
  } catch (...) {
    failure = std::current_exception();
  }
  PyGILState_Release(state);
  if (failure) std::rethrow_exception(failure);
}

// Memory that is allocated on one stream and freed while a command of another may be in flight.
bool released = false;
void use_and_free(int owner, int user, const std::function<void()>& between) {
  static float other[256];
  released = false;
  {
    const OnStream there(owner);
    metal_runtime::allocated(other, sizeof other);
  }
  id<MTLBuffer> buffer = buffer_at(other);
  const OnStream here(user);
  encode_raw([&](Raw encoder) {
    set_pipeline(encoder), bind_all(encoder);
    [encoder setBuffer:buffer offset:0 atIndex:0];
    dispatch(encoder, 1, 1);
  });
  between();
  if (!metal_runtime::freed(other, [](void*) { released = true; }, nullptr)) released = true;
}

// On a command queue of the program's own, as the library for C has it. An encoder is ended before its end.
using CommandBuffer = id<MTLCommandBuffer>;
void ending(Raw encoder, const std::function<void()>& steps) {
  try {
    steps();
  } catch (...) {
    [encoder endEncoding];
    throw;
  }
}
void on_own_queue(const std::function<void(CommandBuffer)>& body) {
  std::exception_ptr failure;
  @autoreleasepool {
    try {
      body([[metal_runtime::device() newCommandQueue] commandBuffer]);
    } catch (...) {
      failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
}

// silu of one 1, with some steps behind the dispatch.
void compute(const std::function<void(CommandBuffer, Raw)>& steps, int dispatches = 1) {
  on_own_queue([&](CommandBuffer commands) {
    id<MTLBuffer> buffer = [metal_runtime::device() newBufferWithLength:64 options:MTLResourceStorageModeShared];
    auto* const numbers = static_cast<float*>([buffer contents]);
    numbers[0] = numbers[1] = 1;
    Raw encoder = [commands computeCommandEncoder];
    ending(encoder, [&] {
      for (int i = 0; i < dispatches; ++i) {
        set_pipeline(encoder), bind_all(encoder);
        [encoder setBuffer:buffer offset:0 atIndex:0];
        [encoder setBuffer:buffer offset:4 atIndex:1];
        dispatch(encoder, 1, 1);
      }
    });
    [encoder endEncoding];
    steps(commands, encoder);
    metal_runtime::require(numbers[1] != 1, "a result is read before it is there");
  });
}

const std::map<std::string, std::function<void()>> kFaults = {
    {"none", [] { encode_raw([](Raw encoder) { set_pipeline(encoder), bind_all(encoder); }); }},
    {"an encoder kept after its block",
     [] {
       Raw kept = nil;
       encode_raw([&](Raw encoder) { kept = encoder; });
       encode_raw([&](Raw) { set_pipeline(kept); });
     }},
    {"an encoder kept across an op of PyTorch's",
     [] {
       Raw kept = nil;
       encode_raw([&](Raw encoder) { kept = encoder; });
       metal_runtime::finish(0);
       encode_raw([&](Raw) { set_pipeline(kept); });
     }},
    {"an encoder used off the queue",
     [] {
       Raw kept = nil;
       encode_raw([&](Raw encoder) { kept = encoder; });
       [kept setBuffer:nil offset:0 atIndex:0];
     }},
    {"commandEncoder() off the queue", [] { at::mps::getCurrentMPSStream()->commandEncoder(); }},
    {"another stream's encoder",
     [] {
       at::mps::MPSStream* first = at::mps::getCurrentMPSStream();
       const OnStream second(1);
       on_queue([&] { first->commandEncoder(); });
     }},
    {"another stream's queue",
     [] {
       dispatch_queue_t first = torch::mps::get_dispatch_queue();
       const OnStream second(1);
       dispatch_sync_f(first, nullptr, [](void*) {});
     }},
    {"the current stream asked for on the queue", [] { encode_raw([](Raw) { at::mps::getCurrentMPSStream(); }); }},
    {"an allocation on the queue", [] { encode_raw([](Raw) { metal_runtime::allocated(memory + 1, 4); }); }},
    {"an op of PyTorch's on the queue", [] { encode_raw([](Raw) { metal_runtime::finish(0); }); }},
    {"memory freed before its dispatch",
     [] {
       static float freed[4];
       metal_runtime::allocated(freed, sizeof memory);
       id<MTLBuffer> buffer = buffer_at(freed);
       metal_runtime::freed(freed, nullptr, nullptr);
       encode_raw([&](Raw encoder) {
         set_pipeline(encoder), bind_all(encoder);
         [encoder setBuffer:buffer offset:0 atIndex:0];
         dispatch(encoder, 1, 1);
       });
     }},
    {"memory freed while another stream's command is in flight",
     [] {
       use_and_free(1, 0, [] {});
       metal_runtime::finish(0);
     }},
    // This is right, and PyTorch's allocator does it: the memory is kept.
    {"memory freed while its own stream's command is in flight",
     [] {
       use_and_free(1, 1, [] {});
       metal_runtime::require(!released, "memory was released in flight");
       metal_runtime::finish(1);
       metal_runtime::require(released, "memory was not released");
     }},
    {"memory freed when another stream's command is over",
     [] {
       use_and_free(1, 0, [] { metal_runtime::finish(0); });
       metal_runtime::require(released, "memory was not released");
       metal_runtime::finish(0);
     }},
    {"a block on the queue within a block on the queue", [] { encode_raw([](Raw) { on_queue([] {}); }); }},
    {"an unbound buffer", [] { encode_raw([](Raw encoder) { set_pipeline(encoder), dispatch(encoder, 1, 1); }); }},
    {"a buffer bound for the kernel before",
     [] { encode_raw([](Raw encoder) { bind_all(encoder), set_pipeline(encoder), dispatch(encoder, 1, 1); }); }},
    {"buffers that an op of PyTorch's left bound",
     [] {
       encode_raw([](Raw encoder) { set_pipeline(encoder), bind_all(encoder), dispatch(encoder, 1, 1); });
       encode_raw([](Raw encoder) { set_pipeline(encoder), dispatch(encoder, 1, 1); });
     }},
    {"a buffer smaller than a struct",
     [] {
       encode_raw([](Raw encoder) {
         set_pipeline(encoder, "softmax_thread_float"), bind_all(encoder);
         [encoder setBuffer:some_buffer() offset:sizeof memory - 4 atIndex:2];
         dispatch(encoder, 1, 1);
       });
     }},
    {"more threads than registers may allow",
     [] { encode_raw([](Raw encoder) { set_pipeline(encoder), bind_all(encoder), dispatch(encoder, 385, 385); }); }},
    {"more threads than a template's instance has",
     [] {
       encode_raw([](Raw encoder) {
         set_pipeline(encoder, "softmax_block4_float"), bind_all(encoder), dispatch(encoder, 257, 257);
       });
     }},
    {"a result read after a commit without a wait", [] { read_after([] {}); }},
    {"a result read after a wait", [] { read_after([] { metal_runtime::finish(0); }); }},
    {"a command buffer that is too long",
     [] {
       encode_raw([](Raw encoder) {
         for (int i = 0; i < 1000; ++i) set_pipeline(encoder), bind_all(encoder), dispatch(encoder, 1, 1);
       });
     }},
    {"a commit off the queue", [] { at::mps::getCurrentMPSStream()->synchronize(at::mps::SyncType::COMMIT); }},
    {"a program's encoder used after its end",
     [] { compute([](CommandBuffer, Raw encoder) { set_pipeline(encoder); }); }},
    {"a program's command buffer committed with an open encoder",
     [] {
       on_own_queue(
           [](CommandBuffer commands) { ending([commands computeCommandEncoder], [&] { [commands commit]; }); });
     }},
    {"a program's command buffer committed twice",
     [] { compute([](CommandBuffer commands, Raw) { [commands commit], [commands commit]; }); }},
    {"a wait before a commit", [] { compute([](CommandBuffer commands, Raw) { [commands waitUntilCompleted]; }); }},
    {"a program's encoder behind a commit",
     [] { compute([](CommandBuffer commands, Raw) { [commands commit], [commands computeCommandEncoder]; }); }},
    {"PyTorch's encoder ended", [] { encode_raw([](Raw encoder) { [encoder endEncoding]; }); }},
    {"the memory of PyTorch's buffer", [] { [some_buffer() contents]; }},
    {"a buffer without bytes",
     [] { [metal_runtime::device() newBufferWithLength:0 options:MTLResourceStorageModeShared]; }},
    {"a program's command buffer that is too long", [] { compute([](CommandBuffer, Raw) {}, 1000); }},
    {"a program's result read without a wait", [] { compute([](CommandBuffer commands, Raw) { [commands commit]; }); }},
    {"a program's result read after a wait",
     [] { compute([](CommandBuffer commands, Raw) { [commands commit], [commands waitUntilCompleted]; }); }},
    {"no pipeline", [] { encode_raw([](Raw encoder) { dispatch(encoder, 1, 1); }); }},
    {"too many bytes",
     [] {
       static const char bytes[4097] = {};
       encode_raw([](Raw encoder) { [encoder setBytes:bytes length:sizeof bytes atIndex:0]; });
     }},
    {"no bytes", [] { encode_raw([](Raw encoder) { [encoder setBytes:memory length:0 atIndex:0]; }); }},
    {"an index beyond 30", [] { encode_raw([](Raw encoder) { [encoder setBuffer:nil offset:0 atIndex:31]; }); }},
    {"an offset outside the buffer",
     [] { encode_raw([](Raw encoder) { [encoder setBuffer:some_buffer() offset:sizeof memory + 4 atIndex:0]; }); }},
    {"an offset that is not aligned",
     [] {
       encode_raw([](Raw encoder) {
         set_pipeline(encoder), bind_all(encoder);
         [encoder setBuffer:some_buffer() offset:2 atIndex:0];
         dispatch(encoder, 1, 1);
       });
     }},
    {"no threads",
     [] { encode_raw([](Raw encoder) { set_pipeline(encoder), bind_all(encoder), dispatch(encoder, 0, 1); }); }},
    {"too many threads in a threadgroup",
     [] { encode_raw([](Raw encoder) { set_pipeline(encoder), bind_all(encoder), dispatch(encoder, 1, 1025); }); }},
    {"threadgroup memory beside a kernel's own",
     [] {
       encode_raw([](Raw encoder) {
         set_pipeline(encoder, "jacobi_round"), bind_all(encoder);
         [encoder setThreadgroupMemoryLength:8192 atIndex:0];
         dispatch(encoder, 256, 256);
       });
     }},
    {"threadgroup memory of an odd length",
     [] { encode_raw([](Raw encoder) { [encoder setThreadgroupMemoryLength:20 atIndex:0]; }); }},
    {"an address without useResource",
     [] {
       encode_raw([](Raw encoder) {
         set_pipeline(encoder), bind_all(encoder);
         const uint64_t address = some_buffer().gpuAddress;
         [encoder setBytes:&address length:sizeof address atIndex:0];
         dispatch(encoder, 1, 1);
       });
     }},
    {"a written buffer used for reading only",
     [] {
       encode_raw([](Raw encoder) {
         const id<MTLResource> buffer = some_buffer();
         [encoder useResources:&buffer count:1 usage:MTLResourceUsageRead];
       });
     }},
    {"no buffer among those in use",
     [] {
       encode_raw([](Raw encoder) {
         const id<MTLResource> buffer = nil;
         [encoder useResources:&buffer count:1 usage:MTLResourceUsageRead | MTLResourceUsageWrite];
       });
     }},
    {"a program compiled on the queue", [] { encode_raw([](Raw) { compile(""); }); }},
    {"a program compiled with the GIL", [] { with_gil([] { compile(""); }); }},
    {"the backend's options", [] { compile(""); }},
    {"fast math", [] { compile("", [](MTLCompileOptions* options) { options.fastMathEnabled = YES; }); }},
    {"another math mode", [] { compile("", [](MTLCompileOptions* options) { [since_15(options) setMathMode:1]; }); }},
    {"the fast functions",
     [] { compile("", [](MTLCompileOptions* options) { [since_15(options) setMathFloatingPointFunctions:0]; }); }},
    {"another version of Metal",
     [] {
       compile("", [](MTLCompileOptions* options) {
         options.languageVersion = static_cast<MTLLanguageVersion>(MTLLanguageVersion3_1 - 1);
       });
     }},
    {"an include", [] { compile("#include \"rows.h\""); }},
    {"a function constant", [] { compile("constant int n [[function_constant(0)]];"); }},
    {"a program that counts on subnormal numbers", [] { compile("#define METALCORE_HALF_SUBNORMALS 1\n"); }},
    {"a program that avoids subnormal numbers", [] { compile("#define METALCORE_HALF_SUBNORMALS 0\n"); }},
    {"an object autoreleased outside of a pool", [] { [[[NSURL alloc] init] autorelease]; }},
};

}  // namespace

extern "C" __attribute__((visibility("default"))) const char* metal_runtime_fault(const char* name) {
  static std::string said;
  said.clear();
  static std::once_flag once;
  std::call_once(once, [] { metal_runtime::allocated(memory, sizeof memory); });
  try {
    make_pipelines();
    kFaults.at(name)();
  } catch (const std::exception& error) {
    said = error.what();
  }
  return said.c_str();
}
