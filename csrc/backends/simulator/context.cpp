#include "context.h"

#include <sys/mman.h>

#include <cstdint>
#include <new>

#if METALCORE_FAST_CONTEXT && defined(__x86_64__)

asm(R"(
.text
.p2align 4
.globl metalcore_switch_context
.hidden metalcore_switch_context
.type metalcore_switch_context, @function
metalcore_switch_context:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rdi
.globl metalcore_enter_context
.hidden metalcore_enter_context
metalcore_enter_context:
  movq %rdi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size metalcore_switch_context, .-metalcore_switch_context

.globl metalcore_start_context
.hidden metalcore_start_context
.type metalcore_start_context, @function
metalcore_start_context:
  .cfi_startproc
  .cfi_undefined rip
  movq %r12, %rdi
  callq *%r13
  ud2
  .cfi_endproc
.size metalcore_start_context, .-metalcore_start_context
)");

#elif METALCORE_FAST_CONTEXT && defined(__aarch64__)

asm(R"(
.text
.p2align 4
.globl metalcore_switch_context
.hidden metalcore_switch_context
.type metalcore_switch_context, %function
metalcore_switch_context:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov x0, x1
.globl metalcore_enter_context
.hidden metalcore_enter_context
metalcore_enter_context:
  mov sp, x0
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size metalcore_switch_context, .-metalcore_switch_context

.globl metalcore_start_context
.hidden metalcore_start_context
.type metalcore_start_context, %function
metalcore_start_context:
  .cfi_startproc
  .cfi_undefined x30
  mov x0, x19
  blr x20
  brk #1
  .cfi_endproc
.size metalcore_start_context, .-metalcore_start_context
)");

#endif

namespace metalcore::simulator {

#if METALCORE_FAST_CONTEXT

extern "C" void metalcore_start_context();
extern "C" void metalcore_enter_context(void* enter);  // the second half of metalcore_switch_context

// Lays out the frame that metalcore_switch_context will pop.
void Context::prepare(char*, char* top, ContextEntry entry, void* argument) {
  auto* end = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(top) & ~uintptr_t{15});
#if defined(__x86_64__)
  void** frame = end - 9;  // six registers and the return address, leaving the stack aligned to 16
  frame[0] = frame[1] = frame[4] = frame[5] = nullptr;
  frame[2] = reinterpret_cast<void*>(entry);  // r13
  frame[3] = argument;                        // r12
  frame[6] = reinterpret_cast<void*>(&metalcore_start_context);
#else
  void** frame = end - 20;
  for (int i = 0; i < 20; ++i) frame[i] = nullptr;
  frame[0] = argument;                                            // x19
  frame[1] = reinterpret_cast<void*>(entry);                      // x20
  frame[11] = reinterpret_cast<void*>(&metalcore_start_context);  // x30
#endif
  stack_pointer_ = frame;
}

void Context::resume_after(ucontext_t& interrupted) const {
  mcontext_t& machine = interrupted.uc_mcontext;
#if defined(__x86_64__)
  machine.gregs[REG_RIP] = reinterpret_cast<greg_t>(&metalcore_enter_context);
  machine.gregs[REG_RDI] = reinterpret_cast<greg_t>(stack_pointer_);
#else
  machine.pc = reinterpret_cast<uintptr_t>(&metalcore_enter_context);
  machine.regs[0] = reinterpret_cast<uintptr_t>(stack_pointer_);
#endif
}

#else

namespace {
// makecontext passes ints only.
void start(unsigned entry_high, unsigned entry_low, unsigned argument_high, unsigned argument_low) {
  auto join = [](unsigned high, unsigned low) { return static_cast<uintptr_t>(uint64_t{high} << 32 | low); };
  reinterpret_cast<ContextEntry>(join(entry_high, entry_low))(
      reinterpret_cast<void*>(join(argument_high, argument_low)));
}
}  // namespace

void Context::prepare(char* base, char* top, ContextEntry entry, void* argument) {
  getcontext(&state());
  state().uc_stack.ss_sp = base;
  state().uc_stack.ss_size = static_cast<size_t>(top - base);
  state().uc_link = nullptr;
  const auto e = static_cast<uint64_t>(reinterpret_cast<uintptr_t>(entry));
  const auto a = static_cast<uint64_t>(reinterpret_cast<uintptr_t>(argument));
  makecontext(&state(), reinterpret_cast<void (*)()>(start), 4, static_cast<unsigned>(e >> 32),
              static_cast<unsigned>(e), static_cast<unsigned>(a >> 32), static_cast<unsigned>(a));
}

#endif

namespace {
constexpr size_t kPitch = Stacks::kSize + Stacks::kGuard;
}  // namespace

Stacks::Stack Stacks::get(size_t index) {
  char*& block = blocks_[index / kPerBlock];
  if (!block) {
    void* memory =
        mmap(nullptr, kPitch * kPerBlock, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    block = static_cast<char*>(memory);
    // The operating system refuses guards once a process has too many mappings; the stacks work without them.
    for (size_t i = 0; i < kPerBlock; ++i) mprotect(block + i * kPitch, kGuard, PROT_NONE);
  }
  char* base = block + (index % kPerBlock) * kPitch + kGuard;
  // The tops of 21 neighbouring stacks are 192 bytes apart; the next 21 begin a page lower; 16 pages are used in all.
  const size_t stagger = index % 21 * 192 + index / 21 % 16 * 4096;
  return {base, base + kSize - stagger};
}

Stacks::~Stacks() {
  for (char* block : blocks_)
    if (block) munmap(block, kPitch * kPerBlock);
}

}  // namespace metalcore::simulator
