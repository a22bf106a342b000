// Takes the place of stream.mm, memory.mm and views.cpp in the library for C, which has nothing of PyTorch.
#import "runtime.h"

#include "../../csrc/backends/simulator/library.h"
#include "../../csrc/c_api/context.h"

using namespace metalcore;

namespace {

const bool found = [] {
  simulator::set_library_path(c_api::kernels_folder());
  return true;
}();

}  // namespace

namespace metalcore::metal_runtime {

void require_time(const std::string&) {}

}  // namespace metalcore::metal_runtime

// The program of tests/c_api asks for it: what the process has made of Metal's objects, except command buffers.
extern "C" __attribute__((visibility("default"))) size_t allocations_so_far() {
  return static_cast<size_t>(metal_runtime::programs_and_pipelines() + metal_runtime::buffers_and_queues());
}
