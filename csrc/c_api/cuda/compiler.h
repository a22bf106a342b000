// The compiler of kernels for NVIDIA GPUs without Python.
#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

namespace metalcore::c_api {

// NVRTC, NVIDIA's compiler for CUDA C++ at run time. It is opened, not linked; metalcore/msl/nvidia/nvrtc.py is the
// Python package's way to it, where processes have no libmetalcore and may use PyTorch's copy of NVRTC.
class Nvrtc {
 public:
  // Opens the library of this name or path. Throws std::runtime_error where there is none, or where it is too old.
  explicit Nvrtc(const std::string& library);

  // A cubin of the program, or PTX where the GPU (90 for compute capability 9.0) is newer than this NVRTC. Throws
  // std::runtime_error with NVRTC's log.
  std::string compile(const std::string& program, int arch, const std::vector<std::string>& include,
                      const char* flag) const;

 private:
  using Program = struct ProgramObject*;
  struct Functions {
    int (*version)(int* major, int* minor);
    int (*architecture_count)(int* count);
    int (*architectures)(int* found);
    const char* (*error_text)(int status);
    int (*create)(Program* program, const char* text, const char* name, int count, const char* const* headers,
                  const char* const* names);
    int (*compile)(Program program, int count, const char* const* options);
    int (*destroy)(Program* program);
    int (*log_size)(Program program, size_t* size);
    int (*log)(Program program, char* text);
    int (*cubin_size)(Program program, size_t* size);
    int (*cubin)(Program program, char* code);
    int (*ptx_size)(Program program, size_t* size);
    int (*ptx)(Program program, char* code);
  };

  void check(int status, const char* what) const;
  std::string target(int arch) const;
  std::string read(Program program, int (*size)(Program, size_t*), int (*read)(Program, char*)) const;

  Functions functions_;
  std::pair<int, int> version_;
};

// The NVRTC to use: METALCORE_NVRTC, or else the first one that is new enough of those that this process has open, in
// CUDA_HOME and CUDA_PATH, that the system's loader finds, and in /usr/local/cuda. Throws Error(METALCORE_NO_DEVICE).
const Nvrtc& nvrtc();

// Throws Error where the programs, their headers or NVRTC are missing.
void require_compiler();

}  // namespace metalcore::c_api
