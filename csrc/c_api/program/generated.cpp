#include "generated.h"

#include "../../gpu/kernel_index.h"

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

// What cuda_source() reads of it.
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

const CudaText* generated_cuda(std::string_view kernel) {
  const std::lock_guard lock(cuda_texts().mutex);
  const auto found = cuda_texts().by_kernel.find(kernel);
  return found == cuda_texts().by_kernel.end() ? nullptr : &found->second;
}

}  // namespace metalcore::c_api
