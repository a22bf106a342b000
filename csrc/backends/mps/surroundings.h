// What pipelines need of the library that they are part of: the Python extension (python.mm), or the library for C
// (csrc/c_api/metal/backend.mm).
#pragma once

#include <filesystem>
#include <string>

namespace metalcore::mps {

// The folder with `index`, metal/<family>.metal and, where the package was built with Apple's compiler,
// metal/<family>.metallib.
std::filesystem::path library_folder();

// Has the user know that Metal refused something. No lock is held. May throw, where a warning is an error.
void tell(const std::string& notice);

}  // namespace metalcore::mps
