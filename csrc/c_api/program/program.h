// A program of a file, on one device: a recording, and where its memory is.
#pragma once

#include "weights.h"

#include "../../gpu/backend.h"
#include "../../gpu/recording.h"
#include "../context.h"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace metalcore::c_api {

// What a file says of a run. Storages are the inputs, the outputs, the constants and the scratch memory, in this order.
struct Plan {
  std::vector<Array> inputs, outputs, constants;
  size_t scratch = 0;
  gpu::Recording recording;  // whose views have no storages yet
  struct Place {
    int64_t storage;  // -1 for a view of nothing
    size_t offset;
  };
  std::vector<Place> places;  // of the views
  std::string weights;        // the name of their file; "" where they are inside of the program's

  size_t storages() const { return inputs.size() + outputs.size() + constants.size() + 1; }
};

// The checked plan of a file for a kind of device. Throws Error.
Plan read_plan(const Container& file, std::string_view device_type);

}  // namespace metalcore::c_api

struct metalcore_program {
 public:
  // Takes its memory from the context of the running call.
  metalcore_program(const std::string& path, const char* weights, bool trusted);
  // The running call's context is of the same device.
  void free(metalcore::c_api::Memory& memory) noexcept;

  void run(const void* const* inputs, void* const* outputs);
  void require_device() const;

  const metalcore::c_api::Plan& plan() const { return plan_; }
  std::atomic<bool> busy = false;

 private:
  void use(const metalcore::c_api::Array& array, size_t storage, const void* data, bool written);
  void bind();

  const int32_t device_type_, index_;
  metalcore::c_api::Plan plan_;
  std::vector<void*> constants_;
  bool copies_inputs_;
  std::unique_ptr<metalcore::gpu::Prepared> prepared_;
  std::vector<void*> memory_;                                   // of the storages, in the running call
  std::vector<metalcore::c_api::Place> places_, bound_places_;  // of the storages: now, and as bound
};
