// Takes the place of the compiler in csrc/backends/cuda/python.cpp: the built-in kernels' programs, which the build has
// translated, are compiled by NVRTC in this process.
#include "compiler.h"

#include "../../backends/cuda/kernels.h"
#include "../../gpu/kernel_index.h"
#include "../context.h"
#include "../error.h"
#include "../program/json.h"
#include "../program/kernels.h"

#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <sstream>
#include <stdexcept>
#include <string_view>
#include <utility>

namespace metalcore::c_api {
namespace {

constexpr const char* kEntry = "metalcore_0";
// The program is compiled inside this namespace, so that its names hide CUDA's own float4, exp …
constexpr const char* kNamespace = "metal_program";

bool has_matrices(std::string_view program) {
  for (std::string_view name : {"simdgroup_matrix", "simdgroup_float8x8", "simdgroup_half8x8", "simdgroup_bfloat8x8"})
    if (program.find(name) != std::string_view::npos) return true;
  return false;
}

// Whether the program's kernels wait themselves for those before them (kernels/common/earlier.h).
bool waits(const std::string& program) {
  static const std::regex call(R"(\bmetalcore_await_earlier_kernels\([^()]*\b0\))");
  return std::regex_search(program, call);
}

std::string joined(const Json& words, std::string_view between) {
  std::string text;
  for (const Json& word : words.items) text += (text.empty() ? "" : std::string(between)) + word.text;
  return text;
}

struct Block {
  std::string members;                       // after the grid
  std::map<std::string, std::string> bound;  // "b0" …: C++ for the argument
};

Block block_of(const cuda::Layout& layout) {
  Block block;
  const auto add = [&](const std::string& member, const std::string& binding, const std::string& value) {
    block.members += (block.members.empty() ? "" : " ") + member;
    block.bound[binding] = value;
  };
  cuda::for_each_bit(layout.buffers, [&](uint32_t i) {
    const std::string name = "b" + std::to_string(i);
    add("void* " + name + ";", name, "msl::buffer(block." + name + ")");
  });
  cuda::for_each_bit(layout.threadgroups, [&](uint32_t i) {
    const std::string name = "t" + std::to_string(i);
    add("uint64_t " + name + ";", name, "msl::threadgroup_argument(block." + name + ")");
  });
  cuda::for_each_bit(layout.bytes, [&](uint32_t i) {
    const std::string index = std::to_string(i), capacity = std::to_string(cuda::capacity_of(layout.capacity[i]));
    add("msl::Bytes<" + capacity + "> i" + index + ";", "b" + index, "msl::bytes(block.i" + index + ")");
  });
  return block;
}

// The C++ for all arguments, and the checks that stand before the entry.
std::pair<std::string, std::string> values_of(const std::string& kernel, const Json& arguments,
                                              const std::string& scope, const Block& block) {
  std::string checks, values;
  for (const Json& argument : arguments.items) {
    const std::string &name = argument.items.at(0).text, &kind = argument.items.at(1).text;
    const std::string index = std::to_string(static_cast<uint32_t>(argument.items.at(2).number));
    std::string condition = argument.items.at(3).text;
    values += ", ";
    if (kind != "buffer" && kind != "threadgroup") {
      values += "msl::" + kind + "()";
      continue;
    }
    if (!condition.empty() && !scope.empty()) condition = scope + "::" + condition;
    const auto bound = block.bound.find((kind == "buffer" ? "b" : "t") + index);
    if (bound != block.bound.end()) {
      values += condition.empty() ? bound->second : "msl::given<bool(" + condition + ")>(" + bound->second + ")";
      continue;
    }
    const std::string missing =
        "kernel '" + kernel + "': nothing is bound to argument '" + name + "' ([[" + kind + "(" + index + ")]])";
    if (condition.empty()) throw std::runtime_error("metalcore: " + missing);
    checks += "static_assert(!bool(" + condition + "), \"" + missing + "\");\n";
    values += "msl::absent()";
  }
  return {checks, values};
}

// Makes CUDA C++ of one kernel, as metalcore/msl/language/cuda_source.py does for the Python package: the translated
// program (lib/cuda/<family>.cu) with an entry for the kernel, bound as the layout says. `described` is the kernel's
// part of lib/cuda/<family>.json. Throws std::runtime_error where an argument is bound to nothing.
std::string cuda_source(const std::string& program, const std::string& kernel, const Json& described,
                        const cuda::Layout& layout) {
  const std::string entry = kEntry, scope = joined(described.at("scope"), "::");
  // The scope is that of the kernel's instantiation, so that its template arguments keep their meaning.
  std::string naming = "using " + entry + "_caller = msl::Caller<" + described.at("function").text + ">;";
  if (!scope.empty()) naming = "namespace " + scope + " { " + naming + " }";
  const std::string caller = (scope.empty() ? "" : scope + "::") + entry + "_caller";
  const Block block = block_of(layout);
  const auto [checks, values] = values_of(kernel, described.at("arguments"), scope, block);
  const auto threads = static_cast<uint32_t>(described.at("max_total_threads").number);
  const std::string bounds = threads ? "__launch_bounds__(" + std::to_string(threads) + ") " : "";

  std::string text = waits(program) ? "#define MSL_KERNELS_WAIT\n" : "";
  if (has_matrices(program)) text += "#define MSL_MATRIX_LANES\n";
  text += std::string("namespace ") + kNamespace + " {\n#include \"cuda/prelude.h\"\n" + program;
  text += "#line 1 \"msl_entries\"\n" + naming + "\n" + checks;
  text += "struct " + entry + "_block { msl::Grid grid; " + block.members + " };\n";
  text += "extern \"C\" __global__ void " + bounds + entry + "(const __grid_constant__ " + entry + "_block block) {\n";
  text += "  " + caller + "::call(block.grid" + values + ");\n}\n";
  return text + "}\n";
}

namespace fs = std::filesystem;

// What the programs include, in the package beside lib/.
fs::path headers() {
  const fs::path folder = kernels_folder();
  return (folder.has_filename() ? folder : folder.parent_path()).parent_path() / "msl" / "include";
}

fs::path programs() { return fs::path(kernels_folder()) / "cuda"; }

std::string content(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  if (!file) throw std::runtime_error("metalcore: cannot read " + path.string());
  return text.str();
}

constexpr const char* kBuiltinFlag = "-DMSL_CONVERGENT=1";  // that of metalcore/msl/nvidia/cuda.py
constexpr const char* kGeneratedFlag = "--fmad=false";      // that of metalcore/_core/generated_kernels.py

std::string cubin(const std::string& text, int arch, const char* flag) {
  return nvrtc().compile(text, arch, {headers().string(), (headers() / "cuda").string()}, flag);
}

cuda::Compiled compiled(int arch, const cuda::Request& request) {
  const cuda::Layout layout = cuda::parse_layout(request.signature);
  if (const CudaText* generated = generated_cuda(request.kernel)) {
    const std::string text = cuda_source(generated->program, request.kernel, generated->kernel, layout);
    return {cubin(text, arch, kGeneratedFlag), kEntry, ""};
  }
  static const gpu::KernelIndex index(kernels_folder());
  const std::string& family = index.family(request.kernel);
  const std::string file = (programs() / family).string();
  const Json described = Json::parse(content(file + ".json"));
  const std::string text =
      cuda_source(content(file + ".cu"), request.kernel, described.at("kernels").at(request.kernel), layout);
  return {cubin(text, arch, kBuiltinFlag), kEntry, family + ".metal"};
}

}  // namespace

void require_compiler() {
  std::error_code error;
  for (const fs::path& folder : {programs(), headers()})
    if (!fs::is_directory(folder, error))
      throw Error(METALCORE_NO_KERNELS, "kernels for NVIDIA GPUs need '" + folder.string() + "', which is missing");
  nvrtc();
}

}  // namespace metalcore::c_api

namespace metalcore::cuda {

std::vector<Compiled> compile(int arch, const std::vector<Request>& requests) {
  std::vector<Compiled> results;
  results.reserve(requests.size());
  for (const Request& request : requests) results.push_back(c_api::compiled(arch, request));
  return results;
}

}  // namespace metalcore::cuda
