// The standard headers that metal/ uses.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
