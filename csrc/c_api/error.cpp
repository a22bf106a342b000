#include "error.h"

#include "../gpu/per_thread.h"
#include "../gpu/backend.h"

#include <cstdio>
#include <cstring>
#include <new>
#include <system_error>

#ifdef __linux__
#include "../backends/simulator/fault.h"
#endif

namespace metalcore::c_api {
namespace {

// A text that is too long is cut. It lies on the heap, since what is thread_local of a library that is opened at run
// time must fit into a few hundred bytes; a thread that gets no memory for it has kNoMemory.
constexpr size_t kLongest = 2048;
constexpr const char* kNoMemory = "there is not enough memory";
thread_local const char* last_error = "";

struct Text {
  ~Text() { last_error = ""; }
  char characters[kLongest];
};

int keep(const char* function, metalcore_status status, const char* text) noexcept {
  constexpr const char* kPrefix = "metalcore: ";  // of the library's own exceptions
  if (std::strncmp(text, kPrefix, std::strlen(kPrefix)) == 0) text += std::strlen(kPrefix);
  try {
    char* const kept = gpu::per_thread<Text>().characters;
    std::snprintf(kept, kLongest, "%s: %s", function, text);
    last_error = kept;
  } catch (const std::bad_alloc&) {
    last_error = kNoMemory;
  }
  return status;
}

}  // namespace

int status_of_exception(const char* function) noexcept {
  try {
    throw;
  } catch (const Error& error) {
    return keep(function, error.status, error.what());
  } catch (const std::bad_alloc&) {
    return keep(function, METALCORE_OUT_OF_MEMORY, kNoMemory);
#ifdef __linux__
  } catch (const simulator::Fault& fault) {
    return keep(function, METALCORE_KERNEL_FAULT, fault.what());
#endif
  } catch (const gpu::KernelRefused& error) {
    return keep(function, METALCORE_NO_DEVICE, error.what());
  } catch (const std::exception& error) {
    return keep(function, METALCORE_FAILED, error.what());
  } catch (...) {
    return keep(function, METALCORE_FAILED, "an unknown error");
  }
}

}  // namespace metalcore::c_api

const char* metalcore_last_error(void) { return metalcore::c_api::last_error; }

const char* metalcore_status_name(int status) {
  switch (status) {
    case METALCORE_OK: return "METALCORE_OK";
    case METALCORE_INVALID_ARGUMENT: return "METALCORE_INVALID_ARGUMENT";
    case METALCORE_OUT_OF_MEMORY: return "METALCORE_OUT_OF_MEMORY";
    case METALCORE_BUSY: return "METALCORE_BUSY";
    case METALCORE_NO_DEVICE: return "METALCORE_NO_DEVICE";
    case METALCORE_NO_KERNELS: return "METALCORE_NO_KERNELS";
    case METALCORE_KERNEL_FAULT: return "METALCORE_KERNEL_FAULT";
    case METALCORE_FAILED: return "METALCORE_FAILED";
    case METALCORE_INVALID_FILE: return "METALCORE_INVALID_FILE";
    default: return "an unknown status";
  }
}

const char* metalcore_version(void) { return METALCORE_VERSION; }
