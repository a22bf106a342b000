// A kernel's static threadgroup memory, which Metal tells before the kernel runs. Here a child process runs one thread
// of it, and writes down the threadgroup variables that it asks for before anything else that the executor does.
#include "static_memory.h"

#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <map>
#include <mutex>
#include <stdexcept>
#include <vector>

namespace metalcore::metal_runtime {

namespace {

constexpr uint32_t kVariables = 64;  // greater sites are arguments of the kernel

int written_to = -1;  // in the child
alignas(64) char memory[64 * 1024];

void* note(uint32_t site, uint32_t bytes, uint32_t) {
  if (site < kVariables && write(written_to, &bytes, sizeof bytes) != sizeof bytes) _exit(1);
  return memory;
}

template <typename Result, typename... Arguments>
Result end(Arguments...) {
  _exit(0);
}

[[noreturn]] void run_thread(const simulator::KernelReference& kernel) {
  for (int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT}) std::signal(signal, SIG_DFL);
  alarm(2);
  static std::vector<uint32_t> ones(1 << 16, 1);
  void* buffers[simulator::kMaximumBuffers];
  for (void*& buffer : buffers) buffer = ones.data();
  const uint32_t lengths[simulator::kMaximumBuffers] = {};
  const msl_abi::Uint3 one = {1, 1, 1};
  static const msl_abi::Thread thread = {.threadgroup_size = one, .simdgroups = 1};
  static const msl_abi::Runtime runtime = {
      .version = msl_abi::kVersion,
      .self = [] { return &thread; },
      .threadgroup_barrier = end,
      .simdgroup_barrier = end,
      .simd_exchange = end,
      .threadgroup_memory = note,
      .yield = [] {},
      .space = [](const void*) { return msl_abi::Space::memory; },
      .access = end,
      .finding = end,
  };
  kernel.library->abi->bind(&runtime);
  const msl_abi::Dispatch dispatch = {buffers, lengths, one, one, one};
  kernel.kernel->run_thread(&dispatch, &thread);
  _exit(0);
}

size_t found_by_child(const simulator::KernelReference& kernel) {
  int ends[2];
  if (pipe(ends) != 0) throw std::runtime_error("pipe() failed");
  const pid_t child = fork();
  if (child == 0) {
    written_to = ends[1];
    run_thread(kernel);
  }
  close(ends[1]);
  size_t bytes = 0;
  for (uint32_t variable; read(ends[0], &variable, sizeof variable) == sizeof variable;)
    bytes += (variable + 15) / 16 * 16;
  close(ends[0]);
  waitpid(child, nullptr, 0);
  return bytes;
}

}  // namespace

size_t static_memory(const simulator::KernelReference& kernel) {
  if (!(kernel.kernel->flags & msl_abi::kSynchronizes)) return 0;
  static std::mutex mutex;
  static auto& known = *new std::map<const msl_abi::Kernel*, size_t>;
  const std::lock_guard lock(mutex);
  const auto [at, first] = known.try_emplace(kernel.kernel, 0);
  if (first) at->second = found_by_child(kernel);
  return at->second;
}

}  // namespace metalcore::metal_runtime
