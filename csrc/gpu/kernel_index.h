// Where the kernels come from that recordings name: the family of a built-in one, the source of a generated one.
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <string_view>

namespace metalcore::gpu {

// A family's name is the path of its source below kernels/ without the suffix. Its files in lib/ have the same name.
class KernelIndex {
 public:
  // Reads lib/index: lines "<family> <kernel> <kernel> …". Throws std::runtime_error if it cannot read the file.
  explicit KernelIndex(const std::filesystem::path& library);

  // Throws std::runtime_error for an unknown kernel.
  const std::string& family(std::string_view kernel) const;

  const std::map<std::string, std::string, std::less<>>& families() const { return families_; }  // the keys are kernels

 private:
  std::string path_;
  std::map<std::string, std::string, std::less<>> families_;
};

// Kernels that Python makes while a process runs (metalcore/_core/generated_kernels.py). Recordings name them as they
// name the built-in ones. A name is made of the source's digest, so it never means another kernel.
void add_generated(std::string_view kernel, std::string_view source);

// The MSL of a generated kernel, or nullptr.
const std::string* generated_source(std::string_view kernel);

}  // namespace metalcore::gpu
