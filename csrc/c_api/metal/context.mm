// Contexts for Apple's GPUs: memory of the host, and a queue for each context.
#include "../context.h"

#import "memory.h"

#include "../error.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <memory>

namespace metalcore::c_api {
namespace {

std::unique_ptr<metalcore_context> make_context(int index, void* stream) {
  if (index != 0 || stream) throw Error(METALCORE_INVALID_ARGUMENT, "index and stream must be 0 for METALCORE_METAL");
  return std::make_unique<metalcore_context>(aoti_torch_device_type_mps(), 0, nullptr, std::make_unique<MetalMemory>());
}

const ContextKind kind(METALCORE_METAL, make_context);

}  // namespace
}  // namespace metalcore::c_api
