#include "trap.h"

#include "symbolize.h"
#include "fault.h"
#include "threadgroup.h"
#include "watch.h"

#include "../../gpu/per_thread.h"

#include <dlfcn.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <cerrno>
#include <new>
#include <sstream>
#include <string>

namespace metalcore::simulator {
namespace {

constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, kPause};
constexpr const char *kTimeoutKind = "timeout", *kInterruptedKind = "interrupted";
struct sigaction previous[std::size(kSignals)];

// A handler that runs before this one, such as Python's faulthandler, may raise the signal again. The kernel did not
// cause a signal that another process sends.
bool is_own(const siginfo_t& info) { return info.si_code > 0 || (info.si_code == SI_TKILL && info.si_pid == getpid()); }

const char* program_counter(const ucontext_t& context) {
#if defined(__x86_64__)
  return reinterpret_cast<const char*>(context.uc_mcontext.gregs[REG_RIP]);
#elif defined(__aarch64__)
  return reinterpret_cast<const char*>(context.uc_mcontext.pc);
#else
  return nullptr;
#endif
}

void pass_on(int signal, siginfo_t* info, void* context) {
  size_t i = 0;
  while (kSignals[i] != signal) ++i;
  const struct sigaction& action = previous[i];
  if (action.sa_flags & SA_SIGINFO) return action.sa_sigaction(signal, info, context);
  if (action.sa_handler == SIG_IGN && info->si_code <= 0) return;
  if (action.sa_handler != SIG_DFL && action.sa_handler != SIG_IGN) return action.sa_handler(signal);
  if (signal == kPause) return;
  // The default action ends the process, when the instruction runs again or the signal is sent again.
  ::signal(signal, SIG_DFL);
  if (info->si_code <= 0) raise(signal);
}

Trap::Kind kind_of(int signal) {
  switch (signal) {
    case SIGFPE: return Trap::kDivision;
    case SIGILL:
    case SIGTRAP: return Trap::kStop;
    default: return Trap::kMemory;
  }
}

void handle(int signal, siginfo_t* info, void* context) {
  auto& interrupted = *static_cast<ucontext_t*>(context);
  Trap trap;
  trap.kind = kind_of(signal);
  trap.pc = program_counter(interrupted);
  const auto* address = info->si_code > 0 ? static_cast<const char*>(info->si_addr) : nullptr;
  if (is_own(*info) && Threadgroup::abandon(trap, address, interrupted)) return;
  pass_on(signal, info, context);
}

// Runs on the fiber's own stack, which keeps the interrupted state until the fiber goes on.
void pause(int signal, siginfo_t* info, void* context) {
  if (info->si_code != SI_TKILL || info->si_pid != getpid()) return pass_on(signal, info, context);
  const int error = errno;
  if (wanted()) Threadgroup::pause(program_counter(*static_cast<const ucontext_t*>(context)));
  errno = error;
}

bool install() {
  struct sigaction action = {};
  sigemptyset(&action.sa_mask);
  // The previous action is read first: the handler needs it as soon as it can run.
  for (size_t i = 0; i < std::size(kSignals); ++i) {
    const bool pauses = kSignals[i] == kPause;
    action.sa_sigaction = pauses ? pause : handle;
    // The handler that pauses may never return, so its signal must not be blocked.
    action.sa_flags = SA_SIGINFO | (pauses ? SA_RESTART | SA_NODEFER : SA_ONSTACK);
    if (sigaction(kSignals[i], nullptr, &previous[i]) != 0 || sigaction(kSignals[i], &action, nullptr) != 0)
      return false;
  }
  return true;
}

// The stack on which a thread handles signals: its own stack may be the one that ran over.
class SignalStack {
 public:
  SignalStack() {
    memory_ = mmap(nullptr, kSize, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory_ == MAP_FAILED) throw std::bad_alloc();
    stack_t stack = {};
    stack.ss_sp = memory_;
    stack.ss_size = kSize;
    sigaltstack(&stack, &before_);
  }
  ~SignalStack() {
    stack_t now = {};
    if (sigaltstack(nullptr, &now) == 0 && now.ss_sp == memory_) sigaltstack(&before_, nullptr);
    munmap(memory_, kSize);
  }

 private:
  static constexpr size_t kSize = 64 * 1024;
  void* memory_;
  stack_t before_ = {};
};

struct Wording {
  const char* kind;
  std::string what;
};

Wording wording(Trap::Kind kind) {
  switch (kind) {
    case Trap::kDivision: return {"integer division by zero", "divides an integer by zero, or the smallest one by -1"};
    case Trap::kStack: return {"stack overflow", "has too many or too large local variables"};
    case Trap::kStop:
      return {"trap",
              "stops the program: by __builtin_trap() or the like, at code that must not be reached, or at what the "
              "compiler has seen to be undefined"};
    case Trap::kTimeout: {
      std::ostringstream seconds;
      seconds << timeout();
      return {kTimeoutKind, "is still running after " + seconds.str() + " s (METALCORE_TIMEOUT)"};
    }
    case Trap::kInterrupt: return {kInterruptedKind, "was still running as Ctrl-C was pressed"};
    default: return {"memory access fault", "reads or writes memory that is not there"};
  }
}

}  // namespace

bool is_impatience(const Fault& fault) { return fault.kind == kTimeoutKind || fault.kind == kInterruptedKind; }

void catch_traps() {
  static const bool installed = install();
  (void)installed;
  gpu::per_thread<SignalStack>();
}

Fault fault_of(const Trap& trap, const KernelReference& kernel) {
  SourceLine found;
  Dl_info library;
  if (dladdr(trap.pc, &library) && library.dli_fname)
    found = find_line(library.dli_fname, static_cast<uintptr_t>(trap.pc - static_cast<const char*>(library.dli_fbase)));
  const auto [kind, what] = wording(trap.kind);
  std::string message = describe(kernel);
  if (found.line) message += ", " + found.file + ":" + std::to_string(found.line);
  message += std::string(": ") + kind + ": thread " + text(trap.thread.position_in_threadgroup) +
             (trap.thread_known ? "" : ", or a later one of its row,") + " of threadgroup " +
             text(trap.thread.threadgroup_position) + " " + what;
  if (!found.line) message += "; checking mode (METALCORE_CHECK=1) finds the line";
  return Fault(kind, kernel.kernel->name, found.file, found.line, trap.thread, message);
}

}  // namespace metalcore::simulator
