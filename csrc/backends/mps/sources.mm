#include "sources.h"

#include <fstream>
#include <sstream>
#include <stdexcept>
#include <string_view>

namespace metalcore::mps {

namespace {

// Each instantiation is a line of its own: "/* kernel <name> */ template …;".
constexpr std::string_view kMark = "/* kernel ";

bool is_wanted(std::string_view line, const Names& kernels) {
  if (line.substr(0, kMark.size()) != kMark) return true;
  line.remove_prefix(kMark.size());
  return kernels.count(line.substr(0, line.find(' '))) > 0;
}

}  // namespace

std::string program_of(const std::filesystem::path& source, const Names& kernels) {
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

}  // namespace metalcore::mps
