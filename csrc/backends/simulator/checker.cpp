#include "launch.h"
#include "runtime.h"

#include <stdexcept>

namespace metalcore::simulator {
const msl_abi::Runtime* checking_runtime() { return normal_runtime(); }
void execute_checked(const Launch&) { throw std::runtime_error("metalcore: checking mode is not built yet"); }
}  // namespace metalcore::simulator
