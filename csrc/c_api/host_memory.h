// Memory of the host.
#pragma once

#include "arena.h"

#include <memory>

namespace metalcore::c_api {

std::unique_ptr<Memory> host_memory();

}  // namespace metalcore::c_api
