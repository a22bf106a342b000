#include "kernels.h"

#include "../../gpu/kernel_index.h"
#include "../context.h"

#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <stdexcept>

namespace metalcore::c_api {
namespace {

// Never destroyed: kernels may be compiled while the process ends.
struct CudaTexts {
  std::mutex mutex;
  std::map<std::string, CudaText, std::less<>> by_kernel;
};

CudaTexts& cuda_texts() {
  static auto* made = new CudaTexts;
  return *made;
}

[[noreturn]] void refuse(const std::string& kernel) {
  throw std::runtime_error("there is another kernel '" + kernel.substr(0, 80) + "' in this process");
}

// Refuses a description that lacks a part which cuda_source() reads.
void check_kernel(const Json& kernel) {
  kernel.at("function").string();
  kernel.at("max_total_threads").size(1024);
  for (const Json& scope : kernel.at("scope").array()) scope.string();
  for (const Json& argument : kernel.at("arguments").array()) {
    const std::vector<Json>& parts = argument.array();
    if (parts.size() != 4) throw std::runtime_error("a generated kernel's argument has four parts");
    parts[0].string(), parts[1].string(), parts[3].string();
    if (parts[2].kind != Json::Kind::kNull) parts[2].size(30);
  }
}

}  // namespace

const CudaText* generated_cuda(std::string_view kernel) {
  const std::lock_guard lock(cuda_texts().mutex);
  const auto found = cuda_texts().by_kernel.find(kernel);
  return found == cuda_texts().by_kernel.end() ? nullptr : &found->second;
}

namespace {

namespace fs = std::filesystem;

const gpu::KernelIndex& index() {
  static const gpu::KernelIndex read(kernels_folder());
  return read;
}

// The digest of each family, from lib/digests.
const std::map<std::string, std::string>& digests() {
  static const auto read = [] {
    std::map<std::string, std::string> found;
    std::ifstream file(fs::path(kernels_folder()) / "digests");
    for (std::string family, digest; file >> family >> digest;) found.emplace(family, digest);
    return found;
  }();
  return read;
}

bool is_builtin(const std::string& kernel) { return index().families().count(kernel) > 0; }

// Makes a kernel known, by its description in a file. Throws std::runtime_error where a kernel of the name has another
// source already.
void add_generated(const std::string& kernel, const Json& described, std::string_view device_type) {
  const std::string& source = described.at("msl").string();
  if (const std::string* known = gpu::generated_source(kernel); known && *known != source) refuse(kernel);
  if (device_type == "cuda") {
    const Json& cuda = described.at("cuda");
    const std::string& program = cuda.at("program").string();
    check_kernel(cuda.at("kernel"));
    const std::lock_guard lock(cuda_texts().mutex);
    const auto made = cuda_texts().by_kernel.emplace(kernel, CudaText{program, cuda.at("kernel")}).first;
    if (made->second.program != program) refuse(kernel);
  }
  gpu::add_generated(kernel, source);
}

}  // namespace

Kernels::Kernels(const Json& builtin, const Json& generated, std::string_view device_type)
    : builtin_(builtin.object()), generated_(generated.object()) {
  for (size_t i = 0; i < builtin.keys.size(); ++i) {
    const std::string& kernel = builtin.keys[i];
    if (!is_builtin(kernel)) throw std::runtime_error("this metalcore has no kernel '" + kernel + "'");
    const auto known = digests().find(index().family(kernel));
    if (known == digests().end() || known->second != builtin.items[i].string())
      throw std::runtime_error("kernel '" + kernel + "' is another one in this metalcore: save the program with it");
  }
  for (size_t i = 0; i < generated.keys.size(); ++i) {
    if (is_builtin(generated.keys[i]))
      throw std::runtime_error("a generated kernel has the name of '" + generated.keys[i] + "'");
    add_generated(generated.keys[i], generated.items[i], device_type);
  }
}

void Kernels::require(const std::string& kernel) const {
  if (!builtin_.find(kernel) && !generated_.find(kernel))
    throw std::runtime_error("the file does not say which kernel '" + kernel.substr(0, 80) + "' is");
}

}  // namespace metalcore::c_api
