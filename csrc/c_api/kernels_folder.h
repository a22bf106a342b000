// Where the kernels' libraries lie.
#pragma once

#include <string>

namespace metalcore::c_api {

// METALCORE_LIBRARY_DIR, or else the folder that libmetalcore lies in.
const std::string& kernels_folder();

// Throws Error where the folder has no kernels. It looks once.
void require_kernels();

}  // namespace metalcore::c_api
