// Modes of this process: how the environment switches one on, and whether kernels flush subnormal numbers.
#pragma once

namespace metalcore::simulator {

// Subnormal numbers of float32. Metal lets a GPU flush them to zero, in what an operation reads and in what it returns,
// and Apple's GPUs do. CPUs keep them unless they are told otherwise, each thread by itself. Kernels convert float16 by
// operations on float32 (metal/portable_formats.h), so that its subnormal numbers follow.

// Whether kernels flush subnormals, in this process; METALCORE_FTZ=1 switches it on from the start. CPUs other than
// x86-64 and aarch64 never do.
bool flushes_subnormals();
// Throws std::invalid_argument where the CPU cannot.
void set_flushing(bool on);

// Lives while the calling thread runs a kernel.
class KernelFloats {
 public:
  KernelFloats();
  ~KernelFloats();
  KernelFloats(const KernelFloats&) = delete;

 private:
  bool changed_;
  unsigned long before_ = 0;  // the control register
};

// Whether a variable switches its mode on: 1, on, yes and true do, in any case. 0, off, no, false, nothing and no
// variable do not. Throws std::invalid_argument for another text. metalcore/_core/environment.py is the same in Python.
bool switched_on(const char* variable);

}  // namespace metalcore::simulator
