// Takes the place of what csrc/backends/mps/python.mm defines of surroundings.h.
#include "../../backends/mps/surroundings.h"

#include "../kernels_folder.h"

namespace metalcore::mps {

std::filesystem::path library_folder() { return c_api::kernels_folder(); }

// A call that needs what was refused returns Metal's message. A binary that Metal does not open is compiled from
// source.
void tell(const std::string&) {}

}  // namespace metalcore::mps
