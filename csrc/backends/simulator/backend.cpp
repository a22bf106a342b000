// The simulator's gpu::Backend: each dispatch runs to its end before the next begins.
#include "../../gpu/backend.h"

#include "counted.h"
#include "launch.h"

#include <exception>
#include <memory>
#include <vector>

namespace metalcore::simulator {
namespace {

// An argument that is a table of addresses, with the bytes that a kernel may use behind each.
struct PointerTable {
  std::vector<char*> addresses;
  std::vector<size_t> spans;
};

Binding bind_table(const gpu::BufferView* views, size_t count, PointerTable& table) {
  for (size_t i = 0; i < count; ++i) {
    const gpu::BufferView& view = views[i];
    table.addresses.push_back(view.storage ? static_cast<char*>(view.storage) + view.offset : nullptr);
    table.spans.push_back(view.storage ? view.span : 0);
  }
  return {Binding::kPointers, table.addresses.data(), count * sizeof(char*), table.spans.data()};
}

// Calls body(launch) with a dispatch as the executor takes it.
template <typename Body>
void with_launch(const gpu::Recording& recording, const gpu::Dispatch& dispatch, const KernelReference& kernel,
                 const Body& body) {
  Launch launch = {};
  launch.kernel = kernel;
  std::array<PointerTable, kMaximumBuffers> tables;
  for (const gpu::Argument* argument = recording.begin(dispatch); argument != recording.end(dispatch); ++argument) {
    Binding& binding = launch.buffers[argument->index];
    switch (argument->kind) {
      case gpu::Argument::kBuffer: {
        const gpu::BufferView& view = *recording.views(*argument);
        binding = {Binding::kBuffer, static_cast<char*>(view.storage) + view.offset, view.span, nullptr};
        break;
      }
      case gpu::Argument::kBytes:
        binding = {Binding::kBytes, const_cast<std::byte*>(recording.bytes(*argument)), argument->count, nullptr};
        break;
      case gpu::Argument::kPointers:
        tables[argument->index] = {};
        binding = bind_table(recording.views(*argument), argument->count, tables[argument->index]);
        break;
      case gpu::Argument::kThreadgroup: launch.threadgroup_lengths[argument->index] = argument->count; break;
    }
  }
  const gpu::Size threads = recording.threads(dispatch);
  launch.threads = {threads.x, threads.y, threads.z};
  launch.group = {dispatch.threadgroup.x, dispatch.threadgroup.y, dispatch.threadgroup.z};
  body(launch);
}

void run(const gpu::Recording& recording, const gpu::Dispatch& dispatch, const KernelReference& kernel) {
  bool whole = true;
  if (counting().on)
    with_launch(recording, dispatch, find_counting_kernel(recording.name(dispatch)),
                [&](const Launch& launch) { whole = execute_counted(launch); });
  if (!whole) return;
  with_launch(recording, dispatch, kernel, execute);
}

// Calls `body`, whose errors become exceptions that PyTorch passes on.
template <typename Body>
void passing_errors_on(const Body& body) {
  try {
    body();
  } catch (...) {
    if (device_functions().rethrow) device_functions().rethrow(std::current_exception());
    throw;
  }
}

class PreparedRecording final : public gpu::Prepared {
 public:
  explicit PreparedRecording(const gpu::Recording& recording, bool always_checked = false)
      : recording_(recording), always_checked_(always_checked) {
    find_kernels();
  }

  void validate_all() const {
    for (size_t i = 0; i < kernels_.size(); ++i)
      with_launch(recording_, recording_.dispatches()[i], kernels_[i], validate);
  }

  void submit(size_t first, size_t end) override {
    if (is_checked() != checked_) find_kernels();
    passing_errors_on([&] {
      for (size_t i = first; i < end; ++i) run(recording_, recording_.dispatches()[i], kernels_[i]);
    });
  }

 private:
  void find_kernels() {
    kernels_.clear();
    checked_ = is_checked();
    for (const gpu::Dispatch& dispatch : recording_.dispatches())
      kernels_.push_back(find_kernel(recording_.name(dispatch), checked_));
  }

  bool is_checked() const { return always_checked_ || checking().on; }

  const gpu::Recording& recording_;
  const bool always_checked_;
  std::vector<KernelReference> kernels_;
  bool checked_ = false;
};

class SimulatorBackend final : public gpu::Backend {
 public:
  explicit SimulatorBackend(std::string_view device_type) : device_type_(device_type) {}

  std::string_view device_type() const override { return device_type_; }

  // The threads of a simdgroup are fibers that switch at every exchange, while a thread alone runs as plain vector
  // code. The tuning prefers such threads. In checking mode plans are those of a GPU, so that its kernels are checked,
  // and in counting mode those of the GPU that is asked for.
  std::string_view family() override {
    if (counting().on) return counting().family;
    return checking().on ? "" : "simulator";
  }

  // It stands for a Mac.
  bool bounds_work() const override { return true; }

  void submit(int, const gpu::Recording& recording, size_t first) override {
    passing_errors_on([&] {
      for (size_t i = first; i < recording.dispatches().size(); ++i) {
        const gpu::Dispatch& dispatch = recording.dispatches()[i];
        run(recording, dispatch, find_kernel(recording.name(dispatch), checking().on));
      }
    });
  }

  std::unique_ptr<gpu::Prepared> prepare(int, const gpu::Recording& recording) override {
    return std::make_unique<PreparedRecording>(recording);
  }

 private:
  const std::string_view device_type_;
};

// A few operators have kernels for the CPU's own tensors, too (METALCORE_KERNELS_ON_CPU).
SimulatorBackend backend("mps"), on_cpu("cpu");
const gpu::BackendRegistration registered(backend), registered_on_cpu(on_cpu);

}  // namespace

std::unique_ptr<gpu::Prepared> prepare_program(const gpu::Recording& recording, bool trusted) {
  auto prepared = std::make_unique<PreparedRecording>(recording, !trusted);
  prepared->validate_all();
  return prepared;
}

}  // namespace metalcore::simulator
