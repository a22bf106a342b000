// A machine context that can be left and entered again: the executor's fibers switch by it. On x86-64 and aarch64 the
// switch is assembly (it keeps callee-saved registers only and takes a few ns); elsewhere it is ucontext's.
#pragma once

#include <ucontext.h>

#include <cstddef>
#include <memory>

#if (defined(__x86_64__) || defined(__aarch64__)) && !defined(METALCORE_UCONTEXT)
#define METALCORE_FAST_CONTEXT 1
#endif

namespace metalcore::simulator {

using ContextEntry = void (*)(void*);

#if METALCORE_FAST_CONTEXT

extern "C" void metalcore_switch_context(void** leave, void* enter);

class Context {
 public:
  // The first switch to this context calls entry(argument) on the stack that ends at `top`; entry must never return.
  void prepare(char* base, char* top, ContextEntry entry, void* argument);

  static void change(Context& leave, Context& enter) {
    metalcore_switch_context(&leave.stack_pointer_, enter.stack_pointer_);
  }

  // A signal handler calls this: when the handler returns, the thread goes on in this context instead of where it was
  // interrupted. The return restores the signal mask and the alternate stack, as it always does.
  void resume_after(ucontext_t& interrupted) const;

 private:
  void* stack_pointer_ = nullptr;
};

#else

class Context {
 public:
  void prepare(char* base, char* top, ContextEntry entry, void* argument);

  static void change(Context& leave, Context& enter) { swapcontext(&leave.state(), &enter.state()); }

  void resume_after(ucontext_t&) { setcontext(&state()); }  // restores the mask itself

 private:
  ucontext_t& state() {
    if (!state_) state_ = std::make_unique<ucontext_t>();
    return *state_;
  }
  std::unique_ptr<ucontext_t> state_;
};

#endif

// The stacks of a worker's fibers. They are made on demand and kept. Each has a guard page below it. The tops are
// staggered so that the frames of neighbouring fibers, which run in turn, fall on different cache sets.
class Stacks {
 public:
  static constexpr size_t kSize = 256 * 1024;
  static constexpr size_t kGuard = 64 * 1024;  // below the base of each stack; the largest page size in use
  static constexpr size_t kCount = 1056;

  struct Stack {
    char* base;
    char* top;
  };
  ~Stacks();
  Stack get(size_t index);

 private:
  static constexpr size_t kPerBlock = 32;
  char* blocks_[kCount / kPerBlock] = {};
};

}  // namespace metalcore::simulator
