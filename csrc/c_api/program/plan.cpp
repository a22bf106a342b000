// Reads the recording of a program's file. Whatever it says is checked here: the file may come from a stranger.
#include "container.h"
#include "kernels.h"
#include "program.h"

#include "../../gpu/limits.h"
#include "../error.h"

#include <stdexcept>

namespace metalcore::c_api {
namespace {

constexpr uint64_t kMostBytes = uint64_t{1} << 48;
constexpr uint64_t kMostThreads = 0xffffffff;  // of a grid, on one side
constexpr uint64_t kMostTogether = 16;         // threadgroups

[[noreturn]] void refuse(const std::string& reason) { throw std::runtime_error(reason); }

std::vector<Array> read_arrays(const Json& described, const char* name) {
  std::vector<Array> arrays;
  for (const Json& one : described.array()) {
    arrays.push_back(read_array(one, name));
  }
  return arrays;
}

gpu::Size read_size(const Json& described) {
  const std::vector<Json>& sizes = described.array();
  if (sizes.size() != 3) refuse("a grid has three sizes");
  const auto at = [&](size_t i) { return static_cast<uint32_t>(sizes[i].size(kMostThreads)); };
  const gpu::Size size = {at(0), at(1), at(2)};
  if (size.empty()) refuse("a grid is empty");
  return size;
}

std::vector<std::byte> read_bytes(const std::string& digits) {
  std::vector<std::byte> bytes;
  const auto value = [](char digit) {
    const size_t which = std::string_view("0123456789abcdef").find(digit);
    if (which == std::string_view::npos) refuse("bytes are hexadecimal digits");
    return which;
  };
  if (digits.size() % 2) refuse("bytes are pairs of digits");
  for (size_t i = 0; i < digits.size(); i += 2)
    bytes.push_back(static_cast<std::byte>(value(digits[i]) << 4 | value(digits[i + 1])));
  return bytes;
}

class PlanReader {
 public:
  PlanReader(const Json& described, const Kernels& kernels) : described_(described), kernels_(kernels) {}

  Plan whole() {
    plan_.inputs = read_arrays(described_.at("inputs"), "name");
    plan_.outputs = read_arrays(described_.at("outputs"), "name");
    plan_.constants = read_arrays(described_.at("constants"), "tensor");
    plan_.scratch = described_.at("scratch").size(kMostBytes);
    if (const Json& weights = described_.at("weights"); weights.kind != Json::Kind::kNull) {
      plan_.weights = weights.string();
      const std::string& name = plan_.weights;
      if (name.empty() || name == "." || name == ".." || name.find_first_of(std::string_view("/\\:\0", 4)) != name.npos)
        refuse("the weights' file lies beside the program");
    }
    for (const Json& dispatch : described_.at("dispatches").array()) read_dispatch(dispatch);
    return std::move(plan_);
  }

 private:
  void read_dispatch(const Json& dispatch) {
    const std::string& kernel = dispatch.at("kernel").string();
    kernels_.require(kernel);
    plan_.recording.kernel(kernel);
    uint32_t seen = 0, seen_threadgroup = 0;
    for (const Json& argument : dispatch.at("arguments").array()) read_argument(argument, seen, seen_threadgroup);
    const gpu::Size threadgroup = read_size(dispatch.at("threadgroup"));
    if (uint64_t{threadgroup.x} * threadgroup.y > gpu::kMaxThreads ||
        uint64_t{threadgroup.x} * threadgroup.y * threadgroup.z > gpu::kMaxThreads)
      refuse("kernel '" + kernel + "' has too many threads in a threadgroup");
    if (const Json* together = dispatch.find("together"))
      plan_.recording.together(static_cast<uint32_t>(together->size(kMostTogether)));
    if (const Json* threads = dispatch.find("threads"))
      plan_.recording.dispatch_threads(read_size(*threads), threadgroup);
    else
      plan_.recording.dispatch_threadgroups(read_size(dispatch.at("threadgroups")), threadgroup);
  }

