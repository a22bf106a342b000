#include "kernels.h"

#include <algorithm>
#include <charconv>
#include <functional>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <stdexcept>
#include <unordered_map>

namespace metalcore::cuda {
namespace {

constexpr size_t kFine = 256;  // capacities up to this one are multiples of 16
constexpr uint8_t kFineCodes = kFine / kAlignment;

[[noreturn]] void reject(std::string_view signature) {
  throw std::invalid_argument("metalcore: '" + std::string(signature) + "' is not a signature such as b0,b1,t0,i2:48");
}

}  // namespace

uint8_t capacity_code(size_t size) {
  if (size <= kFine) return static_cast<uint8_t>(size ? aligned(size) / kAlignment : 1);
  uint8_t code = kFineCodes + 1;
  while (capacity_of(code) < size) ++code;
  return code;
}

size_t capacity_of(uint8_t code) { return code <= kFineCodes ? code * kAlignment : kFine << (code - kFineCodes); }

size_t block_size(const Layout& layout) {
  const int addresses = __builtin_popcount(layout.buffers) + __builtin_popcount(layout.threadgroups);
  size_t size = aligned(sizeof(Grid) + sizeof(uint64_t) * static_cast<size_t>(addresses));
  for_each_bit(layout.bytes, [&](uint32_t i) { size += capacity_of(layout.capacity[i]); });
  return size;
}

std::string signature(const Layout& layout) {
  std::string text;
  const auto append = [&](char kind) {
    return [&text, kind](uint32_t i) { text += (text.empty() ? "" : ",") + (kind + std::to_string(i)); };
  };
  for_each_bit(layout.buffers, append('b'));
  for_each_bit(layout.threadgroups, append('t'));
  for_each_bit(layout.bytes, [&](uint32_t i) {
    append('i')(i);
    text += ":" + std::to_string(capacity_of(layout.capacity[i]));
  });
  return text;
}

Layout parse_layout(std::string_view text) {
  Layout layout;
  const char* at = text.data();
  const char* const end = at + text.size();
  const auto number = [&](size_t most) {
    size_t value = 0;
    const auto [next, error] = std::from_chars(at, end, value);
    if (error != std::errc() || value > most) reject(text);
    at = next;
    return value;
  };
  while (at != end) {
    const char kind = *at++;
    const auto index = static_cast<uint32_t>(number(gpu::kMaximumBuffers - 1));
    uint32_t& mask = kind == 'b' ? layout.buffers : kind == 't' ? layout.threadgroups : layout.bytes;
    if ((kind != 'b' && kind != 't' && kind != 'i') || mask >> index & 1) reject(text);
    mask |= 1u << index;
    if (kind == 'i') {
      if (at == end || *at++ != ':') reject(text);
      const size_t capacity = number(gpu::kMaximumBytes);
      layout.capacity[index] = capacity ? capacity_code(capacity) : 0;
      if (capacity_of(layout.capacity[index]) != capacity) reject(text);
    }
    if (at != end && (*at++ != ',' || at == end)) reject(text);
  }
  if (layout.buffers & layout.bytes) reject(text);
  return layout;
}

namespace {

struct Key {
  uint32_t program;
  std::string_view name;  // of the NamedKernel itself in the map, or of the kernel that is looked for

  bool operator==(const Key&) const = default;
};

struct Hash {
  size_t operator()(const Key& key) const { return std::hash<std::string_view>{}(key.name) + key.program; }
};

// It is never destroyed: kernels may be launched while the process ends.
struct Kernels {
  std::shared_mutex mutex;
  std::unordered_map<Key, std::unique_ptr<NamedKernel>, Hash> by_name;
  std::mutex adding, loading;
};

Kernels& kernels() {
  static auto* made = new Kernels;
  return *made;
}

// While it lives, this thread may do what a capture cannot record, although a stream of any thread is being captured:
// nothing that is done meanwhile belongs in the capture.
class OutsideCapture {
 public:
  OutsideCapture() { check(driver().exchange_capture_mode(&mode_), "leaving the capture mode"); }
  ~OutsideCapture() { open_driver().exchange_capture_mode(&mode_); }
  OutsideCapture(const OutsideCapture&) = delete;

