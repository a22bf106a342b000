// The standard headers that metal/ rests on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
