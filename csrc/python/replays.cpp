// Replays as Python runs them: metalcore/replay/_replay.py.
#include "arguments.h"
#include "methods.h"

#include "../gpu/replay.h"

#include <memory>

namespace metalcore::python {
namespace {

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

PyObject* run(PyObject*, PyObject* arguments) { return parse_and_run<Run>(arguments); }

PyObject* forget(PyObject*, PyObject* number) {
  return guarded([&]() -> PyObject* {
    gpu::forget_replay(PyLong_AsLongLong(number));
    Py_RETURN_NONE;
  });
}

PyMethodDef methods[] = {
    {"run_replay", run, METH_VARARGS,
     "run_replay(number, first, end): submits dispatches [first, end) of a replay of torch.ops.metalcore._make_replay"},
    {"forget_replay", forget, METH_O, "forget_replay(number): frees it"},
    {nullptr, nullptr, 0, nullptr},
};
const Methods registered(methods);

}  // namespace
}  // namespace metalcore::python
