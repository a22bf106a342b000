// Tuning as Python sees it: metalcore/tuning, which measures, and keeps and loads what it found.
#include "objects.h"

#include "../gpu/tuning.h"

#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace metalcore::python {
namespace {

PyObject* use_tuning(PyObject*, PyObject* args) {
  return guarded([&]() -> PyObject* {
    const char* family;
    if (!PyArg_ParseTuple(args, "s", &family)) throw PythonError();
    gpu::use_tuning(family);
    Py_RETURN_NONE;
  });
}

PyObject* chosen_tuning(PyObject*, PyObject*) { return PyUnicode_FromString(gpu::chosen_tuning().c_str()); }

PyObject* tuning_families(PyObject*, PyObject*) {
  return guarded([&] {
    Object families = own(PyList_New(0));
    for (const std::string& family : gpu::tuning_families())
      append(families, own(PyUnicode_FromString(family.c_str())));
    return families.release();
  });
}

PyObject* tuning_version(PyObject*, PyObject*) { return PyLong_FromUnsignedLongLong(gpu::tuning_version()); }

// ---------------------------------------------------------------- measured on this machine

Object numbers(const gpu::Numbers& values) {
  Object list = own(PyList_New(0));
  for (const int64_t value : values) append(list, own(PyLong_FromLongLong(value)));
  return list;
}

PyObject* tunables(PyObject*, PyObject* args) {
  return guarded([&] {
    const char* device_type;
    if (!PyArg_ParseTuple(args, "s", &device_type)) throw PythonError();
    Object all = own(PyList_New(0));
    for (const gpu::Tunable& t : gpu::tunables(device_type))
      append(all,
             own(Py_BuildValue("{s:s,s:s,s:s,s:N,s:L,s:L,s:L,s:O,s:I}", "table", t.table.c_str(), "field",
                               t.field.c_str(), "kind", t.kind.c_str(), "value", numbers(t.value).release(), "lowest",
                               static_cast<long long>(t.legal.lowest), "highest",
                               static_cast<long long>(t.legal.highest), "step", static_cast<long long>(t.legal.step),
                               "measured", t.measured ? Py_True : Py_False, "per_core", t.per_core)));
    return all.release();
  });
}

gpu::Numbers numbers_in(PyObject* list) {
  gpu::Numbers values;
  for (Py_ssize_t i = 0; i < PyList_Size(list); ++i) {
    PyObject* const item = PyList_GetItem(list, i);
    if (!PyLong_Check(item) || PyBool_Check(item)) throw std::invalid_argument("a value has to be whole numbers");
    values.push_back(PyLong_AsLongLong(item));
    if (PyErr_Occurred()) throw PythonError();
  }
  return values;
}

PyObject* set_lacking(PyObject*, PyObject* args) {
  return guarded([&]() -> PyObject* {
    const char* device_type;
    PyObject* list;
    if (!PyArg_ParseTuple(args, "sO!", &device_type, &PyList_Type, &list)) throw PythonError();
    std::vector<std::string> operators;
    for (Py_ssize_t i = 0; i < PyList_Size(list); ++i) {
      const Object name = own(PyUnicode_AsUTF8String(PyList_GetItem(list, i)));
      operators.emplace_back(PyBytes_AsString(name.get()));
    }
    gpu::set_lacking(device_type, std::move(operators));
    Py_RETURN_NONE;
  });
}

PyObject* use_measured(PyObject*, PyObject* args) {
  return guarded([&]() -> PyObject* {
    const char *device_type, *family;
    PyObject* list;
    if (!PyArg_ParseTuple(args, "ssO!", &device_type, &family, &PyList_Type, &list)) throw PythonError();
    std::vector<gpu::Measured> values;
    for (Py_ssize_t i = 0; i < PyList_Size(list); ++i) {
      const char *table, *field;
      PyObject* value;
      if (!PyArg_ParseTuple(PyList_GetItem(list, i), "ssO!", &table, &field, &PyList_Type, &value)) throw PythonError();
      values.push_back({table, field, numbers_in(value)});
    }
    gpu::use_measured(device_type, family, values);
    Py_RETURN_NONE;
  });
}

PyObject* gpu_family(PyObject*, PyObject* args) {
  return guarded([&] {
    const char* device_type;
    if (!PyArg_ParseTuple(args, "s", &device_type)) throw PythonError();
    return PyUnicode_FromString(gpu::gpu_family(device_type).c_str());
  });
}

PyObject* measured_loader;

// Ops call it from threads that may or may not hold the GIL.
void load_measured(std::string_view device_type) {
  const PyGILState_STATE state = PyGILState_Ensure();
  PyObject* const result =
      PyObject_CallFunction(measured_loader, "s#", device_type.data(), static_cast<Py_ssize_t>(device_type.size()));
  if (!result) PyErr_WriteUnraisable(measured_loader);
  Py_XDECREF(result);
  PyGILState_Release(state);
}

PyObject* set_measured_loader(PyObject*, PyObject* loader) {
  Py_INCREF(loader);
  measured_loader = loader;  // for good: another thread may be calling the one before
  gpu::set_measured_loader(load_measured);
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"use_tuning", use_tuning, METH_VARARGS, "use_tuning(family): plan as for this GPU family; '' for each GPU's own"},
    {"chosen_tuning", chosen_tuning, METH_NOARGS, "chosen_tuning() -> str: the family that use_tuning chose, or ''"},
    {"tuning_families", tuning_families, METH_NOARGS, "tuning_families() -> list: the families use_tuning takes"},
    {"tuning_version", tuning_version, METH_NOARGS, "tuning_version() -> int: it changes whenever plans may change"},
    {"gpu_family", gpu_family, METH_VARARGS, "gpu_family(device_type) -> str: '' if nobody has tuned for it"},
    {"tunables", tunables, METH_VARARGS,
     "tunables(device_type) -> list: {table, field, kind, value, lowest, highest, step, measured, per_core} of every "
     "field that "
     "can be measured"},
    {"set_lacking", set_lacking, METH_VARARGS,
     "set_lacking(device_type, operators): those of aten that PyTorch has no kernel of there; fields whose values call "
     "one cannot be measured"},
    {"use_measured", use_measured, METH_VARARGS,
     "use_measured(device_type, family, [(table, field, [number, ...])]): plan with these values while the GPU is of "
     "the family; with none, as before anything was measured"},
    {"set_measured_loader", set_measured_loader, METH_O,
     "set_measured_loader(callable): it is called with a type of device before the first plan for it"},
    {nullptr, nullptr, 0, nullptr},
};
const Methods registered(methods);

}  // namespace
}  // namespace metalcore::python
