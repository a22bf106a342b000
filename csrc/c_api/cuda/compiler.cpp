// Takes the place of csrc/backends/cuda/compiler.cpp: the built-in kernels' programs, which the build has translated,
// are compiled by NVRTC in this process.
#include "compiler.h"

#include "nvrtc.h"
#include "source.h"

#include "../../backends/cuda/compiler.h"
#include "../../gpu/kernel_index.h"
#include "../error.h"
#include "../kernels_folder.h"
#include "../program/generated.h"

#include <filesystem>
#include <fstream>
#include <sstream>
#include <stdexcept>

namespace metalcore::c_api {
namespace {

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
