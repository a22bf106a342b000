#include "library.h"

#include "../../gpu/kernel_index.h"
#include "interpreter.h"
#include "modes.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>

#include <cstring>
#include <deque>
#include <filesystem>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <unordered_map>
#include <vector>

namespace metalcore::simulator {

Segments::Segments(const void* symbol) {
  struct Search {
    uintptr_t symbol;
    Segments* segments;
  } search{reinterpret_cast<uintptr_t>(symbol), this};
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* data) {
        auto& search = *static_cast<Search*>(data);
        bool found = false;
        std::vector<Range> ranges;
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          const auto& header = info->dlpi_phdr[i];
          if (header.p_type != PT_LOAD) continue;
          const uintptr_t begin = info->dlpi_addr + header.p_vaddr, end = begin + header.p_memsz;
          found |= search.symbol >= begin && search.symbol < end;
          ranges.push_back(
              {reinterpret_cast<const char*>(begin), reinterpret_cast<const char*>(end), (header.p_flags & PF_X) != 0});
        }
        if (!found) return 0;
        search.segments->ranges_ = std::move(ranges);
        search.segments->base_ = reinterpret_cast<const char*>(info->dlpi_addr);
        return 1;
      },
      &search);
}

bool Segments::contain(const char* address, size_t size) const {
  for (const Range& range : ranges_)
    if (address >= range.begin && address + size <= range.end) return true;
  return false;
}

bool Segments::is_code(const char* address) const {
  for (const Range& range : ranges_)
    if (range.code && address >= range.begin && address < range.end) return true;
  return false;
}

namespace {

namespace fs = std::filesystem;

// With this hash a map of strings can be searched by string_view.
struct Text {
  using is_transparent = void;
  size_t operator()(std::string_view text) const { return std::hash<std::string_view>{}(text); }
};

using References = std::unordered_map<std::string, KernelReference, Text, std::equal_to<>>;

// The folder `lib` beside the extension that holds this code.
std::string default_library_path() {
  Dl_info info;
  if (!dladdr(reinterpret_cast<void*>(&load_library), &info) || !info.dli_fname) return "";
  return (fs::absolute(info.dli_fname).parent_path() / "lib").string();
}

struct State {
  std::mutex mutex;
  std::deque<Library> libraries;  // references stay valid
  std::map<std::string, const Library*> by_path;
  std::string library_path = default_library_path(), isa;
  std::optional<gpu::KernelIndex> index;
  References by_name[4];  // those asked for, by Variant
};

// It is never destroyed: kernels may still run while the process ends. A fork waits until no library is being opened.
State& state() {
  static State* made = [] {
    pthread_atfork([] { state().mutex.lock(); }, [] { state().mutex.unlock(); }, [] { state().mutex.unlock(); });
    return new State;
  }();
  return *made;
}

std::vector<std::string> suitable_isas() {
#if defined(__x86_64__)
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
                  __builtin_cpu_supports("bmi2");
  const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512vl");
  if (v4) return {"x86-64-v4", "x86-64-v3", "x86-64"};
  if (v3) return {"x86-64-v3", "x86-64"};
  return {"x86-64"};
#elif defined(__aarch64__)
  return {"aarch64", "arm64"};
#else
  return {};
#endif
}

// A library is translated for checking mode or not. Of some families there is another one for CPUs that flush.
struct Variant {
  bool checking, flushing;
  References& references(State& s) const { return s.by_name[2 * checking + flushing]; }
};

// Libraries of built-in kernels lie in the folders of an instruction set, and have their sources' paths.
std::string source_of(const State& s, const fs::path& library) {
  const fs::path path = library.lexically_relative(s.library_path);
  if (path.empty() || *path.begin() == "..") return "";
  return path.lexically_relative(*path.begin()).replace_extension(".metal").string();
}

const Library& load(State& s, const std::string& path, const std::string& source) {
  if (const auto found = s.by_path.find(path); found != s.by_path.end()) return *found->second;
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle) {
    const char* reason = dlerror();
    throw std::runtime_error("metalcore: cannot open the kernel library " + path + ": " +
                             (reason ? reason : "unknown error"));
  }
  auto* entry = reinterpret_cast<const msl_abi::Library* (*)()>(dlsym(handle, "msl_library"));
  const msl_abi::Library* abi = entry ? entry() : nullptr;
  if (!abi || abi->version != msl_abi::kVersion) {
    const std::string problem = abi ? "has version " + std::to_string(abi->version) +
                                          " of the kernel interface, this executor has version " +
                                          std::to_string(msl_abi::kVersion)
                                    : "is not a translated kernel library";
    dlclose(handle);
    throw std::runtime_error("metalcore: " + path + " " + problem);
  }
  const msl_abi::Runtime* const runtimes[] = {normal_runtime(), checking_runtime(), counting_runtime()};
  abi->bind(runtimes[abi->checking]);
  s.libraries.push_back({path, source, abi, static_cast<uint32_t>(s.libraries.size()), Segments(abi)});
  s.by_path[path] = &s.libraries.back();
  return s.libraries.back();
}

