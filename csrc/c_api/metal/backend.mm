// Contexts for Apple's GPUs, and what takes the place of csrc/backends/mps/backend.mm and python.mm. Recordings are
// encoded in the command buffer of the running call's context, which the call waits for at its end.
#import "../../backends/mps/device.h"
#import "../../backends/mps/encoder.h"
#include "../../backends/mps/pipelines.h"
#include "../../gpu/backend.h"
#include "../context.h"
#include "../error.h"
#import "memory.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <memory>
#include <vector>

namespace metalcore::c_api {
namespace {

Commands& open_commands() { return static_cast<MetalMemory&>(*running().memory).commands(); }

class PreparedRecording final : public gpu::Prepared {
 public:
  explicit PreparedRecording(const gpu::Recording& recording)
      : recording_(recording), pipelines_(mps::made_pipelines(recording, 0, open_commands().device())) {}

  void submit(size_t first, size_t end) override {
    in_pool([&] { mps::encode(open_commands(), recording_, first, end, pipelines_.data() + first); });
  }

 private:
  const gpu::Recording& recording_;
  const std::vector<const mps::Pipeline*> pipelines_;
};

class MetalBackend final : public gpu::Backend {
 public:
  std::string_view device_type() const override { return "mps"; }
  std::string_view family() override { return mps::gpu_family(); }
  uint32_t cores() override { return mps::gpu_cores(); }
  bool bounds_work() const override { return true; }

  void submit(int, const gpu::Recording& recording, size_t first) override {
    Commands& commands = open_commands();
    const std::vector<const mps::Pipeline*> pipelines = mps::made_pipelines(recording, first, commands.device());
    in_pool([&] { mps::encode(commands, recording, first, recording.dispatches().size(), pipelines.data()); });
  }

  std::unique_ptr<gpu::Prepared> prepare(int, const gpu::Recording& recording) override {
    return std::make_unique<PreparedRecording>(recording);
  }
};

MetalBackend backend;
const gpu::BackendRegistration registered(backend);

std::unique_ptr<metalcore_context> make_context(int index, void* stream) {
  if (index != 0 || stream) throw Error(METALCORE_INVALID_ARGUMENT, "index and stream must be 0 for METALCORE_METAL");
  return std::make_unique<metalcore_context>(aoti_torch_device_type_mps(), 0, nullptr, std::make_unique<MetalMemory>());
}

const ContextKind kind(METALCORE_METAL, make_context);

}  // namespace
}  // namespace metalcore::c_api

namespace metalcore::mps {

std::filesystem::path library_folder() { return c_api::kernels_folder(); }

// A call that needs what was refused returns Metal's message. A binary that Metal does not open is compiled from
// source.
void tell(const std::string&) {}

}  // namespace metalcore::mps
