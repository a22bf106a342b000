// How long dispatches take, by the backend's own cost model, on a GPU that tests make slower:
//   METAL_RUNTIME_SLOWNESS=<factor>
#import "commands.h"

#include "../../csrc/gpu/cost.h"

#include <atomic>
#include <cstdlib>
#include <utility>

using namespace metalcore;
using gpu::Dispatch, gpu::Recording;

namespace {

std::atomic<double> slowness = [] {
  const char* factor = std::getenv("METAL_RUNTIME_SLOWNESS");
  return factor ? std::strtod(factor, nullptr) : 1.0;
}();

constexpr double kUnknownSeconds = 1e-3;
thread_local double estimated = kUnknownSeconds;  // of the next dispatch

}  // namespace

#define SECONDS(prefix) prefix##_ZN9metalcore3gpu7secondsERKNS0_9RecordingERKNS0_8DispatchE
extern "C" double SECONDS(__real_)(const Recording& recording, const Dispatch& dispatch);
// The linker sends the backend's questions here.
extern "C" double SECONDS(__wrap_)(const Recording& recording, const Dispatch& dispatch) {
  return estimated = SECONDS(__real_)(recording, dispatch) * slowness;
}

#define AT_ONCE(prefix) prefix##_ZN9metalcore3gpu7at_onceERKNS0_9RecordingElNS0_4WorkEl
extern "C" int64_t AT_ONCE(__real_)(const Recording& recording, int64_t items, gpu::Work each, int64_t multiple);
// And the ops' here.
extern "C" int64_t AT_ONCE(__wrap_)(const Recording& recording, int64_t items, gpu::Work each, int64_t multiple) {
  return AT_ONCE(__real_)(recording, items, {each.flops * slowness, each.bytes * slowness}, multiple);
}

namespace metalcore::metal_runtime {

void set_slowness(double factor) { slowness = factor; }

void Work::add(const std::string& kernel) {
  const double before = std::exchange(seconds_, seconds_ + std::exchange(estimated, kUnknownSeconds * slowness));
  require(before == 0 || seconds_ <= gpu::kMostSeconds, "kernel '" + kernel + "' makes a command buffer's work " +
                                                            std::to_string(seconds_) +
                                                            " seconds long, and macOS ends long ones");
}

}  // namespace metalcore::metal_runtime
