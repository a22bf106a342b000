// Which family each built-in kernel is in.
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <string_view>

namespace metalcore::gpu {

// A family is named by the path of its source below kernels/, without the suffix, and so are its files in lib/.
class KernelIndex {
 public:
  // Reads lib/index: lines "<family> <kernel> <kernel> …". Throws std::runtime_error where that cannot be read.
  explicit KernelIndex(const std::filesystem::path& library);

  // Throws std::runtime_error for an unknown kernel.
  const std::string& family(std::string_view kernel) const;

  const std::map<std::string, std::string, std::less<>>& families() const { return families_; }  // by kernel

 private:
  std::string path_;
  std::map<std::string, std::string, std::less<>> families_;
};

}  // namespace metalcore::gpu
