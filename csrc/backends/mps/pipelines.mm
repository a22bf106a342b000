#import "pipelines.h"

#import "device.h"

#include "../../gpu/backend.h"
#include "../../gpu/kernel_index.h"

#import <Foundation/Foundation.h>
#import <Metal/Metal.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <optional>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace metalcore::mps {
namespace {

namespace fs = std::filesystem;

// ---------------------------------------------------------------- sources, as tools/build/metal_kernels.py writes them

using Names = std::set<std::string, std::less<>>;

// Each instantiation is a line of its own: "/* kernel <name> */ template …;".
constexpr std::string_view kMark = "/* kernel ";

bool is_wanted(std::string_view line, const Names& kernels) {
  if (line.substr(0, kMark.size()) != kMark) return true;
  line.remove_prefix(kMark.size());
  return kernels.count(line.substr(0, line.find(' '))) > 0;
}

// Returns a family's program without the instantiations of templates that are not among `kernels`. Metal would compile
// each of them, which takes most of the time. Kernels that are no templates stay.
std::string program_of(const fs::path& source, const Names& kernels) {
  std::ifstream file(source, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  if (!file) throw std::runtime_error("metalcore: cannot read " + source.string());
  std::istringstream lines(text.str());
  std::string program;
  for (std::string line; std::getline(lines, line);)
    if (is_wanted(line, kernels)) (program += line) += '\n';
  return program;
}

// ---------------------------------------------------------------- subnormal numbers of float16

// The built-in kernel that tells whether a GPU keeps them, which the decoding of packed weights counts on; its family.
constexpr const char* kHalfSubnormals = "half_subnormals";
constexpr const char* kHalfSubnormalsFamily = "quant/subnormals";

// The macro of kernels/quant/formats.h. A program that has it is compiled with 0 where subnormal numbers become zero.
constexpr const char* kHalfSubnormalsMacro = "METALCORE_HALF_SUBNORMALS";

// Runs that kernel, and waits for it. True where the GPU gives no answer: by public reports Apple's GPUs keep them.
bool keeps_half_subnormals(id<MTLDevice> device, id<MTLComputePipelineState> kernel) {
  id<MTLCommandQueue> queue = [[device newCommandQueue] autorelease];
  id<MTLBuffer> smallest = [[device newBufferWithLength:sizeof(uint32_t)
                                                options:MTLResourceStorageModeShared] autorelease];
  id<MTLCommandBuffer> commands = [queue commandBuffer];
  id<MTLComputeCommandEncoder> encoder = [commands computeCommandEncoder];
  if (!smallest || !encoder) return true;
  auto* const number = static_cast<uint32_t*>([smallest contents]);
  *number = 1;
  [encoder setComputePipelineState:kernel];
  [encoder setBuffer:smallest offset:0 atIndex:0];
  [encoder dispatchThreads:MTLSizeMake(1, 1, 1) threadsPerThreadgroup:MTLSizeMake(1, 1, 1)];
  [encoder endEncoding];
  [commands commit];
  [commands waitUntilCompleted];
  return commands.status != MTLCommandBufferStatusCompleted || *number != 0;
}

// ---------------------------------------------------------------- pipelines

NSString* string(const std::string& text) {
  return [NSString stringWithCString:text.c_str() encoding:NSUTF8StringEncoding];
}

struct Refusal : std::runtime_error {
  Refusal(const std::string& what, NSError* error) : std::runtime_error(what + ": " + reason(error)) {}

 private:
  static std::string reason(NSError* error) {
    const char* text = error ? error.localizedDescription.UTF8String : nullptr;
    return text ? text : "no reason given";
  }
};

id<MTLLibrary> compile(id<MTLDevice> device, const std::string& program, const std::string& name) {
  NSError* error = nil;
  id<MTLLibrary> library = [device newLibraryWithSource:string(program) options:compile_options() error:&error];
  if (!library) throw Refusal(name, error);
  return library;
}

id<MTLLibrary> open(id<MTLDevice> device, const fs::path& path) {
  NSError* error = nil;
  id<MTLLibrary> library = [device newLibraryWithURL:[NSURL fileURLWithPath:string(path.native())] error:&error];
  if (!library) throw Refusal(path.filename().native(), error);
  return library;
}

using Pipelines = std::map<std::string, Pipeline, std::less<>>;

Pipelines pipelines_of(id<MTLDevice> device, id<MTLLibrary> library, const Names& kernels) {
  Pipelines made;
  for (const std::string& kernel : kernels) {
    const std::string what = "kernel '" + kernel + "'";
    id<MTLFunction> function = [[library newFunctionWithName:string(kernel)] autorelease];
    if (!function) throw Refusal(what, nil);
    NSError* error = nil;
    id<MTLComputePipelineState> state = [device newComputePipelineStateWithFunction:function error:&error];
    if (!state) throw Refusal(what, error);
    made[kernel] = {state, state.maxTotalThreadsPerThreadgroup, state.staticThreadgroupMemoryLength};
  }
  return made;
}

class Kernels {
 public:
  Kernels() : folder_(library_folder() / "metal"), index_(library_folder()) {}

  // Returns the pipelines of these kernels. A pipeline that is not made yet is nullptr.
  std::vector<const Pipeline*> made(const std::vector<std::string_view>& kernels) {
    const std::lock_guard lock(mutex_);
    std::vector<const Pipeline*> found;
    found.reserve(kernels.size());
    for (std::string_view kernel : kernels) {
      const auto at = pipelines_.find(kernel);
      found.push_back(at == pipelines_.end() ? nullptr : &at->second);
    }
    return found;
  }

  // Other threads may use what is made meanwhile.
  void make(id<MTLDevice> device, const std::vector<std::string_view>& kernels) {
    const std::lock_guard one_at_a_time(compiling_);
    const std::vector<const Pipeline*> found = made(kernels);
    std::map<std::string, Names> missing;  // by family
    for (size_t i = 0; i < kernels.size(); ++i)
      if (!found[i]) missing[family(kernels[i])].emplace(kernels[i]);
    for (const auto& [family, names] : missing) make(device, family, names);
  }

  bool ask_half_subnormals(id<MTLDevice> device) {
    const std::lock_guard one_at_a_time(compiling_);
    return has_half_subnormals(device);
  }

  [[noreturn]] void refuse(const std::string& family, const std::string& reason) {
    const std::string refused = "metalcore: Metal refused " + family + ".metal: " + reason;
    {
      const std::lock_guard lock(mutex_);
      if (refused_.emplace(family, reason).second)
        notices_.push_back(refused + "\nPyTorch's own ops run in the place of its kernels.");
    }
    throw gpu::KernelRefused(refused);
  }

  std::map<std::string, std::string> refused() {
    const std::lock_guard lock(mutex_);
    return refused_;
  }

  std::vector<std::string> take_notices() {
    const std::lock_guard lock(mutex_);
    return std::exchange(notices_, {});
  }

  // A generated kernel is a family of its own.
  std::string family(std::string_view kernel) const {
    return gpu::generated_source(kernel) ? std::string(kernel) : index_.family(kernel);
  }
  const gpu::KernelIndex& index() const { return index_; }

 private:
  void make(id<MTLDevice> device, const std::string& family, const Names& names) {
    if (const auto all = refused(); all.count(family)) refuse(family, all.at(family));
    try {
      if (!add_from_binary(device, family, names)) add(pipelines_of(device, compiled(device, family, names), names));
    } catch (const Refusal& refusal) {
      refuse(family, refusal.what());
    }
  }

  bool add_from_binary(id<MTLDevice> device, const std::string& family, const Names& names) {
    const fs::path path = folder_ / (family + ".metallib");
    std::error_code missing;
    if (!fs::exists(path, missing) || useless_.count(family)) return false;
    if (is_unlike_binaries(device, source(family, {}))) return false;
    try {
      id<MTLLibrary>& library = libraries_[path.native()];
      if (!library) library = open(device, path);
      add(pipelines_of(device, library, names));
      return true;
    } catch (const Refusal& refusal) {
      useless_.insert(family);
      const std::lock_guard lock(mutex_);
      notices_.push_back("metalcore: Metal refused " + path.string() + ": " + refusal.what() +
                         "\nThe source beside it is compiled instead.");
      return false;
    }
  }

  // The same kernels are compiled once. (Metal keeps what it compiled for later processes too.)
  id<MTLLibrary> compiled(id<MTLDevice> device, const std::string& family, const Names& names) {
    std::string program = source(family, names);
    if (is_unlike_binaries(device, program))
      program = std::string("#define ") + kHalfSubnormalsMacro + " 0\n" + program;
    id<MTLLibrary>& library = libraries_[program];
    if (!library) library = compile(device, program, "the program");
    return library;
  }

  std::string source(const std::string& family, const Names& names) const {
    const std::string* generated = gpu::generated_source(family);
    return generated ? *generated : program_of(folder_ / (family + ".metal"), names);
  }

  // Binaries are for GPUs that keep float16's subnormal numbers.
  bool is_unlike_binaries(id<MTLDevice> device, const std::string& program) {
    return program.find(kHalfSubnormalsMacro) != std::string::npos && !has_half_subnormals(device);
  }

  bool has_half_subnormals(id<MTLDevice> device) {
    if (!half_subnormals_) {
      half_subnormals_ = true;  // also where the kernel is refused
      try {
        make(device, kHalfSubnormalsFamily, {kHalfSubnormals});
        half_subnormals_ = keeps_half_subnormals(device, made({kHalfSubnormals}).front()->state);
      } catch (const gpu::KernelRefused&) {
      }
    }
    return *half_subnormals_;
  }

  void add(Pipelines made) {
    const std::lock_guard lock(mutex_);
    pipelines_.merge(made);
  }

  const fs::path folder_;
  const gpu::KernelIndex index_;

  std::mutex compiling_;
  std::map<std::string, id<MTLLibrary>> libraries_;  // by program, or by the path of a binary
  Names useless_;                                    // the families whose binary Metal refuses
  std::optional<bool> half_subnormals_;              // whether the GPU keeps them; nothing where nobody has asked

  std::mutex mutex_;  // of what is below
  Pipelines pipelines_;
  std::map<std::string, std::string> refused_;  // the reasons, by family
  std::vector<std::string> notices_;            // which nobody has been told
};

// It is never destroyed: threads may still encode while the process ends.
Kernels& kernels() {
  static Kernels& made = *new Kernels;
  return made;
}

// Calls `body`, and then tells what there is to tell, which may throw.
template <typename Body>
void noticing(const Body& body) {
  std::exception_ptr failure;
  try {
    in_pool(body);
  } catch (...) {
    failure = std::current_exception();
  }
  for (const std::string& notice : kernels().take_notices()) tell(notice);
  if (failure) std::rethrow_exception(failure);
}

}  // namespace

std::vector<const Pipeline*> pipelines(id<MTLDevice> device, const std::vector<std::string_view>& names) {
  std::vector<const Pipeline*> found = kernels().made(names);
  if (std::find(found.begin(), found.end(), nullptr) == found.end()) return found;
  noticing([&] { kernels().make(device, names); });
  return kernels().made(names);
}

bool has_half_subnormals(id<MTLDevice> device) {
  bool found = true;
  noticing([&] { found = kernels().ask_half_subnormals(device); });
  return found;
}

void refuse_family(std::string_view kernel, const std::string& reason) {
  noticing([&] { kernels().refuse(kernels().family(kernel), "kernel '" + std::string(kernel) + "': " + reason); });
  throw std::logic_error("unreachable");
}

std::map<std::string, std::string> refused_families() { return kernels().refused(); }

const std::map<std::string, std::string, std::less<>>& kernel_families() { return kernels().index().families(); }

}  // namespace metalcore::mps
