// Recordings of programs that were read from files.
#pragma once

#include "../../gpu/backend.h"

#include <memory>

namespace metalcore::simulator {

// Checks every dispatch as far as its arguments tell. One that is not trusted runs in checking mode, where no access
// leaves what is bound. Throws std::invalid_argument, or std::runtime_error where a kernel is missing.
std::unique_ptr<gpu::Prepared> prepare_program(const gpu::Recording& recording, bool trusted);

}  // namespace metalcore::simulator
