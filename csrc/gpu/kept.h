// Recordings that outlive their op, by number: for Python, which shows, compares and submits them again.
#pragma once

#include "recorder.h"

#include <cstdint>
#include <memory>

namespace metalcore::gpu {

int64_t keep(std::shared_ptr<KeptRecording> recording);
void forget(int64_t number);
// Throws std::invalid_argument where there is none of this number.
std::shared_ptr<KeptRecording> kept(int64_t number);

}  // namespace metalcore::gpu
