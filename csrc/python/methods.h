// How functions get into the module metalcore._C: at namespace scope of the file that has them
//   const python::Methods registered(methods);
#pragma once

#include "objects.h"

namespace metalcore::python {

struct Methods {
  explicit Methods(PyMethodDef* methods);  // ends with a row of zeros
};

}  // namespace metalcore::python
