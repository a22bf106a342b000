// The kernels' sources, as tools/build/metal_kernels.py writes them for Metal.
#pragma once

#include <filesystem>
#include <set>
#include <string>

namespace metalcore::mps {

using Names = std::set<std::string, std::less<>>;

// A family's program without the instantiations of templates that are not among `kernels`. Metal would compile each of
// them, which takes most of the time. Kernels that are no templates stay.
std::string program_of(const std::filesystem::path& source, const Names& kernels);

}  // namespace metalcore::mps