 private:
  int mode_ = kCaptureRelaxed;  // the mode to change to: first this one, then the one before
};

[[noreturn]] void fail_to_load(const Variant& variant, Status status) {
  fail("loading " + variant.kernel.description() + " (" + signature(variant.layout) + ")", status);
}

uint32_t attribute(const Variant& variant, Function function, Attribute which) {
  int value = 0;
  if (const Status status = driver().function_attribute(&value, which, function)) fail_to_load(variant, status);
  return static_cast<uint32_t>(value);
}

// Checks that the entry takes the block that we make. (Layouts of bytes without a capacity are never launched.)
void check_block(const Variant& variant, Function function) {
  const Layout& layout = variant.layout;
  bool known = driver().parameter_info != nullptr;
  for_each_bit(layout.bytes, [&](uint32_t i) { known = known && layout.capacity[i] != 0; });
  size_t offset = 0, size = 0;
  if (!known || driver().parameter_info(function, 0, &offset, &size) != kSuccess) return;
  if (aligned(size) != aligned(block_size(layout)))
    throw std::logic_error("metalcore: " + variant.kernel.description() + " (" + signature(layout) + ") takes " +
                           std::to_string(size) + " bytes of parameters, not " + std::to_string(block_size(layout)));
}

// Kernels that multiply tensors have pipelines in dynamic shared memory, and say in the name of a variable how many KiB
// they want (see metalcore/msl/include/cuda/target/tensor_product.h). The code, a cubin or PTX, has that name.
uint32_t pipeline_memory(std::string_view code) {
  constexpr std::string_view kName = "metalcore_pipeline_kibILi";
  uint32_t most = 0;
  for (size_t at = code.find(kName); at != code.npos; at = code.find(kName, at + 1)) {
    uint32_t kib = 0;
    const char* const number = code.data() + at + kName.size();
    std::from_chars(number, code.data() + code.size(), kib);
    most = std::max(most, kib * 1024);
  }
  return most;
}

const Loaded* load_on(const Device& device, const Variant& variant, const Variant::Code& code) {
  const Driver& d = driver();
  Loaded loaded = {};
  Status status = d.kernel_function(&loaded.function, code.kernel);
  if (status == kSuccess && d.load_function) status = d.load_function(loaded.function);
  if (status != kSuccess) fail_to_load(variant, status);
  check_block(variant, loaded.function);
  loaded.max_threads = attribute(variant, loaded.function, Attribute::kMaxThreadsPerBlock);
  loaded.static_memory = attribute(variant, loaded.function, Attribute::kStaticSharedMemory);
  loaded.registers = attribute(variant, loaded.function, Attribute::kRegisters);
  loaded.local_memory = attribute(variant, loaded.function, Attribute::kLocalMemory);
  const uint32_t dynamic = device.shared_memory - std::min(device.shared_memory, loaded.static_memory);
  loaded.pipeline_memory = code.pipeline_memory;
  loaded.max_dynamic_memory = dynamic - std::min(dynamic, code.pipeline_memory);
  if (variant.layout.threadgroups ||
      code.pipeline_memory)  // the limit is 48 KiB for functions that do not ask for more
    if ((status =
             d.set_function_attribute(loaded.function, Attribute::kMaxDynamicSharedMemory, static_cast<int>(dynamic))))
      fail_to_load(variant, status);
  if (device.most_together > 8 &&
      (status = d.set_function_attribute(loaded.function, Attribute::kLargeClusters, 1)) != kSuccess)
    fail_to_load(variant, status);
  return new Loaded(loaded);
}

const Variant::Code* compiled_for(const Variant& variant, int arch) {
  for (const Variant::Code& code : variant.compiled)
    if (code.arch == arch) return &code;
  return nullptr;
}

std::vector<Variant*> not_compiled(const std::vector<Variant*>& variants, int arch) {
  std::lock_guard lock(kernels().loading);
  std::vector<Variant*> missing;
  for (Variant* variant : variants)
    if (!compiled_for(*variant, arch)) missing.push_back(variant);
  return missing;
}

Kernel load_code(const Variant& variant, const Compiled& compiled) {
  Binary binary = nullptr;
  Kernel kernel = nullptr;
  Status status = driver().load_binary(&binary, compiled.code.data(), nullptr, nullptr, 0, nullptr, nullptr, 0);
  if (status == kSuccess) status = driver().binary_kernel(&kernel, binary, compiled.entry.c_str());
  if (status != kSuccess) fail_to_load(variant, status);
  return kernel;
}

}  // namespace

NamedKernel& find_kernel(uint32_t program, std::string_view name) {
  Kernels& known = kernels();
  {
    std::shared_lock lock(known.mutex);
    if (const auto found = known.by_name.find({program, name}); found != known.by_name.end()) return *found->second;
  }
  auto made = std::make_unique<NamedKernel>();
  made->program = program;
  made->name = name;
  const Key key = {program, made->name};
  std::unique_lock lock(known.mutex);
  return *known.by_name.try_emplace(key, std::move(made)).first->second;
}

Variant& NamedKernel::variant(const Layout& layout) {
  const auto search = [&](Variant* first) {
    while (first && !(first->layout == layout)) first = first->next;
    return first;
  };
  if (Variant* found = search(variants.load(std::memory_order_acquire))) return *found;
  std::lock_guard lock(kernels().adding);
  Variant* first = variants.load(std::memory_order_relaxed);
  if (Variant* found = search(first)) return *found;
  auto* made = new Variant{*this, layout, first};
  variants.store(made, std::memory_order_release);
  return *made;
}

void load(const Device& device, const std::vector<Variant*>& variants) {
  const std::vector<Variant*> missing = not_compiled(variants, device.arch);
  std::vector<Compiled> compiled;
  if (!missing.empty()) {
    std::vector<Request> requests;
    for (const Variant* variant : missing)
      requests.push_back({variant->kernel.program, variant->kernel.name, signature(variant->layout)});
    compiled = compile(device.arch, requests);
  }
  const OutsideCapture outside;
  std::lock_guard lock(kernels().loading);
  for (size_t i = 0; i < missing.size(); ++i)
    if (!compiled_for(*missing[i], device.arch)) {  // another thread may have loaded it meanwhile
      if (missing[i]->kernel.source.empty()) missing[i]->kernel.source = compiled[i].source;
      missing[i]->compiled.push_back(
          {device.arch, load_code(*missing[i], compiled[i]), pipeline_memory(compiled[i].code)});
    }
  for (Variant* variant : variants) {
    auto& slot = variant->on[device.index];
    if (!slot.load(std::memory_order_relaxed))
      slot.store(load_on(device, *variant, *compiled_for(*variant, device.arch)), std::memory_order_release);
  }
}

}  // namespace metalcore::cuda
