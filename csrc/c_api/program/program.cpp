#include "program.h"

#include "container.h"

#include "../call.h"
#include "../error.h"

#include <filesystem>
#include <memory>
#include <stdexcept>
#include <string>

using namespace metalcore;
using namespace metalcore::c_api;

namespace {

constexpr uintptr_t kAlignment = 16;  // of arrays: kernels are chosen by it
constexpr const char* kFormat = "metalcore program";
constexpr const char* kVersion = "2";

[[noreturn]] void refuse(const std::string& text) { throw Error(METALCORE_INVALID_ARGUMENT, text); }

const char* device_name(int32_t type) { return type == aoti_torch_device_type_cuda() ? "cuda" : "mps"; }

void check_program(const Container& file) {
  const std::string *format = file.metadata("format"), *version = file.metadata("version");
  if (!format || *format != kFormat) file.fail("it is no program");
  if (!version || *version != kVersion)
    file.fail("it is of version '" + (version ? version->substr(0, 20) : "") + "'; this metalcore reads version " +
              kVersion);
  file.check_digest();
}

std::unique_ptr<Container> open_weights(const std::string& program, const char* given, const std::string& name) {
  if (name.empty()) {
    if (given) refuse("weights are given, and the program's are inside of it");
    return nullptr;
  }
  namespace fs = std::filesystem;
  auto file = std::make_unique<Container>(given ? given : (fs::path(program).parent_path() / name).string());
  if (file->has_digest()) file->check_digest();
  return file;
}

Json read_recipe(const Container& file) {
  const std::string* const manifest = file.metadata("program");
  try {
    return Json::parse(manifest ? *manifest : "").at("recipe");
  } catch (const std::runtime_error& error) {
    file.fail(error.what());
  }
}

std::string constant_of(const Array& constant, const Container& file, const Container* weights, const Json& recipe) {
  try {
    return read_constant(constant, file, weights, recipe);
  } catch (const Error&) {
    throw;
  } catch (const std::runtime_error& error) {
    file.fail(error.what());
  }
}

}  // namespace

metalcore_program::metalcore_program(const std::string& path, const char* weights, bool trusted)
    : device_type_(running().device_type), index_(running().index) {
  Memory& memory = *running().memory;
  const Container file(path);
  check_program(file);
  plan_ = read_plan(file, device_name(device_type_));
  const std::unique_ptr<Container> apart = open_weights(path, weights, plan_.weights);
  copies_inputs_ = memory.on_host() && !trusted;
  try {
    prepared_ = memory.prepare(plan_.recording, device_type_, index_, trusted);
  } catch (const std::invalid_argument& error) {  // a dispatch that its kernel cannot have
    file.fail(error.what());
  }
  memory_.resize(plan_.storages());
  places_.resize(plan_.storages());
  const Json recipe = plan_.weights.empty() ? Json() : read_recipe(file);
  try {
    const size_t first = plan_.inputs.size() + plan_.outputs.size();
    for (const Array& constant : plan_.constants) {
      const std::string bytes = constant_of(constant, file, apart.get(), recipe);
      constants_.reserve(plan_.constants.size());
      constants_.push_back(bytes.empty() ? nullptr : memory.allocate(bytes.size()));
      if (!bytes.empty()) memory.write(constants_.back(), bytes.data(), bytes.size());
      memory_[first + constants_.size() - 1] = constants_.back();
    }
  } catch (...) {
    free(memory);
    throw;
  }
}

void metalcore_program::free(Memory& memory) noexcept {
  for (void* constant : constants_)
    if (constant) memory.free(constant);
  constants_.clear();
}

void metalcore_program::require_device() const {
  if (running().device_type != device_type_ || running().index != index_)
    refuse("the thread's context is of another device than the program");
}

void metalcore_program::use(const Array& array, size_t storage, const void* data, bool written) {
  memory_[storage] = const_cast<void*>(data);
  if (array.bytes == 0) return;
  const auto begin = reinterpret_cast<uintptr_t>(data);
  if (!data) refuse(array.name + " is NULL");
  if (begin % kAlignment) refuse(array.name + " does not begin at a multiple of 16");
  if (array.bytes > INTPTR_MAX || begin > INTPTR_MAX - array.bytes) refuse(array.name + " does not fit into memory");
  for (size_t i = 0; i < storage; ++i) {
    const bool is_input = i < plan_.inputs.size();
    const Array& other = is_input ? plan_.inputs[i] : plan_.outputs[i - plan_.inputs.size()];
    const auto other_begin = reinterpret_cast<uintptr_t>(memory_[i]);
    if (other.bytes == 0 || (!written && is_input)) continue;
    if (begin < other_begin + other.bytes && other_begin < begin + array.bytes)
      refuse(array.name + " overlaps " + other.name);
  }
}

