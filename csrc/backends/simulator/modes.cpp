#include "modes.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <initializer_list>
#include <stdexcept>
#include <string>

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

bool switched_on(const char* variable) {
  const char* given = std::getenv(variable);
  std::string text = given ? given : "";
  for (char& c : text)  // tolower depends on the locale
    if (c >= 'A' && c <= 'Z') c += 'a' - 'A';
  const auto is_one_of = [&](std::initializer_list<const char*> texts) {
    return std::find(texts.begin(), texts.end(), text) != texts.end();
  };
  if (is_one_of({"1", "on", "yes", "true"})) return true;
  if (is_one_of({"", "0", "off", "no", "false"})) return false;
  throw std::invalid_argument("metalcore: " + std::string(variable) +
                              " must be 1, on, yes or true, or 0, off, no or false, got '" + given + "'");
}

}  // namespace metalcore::simulator
