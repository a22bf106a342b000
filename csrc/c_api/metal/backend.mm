// Takes the place of csrc/backends/mps/backend.mm: recordings are encoded in the command buffer of the running call's
// context, which the call waits for at its end.
#include "../../gpu/backend.h"

#import "memory.h"
#include "pool.h"

#include "../context.h"

#import "../../backends/mps/device.h"
#import "../../backends/mps/encoder.h"

#include <stdexcept>
#include <vector>

namespace metalcore::c_api {
namespace {

class MetalBackend final : public gpu::Backend {
 public:
  std::string_view device_type() const override { return "mps"; }
  std::string_view family() override { return mps::gpu_family(); }
  bool bounds_work() const override { return true; }

  void submit(int, const gpu::Recording& recording, size_t first) override {
    Commands& commands = static_cast<MetalMemory&>(*running().memory).commands();
    const std::vector<const mps::Pipeline*> pipelines = mps::made_pipelines(recording, first, commands.device());
    in_pool([&] { mps::encode(commands, recording, first, recording.dispatches().size(), pipelines.data()); });
  }

  std::unique_ptr<gpu::Prepared> prepare(int, const gpu::Recording&) override {
    throw std::logic_error("metalcore: the C interface was to keep a recording");
  }
};

MetalBackend backend;
const gpu::BackendRegistration registered(backend);

}  // namespace
}  // namespace metalcore::c_api