  // [index, kind, …]; an index is bound once.
  void read_argument(const Json& argument, uint32_t& buffers, uint32_t& threadgroups) {
    const std::vector<Json>& parts = argument.array();
    if (parts.size() < 2) refuse("an argument has an index and a kind");
    const auto index = static_cast<uint32_t>(parts[0].size(gpu::kMaximumBuffers - 1));
    const std::string& kind = parts[1].string();
    uint32_t& seen = kind == "threadgroup" ? threadgroups : buffers;
    if (seen >> index & 1) refuse("an argument is bound twice");
    seen |= 1u << index;
    if (kind == "buffer") {
      plan_.recording.buffer(index, read_view(parts, 2));
      return;
    }
    if (parts.size() != 3) refuse("an argument is bound to one thing");
    if (kind == "bytes") {
      const std::vector<std::byte> bytes = read_bytes(parts[2].string());
      plan_.recording.bytes(index, bytes.data(), bytes.size());
    } else if (kind == "threadgroup") {
      plan_.recording.threadgroup_memory(index, parts[2].size(gpu::kMaxThreadgroupMemory));
    } else if (kind == "pointers") {
      std::vector<gpu::BufferView> views;
      for (const Json& place : parts[2].array()) views.push_back(read_view(place.array(), 0));
      plan_.recording.pointers(index, views.data(), views.size());
    } else {
      refuse("an argument has an unknown kind");
    }
  }

  // what of, its number, the first byte, bytes; from parts[first] on. Nothing is bound where there are none.
  gpu::BufferView read_view(const std::vector<Json>& parts, size_t first) {
    if (parts.size() == first) {
      plan_.places.push_back({-1, 0});
      return {};
    }
    if (parts.size() != first + 4) refuse("a place has four parts");
    const std::string& what = parts[first].string();
    const size_t offset = parts[first + 2].size(kMostBytes), span = parts[first + 3].size(kMostBytes);
    const size_t inputs = plan_.inputs.size(), outputs = plan_.outputs.size();
    const std::vector<Array>* const arrays = what == "input"      ? &plan_.inputs
                                             : what == "output"   ? &plan_.outputs
                                             : what == "constant" ? &plan_.constants
                                                                  : nullptr;
    if (!arrays && what != "scratch") refuse("a place is in unknown memory");
    const size_t number = parts[first + 1].size(arrays ? arrays->size() : 0);
    if (arrays && number == arrays->size()) refuse("a place is in an array that is not there");
    const size_t bytes = arrays ? (*arrays)[number].bytes : plan_.scratch;
    if (offset > bytes || span > bytes - offset) refuse("a place is not within its array");
    const size_t base = what == "input"    ? 0
                        : what == "output" ? inputs
                                           : inputs + outputs + (arrays ? 0 : plan_.constants.size());
    plan_.places.push_back({static_cast<int64_t>(base + number), offset});
    return {nullptr, 0, span, nullptr};
  }

  const Json& described_;
  const Kernels& kernels_;
  Plan plan_;
};

}  // namespace

Plan read_plan(const Container& file, std::string_view device_type) {
  const std::string* const recordings = file.metadata("recordings");
  if (!recordings) file.fail("it has no recordings: save the program with recordings=True");
  try {
    const Json all = Json::parse(*recordings);
    const Json* const described = all.find(device_type);
    if (!described) {
      std::string kinds;
      for (const std::string& kind : all.keys) kinds += (kinds.empty() ? "" : ", ") + kind;
      file.fail("it has no recording for " + std::string(device_type) + "; it has those for " + kinds);
    }
    return PlanReader(*described, Kernels(described->at("kernels"), described->at("generated"), device_type)).whole();
  } catch (const Error&) {
    throw;
  } catch (const std::logic_error& error) {  // of what a recording refuses
    file.fail(error.what());
  } catch (const std::runtime_error& error) {
    file.fail(error.what());
  }
}

}  // namespace metalcore::c_api