std::string isa(State& s) {
  if (s.isa.empty()) {
    const auto isas = suitable_isas();
    std::error_code error;
    for (const auto& isa : isas)
      if (fs::is_directory(fs::path(s.library_path) / isa, error)) return s.isa = isa;
    if (isas.empty()) return "";
    return fs::exists(fs::path(s.library_path) / "on-first-use", error) ? isas.front() : isas.back();
  }
  return s.isa;
}

}  // namespace

const msl_abi::Kernel* Library::find(std::string_view kernel) const {
  for (uint32_t i = 0; i < abi->kernel_count; ++i)
    if (kernel == abi->kernels[i].name) return &abi->kernels[i];
  return nullptr;
}

std::string describe(const KernelReference& kernel) {
  const std::string& source = kernel.library->source;
  return "kernel '" + std::string(kernel.kernel->name) + "'" + (source.empty() ? "" : " of " + source);
}

const Library& load_library(const std::string& path) {
  State& s = state();
  std::lock_guard lock(s.mutex);
  return load(s, path, source_of(s, path));
}

const Library& library(uint32_t id) {
  State& s = state();
  std::lock_guard lock(s.mutex);
  if (id >= s.libraries.size())
    throw std::out_of_range("metalcore: no kernel library has the id " + std::to_string(id));
  return s.libraries[id];
}

namespace {

KernelReference keep(State& s, const Library& opened, std::string_view kernel, Variant variant) {
  const msl_abi::Kernel* found = opened.find(kernel);
  if (!found)
    throw std::runtime_error("metalcore: " + opened.path + " has no kernel '" + std::string(kernel) +
                             "', which it should have");
  return variant.references(s).emplace(kernel, KernelReference{&opened, found}).first->second;
}

// A built-in kernel's family, and where its library is or would be.
struct Builtin {
  std::string family;
  fs::path path;
};

Builtin find_builtin(State& s, std::string_view kernel, Variant variant) {
  const fs::path library = s.library_path, folder = library / (variant.checking ? "checking" : isa(s));
  std::error_code error;
  if (!fs::is_directory(folder, error) && !fs::exists(library / "on-first-use", error))
    throw std::runtime_error("metalcore: there is no built-in kernel named '" + std::string(kernel) +
                             "': metalcore was built without kernels for the simulator on this CPU (METALCORE_ISA), "
                             "and " +
                             folder.string() + " is missing");
  if (!s.index) s.index.emplace(s.library_path);
  const std::string& family = s.index->family(kernel);
  const std::string file = family + ".so";
  const fs::path flushing = fs::path(folder.string() + "-flushing") / file;
  const bool has_variant = variant.flushing && fs::exists(flushing, error);
  return {family, has_variant ? flushing : folder / file};
}

// Whether the kernels, which the build has left out, are compiled when they are first used.
bool compiled_on_first_use(const State& s, const Builtin& builtin) {
  std::error_code error;
  return !fs::exists(builtin.path, error) && fs::exists(fs::path(s.library_path) / "on-first-use", error);
}

}  // namespace

KernelReference find_kernel(std::string_view kernel, bool checking) {
  State& s = state();
  const Variant variant = {checking, flushes_subnormals()};
  std::optional<Builtin> builtin;
  {
    std::lock_guard lock(s.mutex);
    const References& references = variant.references(s);
    if (const auto found = references.find(kernel); found != references.end()) return found->second;
    if (!gpu::generated_source(kernel)) {
      builtin = find_builtin(s, kernel, variant);
      if (!compiled_on_first_use(s, *builtin))
        return keep(s, load(s, builtin->path.string(), source_of(s, builtin->path)), kernel, variant);
    }
  }
  const std::string path = compile_kernel(kernel, builtin ? builtin->family : "", checking, variant.flushing);
  std::lock_guard lock(s.mutex);
  return keep(s, load(s, path, builtin ? source_of(s, builtin->path) : ""), kernel, variant);
}

KernelReference find_counting_kernel(std::string_view kernel) {
  State& s = state();
  std::string family;
  {
    std::lock_guard lock(s.mutex);
    if (!gpu::generated_source(kernel)) family = find_builtin(s, kernel, {false, false}).family;
  }
  const Library& opened = load_library(compile_counting(kernel, family));
  if (const msl_abi::Kernel* found = opened.find(kernel)) return {&opened, found};
  throw std::runtime_error("metalcore: " + opened.path + " has no kernel '" + std::string(kernel) + "'");
}

void set_library_path(const std::string& path) {
  State& s = state();
  std::lock_guard lock(s.mutex);
  s.library_path = path;
  s.isa.clear();
  s.index.reset();
  for (References& references : s.by_name) references.clear();
}

std::string library_path() {
  State& s = state();
  std::lock_guard lock(s.mutex);
  return s.library_path;
}

std::string builtin_isa() {
  State& s = state();
  std::lock_guard lock(s.mutex);
  return isa(s);
}

}  // namespace metalcore::simulator
