#include "autograd.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>

#include "allocator.h"

namespace metalcore::simulated_device {
namespace {

using torch::autograd::Engine;
using torch::autograd::impl::gradient_edge;

// Names protected members of the engine.
struct EngineState : Engine {
  static bool started(const Engine& engine) { return (engine.*&EngineState::thread_pool_shared_) != nullptr; }
  static bool has_device_thread(const Engine& engine) { return !(engine.*&EngineState::device_ready_queues_).empty(); }
};

}  // namespace

bool autograd_started_without_device() {
  const auto& engine = Engine::get_default_engine();
  return EngineState::started(engine) && !EngineState::has_device_thread(engine);
}

void drain_autograd() {
  auto& engine = Engine::get_default_engine();
  if (!EngineState::has_device_thread(engine)) return;
  // The thread takes up a graph only when it has dropped the one before. No Python object belongs to this graph.
  const at::AutoGradMode enable_grad(true);
  const auto x = at::ones({}, kDevice).set_requires_grad(true);
  const auto y = x.clone();
  engine.execute({gradient_edge(y)}, {at::ones({}, kDevice)}, /*keep_graph=*/false, /*create_graph=*/false,
                 /*accumulate_grad=*/false, {gradient_edge(x)});
}

}  // namespace metalcore::simulated_device
