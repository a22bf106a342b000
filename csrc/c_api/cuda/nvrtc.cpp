#include "compiler.h"

#include "../error.h"

#include <dlfcn.h>

#include <cstdlib>
#include <filesystem>
#include <memory>
#include <sstream>
#include <stdexcept>

namespace metalcore::c_api {
namespace {

namespace fs = std::filesystem;

constexpr std::pair kOldest = {12, 6};  // it has C++20's built-ins, and leaves the process's locale alone
constexpr const char* kNames[] = {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"};

// metalcore/msl/nvidia/nvrtc.py compiles with the same flags.
constexpr const char* kTensors = "#include \"metal/tensor_ops.h\"";
constexpr const char* kFlags[] = {"-std=c++20",       "--device-as-default-execution-space",
                                  "--device-int128",  "--fmad=true",
                                  "--ftz=false",      "--prec-div=true",
                                  "--prec-sqrt=true", "--disable-warnings"};

const char* environment(const char* name) {
  const char* const value = std::getenv(name);
  return value && *value ? value : nullptr;
}

std::string version_text(std::pair<int, int> version) {
  return std::to_string(version.first) + "." + std::to_string(version.second);
}

template <typename F>
void find(void* library, const char* name, F*& function) {
  function = reinterpret_cast<F*>(dlsym(library, name));
  if (!function) throw std::runtime_error(std::string("has no ") + name);
}

// NVRTC opens its builtins by name, and may not find them where they lie beside it.
void open_builtins(const void* function, std::pair<int, int> version) {
  Dl_info info;
  if (!dladdr(function, &info) || !info.dli_fname) return;
  std::error_code error;
  const fs::path library = fs::canonical(info.dli_fname, error);
  if (error) return;
  const fs::path builtins = library.parent_path() / ("libnvrtc-builtins.so." + version_text(version));
  if (fs::exists(builtins, error)) dlopen(builtins.c_str(), RTLD_NOW | RTLD_LOCAL);
}

std::vector<std::string> candidates() {
  if (const char* chosen = environment("METALCORE_NVRTC")) return {chosen};
  std::vector<std::string> found;
  const auto add_folder = [&](const fs::path& home) {
    std::error_code error;
    for (const char* folder : {"lib64", "lib"})
      for (const char* name : kNames)
        if (const fs::path path = home / folder / name; fs::exists(path, error)) found.push_back(path);
  };
  for (const char* name : kNames)
    if (void* open = dlopen(name, RTLD_LAZY | RTLD_NOLOAD)) {
      dlclose(open);
      found.emplace_back(name);
    }
  for (const char* variable : {"CUDA_HOME", "CUDA_PATH"})
    if (const char* home = environment(variable)) add_folder(home);
  found.insert(found.end(), std::begin(kNames), std::end(kNames));
  add_folder("/usr/local/cuda");
  return found;
}

std::unique_ptr<const Nvrtc> find_nvrtc() {
  std::string reasons;
  for (const std::string& library : candidates()) try {
      return std::make_unique<const Nvrtc>(library);
    } catch (const std::runtime_error& error) {
      reasons += (reasons.empty() ? " (" : "; ") + library + " " + error.what();
    }
  throw Error(METALCORE_NO_DEVICE, "kernels for NVIDIA GPUs need NVRTC " + version_text(kOldest) +
                                       " or newer; METALCORE_NVRTC can be the path of libnvrtc.so" + reasons + ")");
}

}  // namespace

Nvrtc::Nvrtc(const std::string& name) {
  void* const library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) throw std::runtime_error("cannot be opened");
  Functions& f = functions_;
  find(library, "nvrtcVersion", f.version);
  find(library, "nvrtcGetNumSupportedArchs", f.architecture_count);
  find(library, "nvrtcGetSupportedArchs", f.architectures);
  find(library, "nvrtcGetErrorString", f.error_text);
  find(library, "nvrtcCreateProgram", f.create);
  find(library, "nvrtcCompileProgram", f.compile);
  find(library, "nvrtcDestroyProgram", f.destroy);
  find(library, "nvrtcGetProgramLogSize", f.log_size);
  find(library, "nvrtcGetProgramLog", f.log);
  find(library, "nvrtcGetCUBINSize", f.cubin_size);
  find(library, "nvrtcGetCUBIN", f.cubin);
  find(library, "nvrtcGetPTXSize", f.ptx_size);
  find(library, "nvrtcGetPTX", f.ptx);
  check(f.version(&version_.first, &version_.second), "asking for its version");
  if (version_ < kOldest) throw std::runtime_error("is version " + version_text(version_));
  open_builtins(reinterpret_cast<const void*>(f.version), version_);
}

void Nvrtc::check(int status, const char* what) const {
  if (status) throw std::runtime_error(std::string("metalcore: NVRTC: ") + what + ": " + functions_.error_text(status));
}

std::string Nvrtc::target(int arch) const {
  int count = 0;
  check(functions_.architecture_count(&count), "counting its GPUs");
  std::vector<int> known(static_cast<size_t>(count));
  check(functions_.architectures(known.data()), "asking for its GPUs");
  int newest = 0;  // of those that are not newer than this GPU
  for (int architecture : known) {
    if (architecture == arch) return "sm_" + std::to_string(arch);
    if (architecture < arch && architecture > newest) newest = architecture;
  }
  if (!newest)
    throw Error(METALCORE_NO_DEVICE, "NVRTC " + version_text(version_) + " no longer compiles for GPUs of compute " +
                                         "capability " + version_text({arch / 10, arch % 10}));
  return "compute_" + std::to_string(newest);
}

std::string Nvrtc::compile(const std::string& program, int arch, const std::vector<std::string>& include,
                           const char* flag) const {
  std::string wanted = target(arch);
  if (wanted == "sm_90" && program.find(kTensors) != std::string::npos) wanted += "a";  // as nvrtc.py does
  std::vector<std::string> options = {"--gpu-architecture=" + wanted};
  for (const std::string& folder : include) options.push_back("--include-path=" + folder);
  options.insert(options.end(), std::begin(kFlags), std::end(kFlags));
  options.emplace_back(flag);
  if (const char* more = environment("METALCORE_NVRTC_FLAGS")) {
    std::istringstream words(more);
    for (std::string word; words >> word;) options.push_back(word);
  }
  std::vector<const char*> texts;
  for (const std::string& option : options) texts.push_back(option.c_str());

  Program made = nullptr;
  check(functions_.create(&made, program.c_str(), "msl_program", 0, nullptr, nullptr), "taking a program");
  const auto destroy = [this](Program p) { functions_.destroy(&p); };
  const std::unique_ptr<ProgramObject, decltype(destroy)> owned(made, destroy);
  if (const int failed = functions_.compile(made, static_cast<int>(texts.size()), texts.data())) {
    std::string log = read(made, functions_.log_size, functions_.log);
    while (!log.empty() && (log.back() == '\0' || log.back() == '\n')) log.pop_back();
    throw std::runtime_error(std::string("metalcore: NVRTC: ") + functions_.error_text(failed) + "\n" + log);
  }
  return wanted[0] == 's' ? read(made, functions_.cubin_size, functions_.cubin)
                          : read(made, functions_.ptx_size, functions_.ptx);
}

std::string Nvrtc::read(Program program, int (*size)(Program, size_t*), int (*read)(Program, char*)) const {
  size_t bytes = 0;
  check(size(program, &bytes), "asking for a result");
  std::string content(bytes, '\0');
  check(read(program, content.data()), "asking for a result");
  return content;
}

const Nvrtc& nvrtc() {
  static const std::unique_ptr<const Nvrtc> found = find_nvrtc();
  return *found;
}

}  // namespace metalcore::c_api
