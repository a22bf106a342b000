// How errors leave the C functions: as a status, and a text that the thread keeps.
#pragma once

#include <metalcore.h>

#include <stdexcept>
#include <string>

namespace metalcore::c_api {

class Error : public std::runtime_error {
 public:
  Error(metalcore_status status, const std::string& text) : std::runtime_error(text), status(status) {}
  metalcore_status status;
};

// To be called while an exception is handled: keeps "<function>: <what it says>" for metalcore_last_error(), and
// returns its status.
int status_of_exception(const char* function) noexcept;

}  // namespace metalcore::c_api