void metalcore_program::run(const void* const* inputs, void* const* outputs) {
  require_device();
  metalcore_context& context = running();
  if ((!inputs && !plan_.inputs.empty()) || (!outputs && !plan_.outputs.empty())) refuse("inputs or outputs is NULL");
  const size_t first_output = plan_.inputs.size();
  for (size_t i = 0; i < plan_.inputs.size(); ++i) use(plan_.inputs[i], i, inputs[i], false);
  for (size_t i = 0; i < plan_.outputs.size(); ++i) use(plan_.outputs[i], first_output + i, outputs[i], true);
  for (size_t i = 0; i < plan_.inputs.size(); ++i) {
    const size_t bytes = plan_.inputs[i].bytes;
    if (bytes == 0) continue;
    if (copies_inputs_) {
      memory_[i] = context.arena.take(bytes);
      context.memory->write(memory_[i], inputs[i], bytes);
    } else {
      context.memory->use_array(memory_[i], bytes, Access::kRead);
    }
  }
  for (size_t i = 0; i < plan_.outputs.size(); ++i)
    if (plan_.outputs[i].bytes > 0)
      context.memory->use_array(memory_[first_output + i], plan_.outputs[i].bytes, Access::kWritten);
  memory_.back() = context.arena.take(plan_.scratch);
  bind();
  prepared_->submit(0, plan_.recording.dispatches().size());
}

void metalcore_program::bind() {
  const bool first = bound_places_.empty();
  bool same = !first;
  if (first) bound_places_.resize(places_.size());
  for (size_t i = 0; i < places_.size(); ++i) {
    places_[i] = memory_[i] ? running().memory->place_of(memory_[i]) : Place{nullptr, 0};
    same = same && places_[i].storage == bound_places_[i].storage && places_[i].offset == bound_places_[i].offset;
  }
  if (same) return;
  bound_places_ = places_;
  std::vector<gpu::BufferView>& views = plan_.recording.views();
  for (size_t i = 0; i < views.size(); ++i) {
    const auto& [storage, offset] = plan_.places[i];
    if (storage < 0) continue;
    const Place& place = places_[static_cast<size_t>(storage)];
    views[i].storage = place.storage;
    views[i].offset = place.offset + (place.storage ? offset : 0);
  }
  prepared_->rebound();
}

namespace {

// While it lives, no other thread runs the program.
class Taken {
 public:
  explicit Taken(metalcore_program& program) : program_(program) {
    if (program.busy.exchange(true, std::memory_order_acquire))
      throw Error(METALCORE_BUSY, "another thread runs this program");
  }
  ~Taken() { program_.busy.store(false, std::memory_order_release); }
  Taken(const Taken&) = delete;

 private:
  metalcore_program& program_;
};

template <typename Body>
int guarded(const char* function, const Body& body) noexcept {
  try {
    body();
    return METALCORE_OK;
  } catch (...) {
    return status_of_exception(function);
  }
}

void describe(const std::vector<Array>& arrays, int number, metalcore_array* array) {
  if (!array) refuse("array is NULL");
  if (number < 0 || static_cast<size_t>(number) >= arrays.size())
    refuse("the program has no array of number " + std::to_string(number));
  const Array& found = arrays[static_cast<size_t>(number)];
  *array = {found.name.c_str(), found.dtype->number,  static_cast<int>(found.sizes.size()),
            found.sizes.data(), found.strides.data(), found.bytes};
}

void require(const metalcore_program* program) {
  if (!program) refuse("program is NULL");
}

}  // namespace

int metalcore_program_load(const char* path, const char* weights, int flags, metalcore_program** program) {
  return call(__func__, [&](Call& call) {
    call.require(program, "program", "is NULL");
    *program = nullptr;
    call.require(path, "path", "is NULL");
    call.require((flags & ~METALCORE_TRUSTED) == 0, "flags", "has unknown bits");
    *program = new metalcore_program(path, weights, (flags & METALCORE_TRUSTED) != 0);
  });
}

int metalcore_program_free(metalcore_program* program) {
  if (!program) return METALCORE_OK;
  return call(__func__, [&](Call&) {
    program->require_device();
    if (program->busy.exchange(true, std::memory_order_acquire))
      throw Error(METALCORE_BUSY, "another thread runs this program");
    const std::unique_ptr<metalcore_program> freed(program);
    running().memory->wait();
    program->free(*running().memory);
  });
}

int metalcore_program_counts(const metalcore_program* program, int* inputs, int* outputs) {
  return guarded(__func__, [&] {
    require(program);
    if (!inputs || !outputs) refuse("inputs or outputs is NULL");
    *inputs = static_cast<int>(program->plan().inputs.size());
    *outputs = static_cast<int>(program->plan().outputs.size());
  });
}

int metalcore_program_input(const metalcore_program* program, int number, metalcore_array* array) {
  return guarded(__func__, [&] {
    require(program);
    describe(program->plan().inputs, number, array);
  });
}

int metalcore_program_output(const metalcore_program* program, int number, metalcore_array* array) {
  return guarded(__func__, [&] {
    require(program);
    describe(program->plan().outputs, number, array);
  });
}

int metalcore_program_run(metalcore_program* program, const void* const* inputs, void* const* outputs) {
  return call(__func__, [&](Call&) {
    require(program);
    const Taken taken(*program);
    program->run(inputs, outputs);
  });
}
