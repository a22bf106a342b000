// Switches between fibers of csrc/backends/simulator/context.h. Registers and stacks must survive, in integer and
// floating-point code. An exception must find its handler on a fiber's stack. A signal handler must be able to leave a
// fiber whose stack has run over. Prints "done".
#include "context.h"

#include <signal.h>

#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <vector>

using metalcore::simulator::Context;
using metalcore::simulator::Stacks;

constexpr int kFibers = 100, kRounds = 50;

struct Fiber {
  Context context;
  Context* back;
  int number;
  double sum = 0;
  long product = 1;
  bool caught = false;
};

static void check(bool condition, const char* what) {
  if (!condition) std::printf("failed: %s\n", what), std::exit(1);
}

static void run(void* argument) {
  auto* fiber = static_cast<Fiber*>(argument);
  double a = fiber->number, b = a * 0.5, c = a * 0.25, d = a + 1;
  long e = fiber->number, f = e + 1, g = e + 2, h = e + 3;
  check(reinterpret_cast<size_t>(__builtin_frame_address(0)) % 16 == 0, "the stack is aligned");
  for (int round = 0;; ++round) {
    Context::change(fiber->context, *fiber->back);
    a += 1, b += a, c += b, d += c;
    e += 1, f ^= e, g += f, h ^= g;
    fiber->sum = a + b + c + d;
    fiber->product = e + f + g + h;
    if (round % 7 == 0) try {
        throw std::runtime_error("on a fiber");
      } catch (const std::runtime_error&) {
        fiber->caught = true;
      }
  }
}

static Context survivor;

static void run_over(void*) {
  volatile char frame[64] = {};
  run_over(const_cast<char*>(frame));
  frame[0] = 1;
}

static void leave_fibers() {
  static char memory[65536];
  stack_t alternate = {};
  alternate.ss_sp = memory;
  alternate.ss_size = sizeof memory;
  sigaltstack(&alternate, nullptr);
  struct sigaction action = {};
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  action.sa_sigaction = [](int, siginfo_t*, void* context) {
    survivor.resume_after(*static_cast<ucontext_t*>(context));
  };
  sigaction(SIGSEGV, &action, nullptr);
  Stacks stacks;
  for (int round = 0; round < 3; ++round) {
    const Stacks::Stack stack = stacks.get(1);
    Context fiber;
    fiber.prepare(stack.base, stack.top, run_over, nullptr);
    Context::change(survivor, fiber);
    sigset_t blocked;
    sigprocmask(SIG_BLOCK, nullptr, &blocked);
    check(!sigismember(&blocked, SIGSEGV), "the signal mask");
  }
}

int main() {
  leave_fibers();
  Stacks stacks;
  Context main_context;
  std::vector<Fiber> fibers(kFibers);
  for (int i = 0; i < kFibers; ++i) {
    const Stacks::Stack stack = stacks.get(static_cast<size_t>(i));
    fibers[static_cast<size_t>(i)].number = i;
    fibers[static_cast<size_t>(i)].back = &main_context;
    fibers[static_cast<size_t>(i)].context.prepare(stack.base, stack.top, run, &fibers[static_cast<size_t>(i)]);
  }
  for (int round = 0; round <= kRounds; ++round)
    for (auto& fiber : fibers) Context::change(main_context, fiber.context);
  for (int i = 0; i < kFibers; ++i) {
    double a = i, b = a * 0.5, c = a * 0.25, d = a + 1;
    long e = i, f = e + 1, g = e + 2, h = e + 3;
    for (int round = 0; round < kRounds; ++round) {
      a += 1, b += a, c += b, d += c;
      e += 1, f ^= e, g += f, h ^= g;
    }
    const Fiber& fiber = fibers[static_cast<size_t>(i)];
    check(fiber.sum == a + b + c + d, "floating-point values");
    check(fiber.product == e + f + g + h, "integers");
    check(fiber.caught, "exceptions");
  }
  std::puts("done");
}
