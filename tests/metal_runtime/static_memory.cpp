// A kernel's static threadgroup memory, which Metal tells before the kernel runs. Here a child process runs one thread
// of each kernel of a library, and writes down the threadgroup variables that the thread asks for before anything else
// that the executor does. The kernels get numbers that mean nothing: one may write where it ends the process, and
// another process goes on with the kernel after it.
#include "static_memory.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csetjmp>
#include <csignal>
#include <cstdint>
#include <iterator>
#include <map>
#include <mutex>
#include <stdexcept>
#include <vector>

namespace metalcore::metal_runtime {

namespace {

constexpr uint32_t kVariables = 64;  // greater sites are arguments of the kernel

// In the child, which takes no lock: another thread of the parent may have held it (malloc's are free in a child, those
// of destructors at the end of the process are not).
uint32_t* bytes_of_kernel;
sigjmp_buf end_of_kernel;
alignas(64) char memory[64 * 1024];
alignas(64) uint32_t ones[1 << 16];

void* note(uint32_t site, uint32_t bytes, uint32_t) {
  if (site < kVariables) *bytes_of_kernel += (bytes + 15) / 16 * 16;
  return memory;
}

template <typename Result, typename... Arguments>
Result end(Arguments...) {
  siglongjmp(end_of_kernel, 1);
}

// `begun` is the number of kernels that have been begun.
[[noreturn]] void run_kernels(const msl_abi::Library& library, uint32_t* bytes, volatile uint32_t* begun) {
  for (int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGALRM}) std::signal(signal, end<void, int>);
  void* buffers[simulator::kMaximumBuffers];
  for (void*& buffer : buffers) buffer = ones;
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
  library.bind(&runtime);
  const msl_abi::Dispatch dispatch = {buffers, lengths, one, one, one};
  while (*begun < library.kernel_count) {
    const msl_abi::Kernel& kernel = library.kernels[*begun];
    std::fill(std::begin(ones), std::end(ones), 1);  // the kernel before may have written there
    bytes_of_kernel = bytes + *begun;
    ++*begun;
    alarm(2);
    if (sigsetjmp(end_of_kernel, 1) == 0 && kernel.flags & msl_abi::kSynchronizes)
      kernel.run_thread(&dispatch, &thread);
  }
  _exit(0);
}

std::vector<uint32_t> found_by_children(const msl_abi::Library& library) {
  const size_t size = (library.kernel_count + 1) * sizeof(uint32_t);
  void* const shared = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) throw std::runtime_error("mmap() failed");
  const auto begun = static_cast<uint32_t*>(shared), bytes = begun + 1;
  for (uint32_t before = ~0u; *begun < library.kernel_count && *begun != before;) {
    before = *begun;
    const pid_t child = fork();
    if (child == 0) run_kernels(library, bytes, begun);
    waitpid(child, nullptr, 0);
  }
  const bool all = *begun == library.kernel_count;
  std::vector<uint32_t> found(bytes, bytes + library.kernel_count);
  munmap(shared, size);
  if (!all) throw std::runtime_error("no process finds out about a library's threadgroup memory");
  return found;
}

}  // namespace

size_t static_memory(const simulator::KernelReference& kernel) {
  static std::mutex mutex;
  static auto& known = *new std::map<const msl_abi::Library*, std::vector<uint32_t>>;
  const std::lock_guard lock(mutex);
  const msl_abi::Library& library = *kernel.library->abi;
  auto at = known.find(&library);
  if (at == known.end()) at = known.emplace(&library, found_by_children(library)).first;
  return at->second[kernel.kernel - library.kernels];
}

}  // namespace metalcore::metal_runtime
