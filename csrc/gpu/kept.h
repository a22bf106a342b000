// Recordings that outlive their op. Python names them by a number to show, compare and submit them again.
#pragma once

#include "recorder.h"

#include <cstdint>
#include <memory>

namespace metalcore::gpu {

int64_t keep(std::shared_ptr<KeptRecording> recording);
void forget(int64_t number);
// Throws std::invalid_argument if no recording has this number.
std::shared_ptr<KeptRecording> kept(int64_t number);

}  // namespace metalcore::gpu
