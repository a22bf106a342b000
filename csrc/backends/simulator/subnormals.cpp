#include "subnormals.h"

#include "switches.h"

#include <atomic>
#include <stdexcept>

namespace metalcore::simulator {
namespace {

#if defined(__x86_64__)
constexpr unsigned long kFlush = 0x8040;  // MXCSR: flush to zero, denormals are zero
unsigned long control() { return __builtin_ia32_stmxcsr(); }
void set_control(unsigned long value) { __builtin_ia32_ldmxcsr(static_cast<unsigned>(value)); }
#elif defined(__aarch64__)
constexpr unsigned long kFlush = 1ul << 24;  // FPCR.FZ: both, for float32 and float64
unsigned long control() {
  unsigned long value;
  asm volatile("mrs %0, fpcr" : "=r"(value));
  return value;
}
void set_control(unsigned long value) { asm volatile("msr fpcr, %0" : : "r"(value)); }
#else
constexpr unsigned long kFlush = 0;
unsigned long control() { return 0; }
void set_control(unsigned long) {}
#endif

std::atomic<bool>& state() {
  static std::atomic<bool> on = switched_on("METALCORE_FTZ") && kFlush;
  return on;
}

}  // namespace

bool flushes_subnormals() { return state().load(std::memory_order_relaxed); }

void set_flushing(bool on) {
  if (on && !kFlush) throw std::invalid_argument("metalcore: this CPU cannot flush subnormal numbers to zero");
  state().store(on, std::memory_order_relaxed);
}

KernelFloats::KernelFloats() : changed_(flushes_subnormals()) {
  if (!changed_) return;
  before_ = control();
  set_control(before_ | kFlush);
}

KernelFloats::~KernelFloats() {
  if (changed_) set_control(before_);
}

}  // namespace metalcore::simulator
