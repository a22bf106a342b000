// Recordings, replays of them and the generated kernels in them, as Python sees them: metalcore/recording.py.
#include "../gpu/backend.h"
#include "../gpu/cost.h"
#include "../gpu/kernel_index.h"
#include "../gpu/replay.h"
#include "objects.h"

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace metalcore::python {
namespace {

Object dimensions(gpu::Size size) { return own(Py_BuildValue("(III)", size.x, size.y, size.z)); }

// The recorders of this thread, from the outermost to the innermost.
thread_local std::vector<std::unique_ptr<gpu::Recorder>> recorders;

PyObject* begin(PyObject*, PyObject* args) {
  return guarded([&]() -> PyObject* {
    const char* device_type;
    if (!PyArg_ParseTuple(args, "s", &device_type)) throw PythonError();
    gpu::Backend* const backend = gpu::find_backend(std::string_view(device_type));
    if (!backend)
      throw std::invalid_argument("metalcore: this build has no kernels for " + std::string(device_type) + " devices");
    recorders.push_back(std::make_unique<gpu::Recorder>(*backend));
    Py_RETURN_NONE;
  });
}

PyObject* end(PyObject*, PyObject*) {
  return guarded([&]() -> PyObject* {
    if (recorders.empty()) throw std::invalid_argument("metalcore: nothing is being recorded on this thread");
    const int64_t number = gpu::keep(recorders.back()->share());
    recorders.pop_back();
    return PyLong_FromLongLong(number);
  });
}

PyObject* note_operator(PyObject*, PyObject*) {
  if (gpu::Recorder* recorder = gpu::Recorder::current()) recorder->kept().inside_operator = false;
  Py_RETURN_NONE;
}

PyObject* note_torch_step(PyObject*, PyObject* args) {
  return guarded([&]() -> PyObject* {
    const char* name;
    if (!PyArg_ParseTuple(args, "s", &name)) throw PythonError();
    if (gpu::Recorder* recorder = gpu::Recorder::current()) {
      gpu::KeptRecording& kept = recorder->kept();
      kept.torch_steps.push_back({kept.recording.dispatches().size(), name});
    }
    Py_RETURN_NONE;
  });
}

// What Python knows a view by: its tensor's place in _recorded_tensors, which leaves out views of nothing.
class Places {
 public:
  explicit Places(const gpu::KeptRecording& kept) {
    Py_ssize_t place = 0;
    for (const auto& tensor : kept.tensors) places_.push_back(tensor ? place++ : -1);
  }
  Object operator()(const gpu::Recording& recording, const gpu::BufferView* view) const {
    const Py_ssize_t place = places_.at(view - recording.views().data());
    if (place < 0) return own(Py_BuildValue("(Onn)", Py_None, Py_ssize_t{0}, Py_ssize_t{0}));
    return own(
        Py_BuildValue("(nnn)", place, static_cast<Py_ssize_t>(view->offset), static_cast<Py_ssize_t>(view->span)));
  }

 private:
  std::vector<Py_ssize_t> places_;
};

Object describe_argument(const gpu::Recording& recording, const gpu::Argument& argument, const Places& places) {
  const unsigned index = argument.index;
  switch (argument.kind) {
    case gpu::Argument::kBuffer:
      return own(Py_BuildValue("(IsN)", index, "buffer", places(recording, recording.views(argument)).release()));
    case gpu::Argument::kBytes:
      return own(Py_BuildValue("(Isy#)", index, "bytes", reinterpret_cast<const char*>(recording.bytes(argument)),
                               static_cast<Py_ssize_t>(argument.count)));
    case gpu::Argument::kPointers: {
      Object table = own(PyList_New(0));
      for (uint32_t i = 0; i < argument.count; ++i) append(table, places(recording, recording.views(argument) + i));
      return own(Py_BuildValue("(IsN)", index, "pointers", table.release()));
    }
    case gpu::Argument::kThreadgroup: return own(Py_BuildValue("(IsI)", index, "threadgroup", argument.count));
  }
  throw std::logic_error("an argument of no kind");
}

Object describe_dispatch(const gpu::Recording& recording, const gpu::Dispatch& dispatch, const Places& places) {
  Object arguments = own(PyList_New(0));
  for (const gpu::Argument* argument = recording.begin(dispatch); argument != recording.end(dispatch); ++argument)
    append(arguments, describe_argument(recording, *argument, places));
  const std::string name(recording.name(dispatch));
  return own(Py_BuildValue(
      "{s:s,s:N,s:N,s:O,s:N,s:d,s:I}", "kernel", name.c_str(), "grid", dimensions(dispatch.grid).release(),
      "threadgroup", dimensions(dispatch.threadgroup).release(), "threads", dispatch.threads ? Py_True : Py_False,
      "arguments", arguments.release(), "seconds", gpu::seconds(recording, dispatch), "together", dispatch.together));
}

PyObject* describe(PyObject*, PyObject* number) {
  return guarded([&]() -> PyObject* {
    const auto kept = gpu::kept(PyLong_AsLongLong(number));
    const Places places(*kept);
    Object plans = own(PyList_New(0)), torch_steps = own(PyList_New(0)), dispatches = own(PyList_New(0)),
           host_steps = own(PyList_New(0));
    for (const gpu::Plan& plan : kept->plans)
      append(plans, own(Py_BuildValue("(sssO)", plan.op.c_str(), plan.variant.c_str(), plan.why.c_str(),
                                      plan.inner ? Py_True : Py_False)));
    for (const gpu::TorchStep& step : kept->torch_steps)
      append(torch_steps, own(Py_BuildValue("(ns)", static_cast<Py_ssize_t>(step.before), step.name.c_str())));
    for (const std::string& step : kept->host_steps) append(host_steps, own(PyUnicode_FromString(step.c_str())));
    for (const gpu::Dispatch& dispatch : kept->recording.dispatches())
      append(dispatches, describe_dispatch(kept->recording, dispatch, places));
    return Py_BuildValue("{s:N,s:N,s:N,s:N}", "plans", plans.release(), "torch_steps", torch_steps.release(),
                         "host_steps", host_steps.release(), "dispatches", dispatches.release());
  });
}

PyObject* forget(PyObject*, PyObject* number) {
  return guarded([&]() -> PyObject* {
    gpu::forget(PyLong_AsLongLong(number));
    Py_RETURN_NONE;
  });
}

// ---------------------------------------------------------------- replays (metalcore/replay/_tape.py)

struct Run {
  std::shared_ptr<gpu::Replay> replay;
  Py_ssize_t first, end;

  void parse(PyObject* arguments) {
    long long number;
    if (!PyArg_ParseTuple(arguments, "Lnn", &number, &first, &end)) throw PythonError();
    replay = gpu::replay(number);
  }
  void run() const { replay->run(static_cast<size_t>(first), static_cast<size_t>(end)); }
  PyObject* result() const { Py_RETURN_NONE; }
};

PyObject* run_replay(PyObject*, PyObject* arguments) { return parse_and_run<Run>(arguments); }

PyObject* forget_replay(PyObject*, PyObject* number) {
  return guarded([&]() -> PyObject* {
    gpu::forget_replay(PyLong_AsLongLong(number));
    Py_RETURN_NONE;
  });
}

// ---------------------------------------------------------------- generated kernels

PyObject* add_generated(PyObject*, PyObject* args) {
  return guarded([&]() -> PyObject* {
    const char *kernel, *source;
    Py_ssize_t size;
    if (!PyArg_ParseTuple(args, "ss#", &kernel, &source, &size)) throw PythonError();
    gpu::add_generated(kernel, {source, static_cast<size_t>(size)});
    Py_RETURN_NONE;
  });
}

PyMethodDef methods[] = {
    {"begin_recording", begin, METH_VARARGS,
     "begin_recording(device_type): keeps what this thread's ops record until end_recording(); ops on meta tensors are "
     "recorded, as for that kind of device, and not run"},
    {"end_recording", end, METH_NOARGS, "end_recording() -> int: the recording's number"},
    {"note_operator", note_operator, METH_NOARGS,
     "note_operator(): an operator begins; its first plan is the one that it is explained by"},
    {"note_torch_step", note_torch_step, METH_VARARGS,
     "note_torch_step(name): what PyTorch does between this thread's recorded dispatches"},
    {"describe_recording", describe, METH_O,
     "describe_recording(number) -> dict: plans [(op, variant, why, inner)], torch_steps [(index of the dispatch after "
     "it, name)], host_steps [what], dispatches [{kernel, grid, threadgroup, threads, arguments, seconds, together}]"},
    {"forget_recording", forget, METH_O, "forget_recording(number): frees it"},
    {"run_replay", run_replay, METH_VARARGS,
     "run_replay(number, first, end): submits dispatches [first, end) of a replay of torch.ops.metalcore._make_replay"},
    {"forget_replay", forget_replay, METH_O, "forget_replay(number): frees it"},
    {"add_generated", add_generated, METH_VARARGS,
     "add_generated(kernel, source): MSL with a kernel of this name, which recordings may then dispatch"},
    {nullptr, nullptr, 0, nullptr},
};
const Methods registered(methods);

}  // namespace
}  // namespace metalcore::python
