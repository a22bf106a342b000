#include "interpreter.h"

#include "../../python/objects.h"
#include "fault.h"

#include <signal.h>

#include <atomic>
#include <optional>
#include <string>
#include <utility>

namespace metalcore::simulator {
namespace {

using python::Object;
using python::Raised;

class Gil {
 public:
  Gil() : state_(PyGILState_Ensure()) {}
  ~Gil() { PyGILState_Release(state_); }
  Gil(const Gil&) = delete;

 private:
  PyGILState_STATE state_;
};

std::atomic<bool> python_ends{false};
std::atomic<uint32_t> count{0};
struct sigaction before;  // Python's action, while its signal is listened to
bool listening = false;

void note(int signal, siginfo_t* info, void* context) {
  count.fetch_add(1, std::memory_order_relaxed);
  if (before.sa_flags & SA_SIGINFO) return before.sa_sigaction(signal, info, context);
  before.sa_handler(signal);
}

}  // namespace

void note_end_of_python() {
  static PyMethodDef method = {"metalcore_simulator_at_exit",
                               [](PyObject*, PyObject*) -> PyObject* {
                                 python_ends = true;
                                 Py_RETURN_NONE;
                               },
                               METH_NOARGS, nullptr};
  static bool noted = false;
  if (std::exchange(noted, true)) return;
  const Object exits(PyImport_ImportModule("atexit"));
  const Object function(exits ? PyCFunction_NewEx(&method, nullptr, nullptr) : nullptr);
  const Object done(function ? PyObject_CallMethod(exits.get(), "register", "O", function.get()) : nullptr);
  if (!done) PyErr_Clear();
}

void run_python_handlers() {
  if (!Py_IsInitialized()) return;
  std::optional<Raised> raised;
  {
    const Gil gil;
    // An exception that is already on its way must stay in the error indicator.
    if (PyErr_Occurred()) return;
    note_end_of_python();
    if (PyErr_CheckSignals() != 0) raised = Raised::fetch();
  }
  if (raised)
    throw Interrupted(std::string("metalcore: a signal's handler raised: ") + raised->what(),
                      [raised = *raised] { raised.restore(); });
}

void listen_to_interrupts(bool on) {
  struct sigaction now;
  if (on == listening || sigaction(SIGINT, nullptr, &now) != 0) return;
  if (on) {
    if (!(now.sa_flags & SA_SIGINFO) && (now.sa_handler == SIG_DFL || now.sa_handler == SIG_IGN)) return;
    before = now;
    now.sa_sigaction = note;
    now.sa_flags |= SA_SIGINFO;
    listening = sigaction(SIGINT, &now, nullptr) == 0;
  } else {
    // A handler that was installed later stays.
    if ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == note) sigaction(SIGINT, &before, nullptr);
    listening = false;
  }
}

uint32_t interrupts() { return count.load(std::memory_order_relaxed); }

bool interrupts_raise() {
  // A thread that asks for the GIL after the end of Python never returns.
  if (python_ends || !Py_IsInitialized()) return true;
  const Gil gil;
  const Object signals(PyImport_ImportModule("signal"));
  const Object own(signals ? PyObject_GetAttrString(signals.get(), "default_int_handler") : nullptr);
  const Object current(own ? PyObject_CallMethod(signals.get(), "getsignal", "i", SIGINT) : nullptr);
  if (!current) PyErr_Clear();
  return current && current.get() == own.get();
}

namespace {

python::Callback compiler, counting_compiler;

std::string path_of(PyObject* called) {
  const Object path = python::own(called);
  const Object encoded = python::own(PyUnicode_EncodeFSDefault(path.get()));
  const char* text = PyBytes_AsString(encoded.get());
  if (!text) throw python::PythonError();
  return std::string(text);
}

const char* or_none(const std::string& family) { return family.empty() ? nullptr : family.c_str(); }

}  // namespace

void set_compiler(PyObject* callable) { compiler.set(callable); }
void set_counting_compiler(PyObject* callable) { counting_compiler.set(callable); }

std::string compile_kernel(std::string_view kernel, const std::string& family, bool checking, bool flushing) {
  return compiler.call("metalcore: no compiler of kernels has been set", [&](PyObject* function) {
    return path_of(PyObject_CallFunction(function, "s#zOO", kernel.data(), static_cast<Py_ssize_t>(kernel.size()),
                                         or_none(family), checking ? Py_True : Py_False,
                                         flushing ? Py_True : Py_False));
  });
}

std::string compile_counting(std::string_view kernel, const std::string& family) {
  return counting_compiler.call("metalcore: no compiler of kernels that count has been set", [&](PyObject* function) {
    return path_of(
        PyObject_CallFunction(function, "s#z", kernel.data(), static_cast<Py_ssize_t>(kernel.size()), or_none(family)));
  });
}

}  // namespace metalcore::simulator
