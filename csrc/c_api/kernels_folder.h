// Where the kernels' libraries lie.
#pragma once

#include <string>

namespace metalcore::c_api {

// METALCORE_LIBRARY_DIR, or else the folder that libmetalcore lies in.
const std::string& kernels_folder();

// Tells the backends the folder, once. Throws Error where it has no kernels.
void find_kernels();

}  // namespace metalcore::c_api
