#include <ATen/core/Tensor.h>
#include <c10/core/DeviceCapability.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>

#include "allocator.h"
#include "hooks.h"
#include "queue.h"

namespace metalcore::simulated_device {

double now_milliseconds() {
  using Milliseconds = std::chrono::duration<double, std::milli>;
  return Milliseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

namespace {

// Kernels have finished when a call returns. So there is one stream, it is always idle, and an event is a point in
// time.
class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return c10::kMPS; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.is_mps() && device.index() <= 0, "Expected device mps:0, but got ", device);
  }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void synchronizeDevice(c10::DeviceIndex) const override { finish_queue(/*all=*/true); }

  c10::Stream getStream(c10::Device) const override { return stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const override { return stream(); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { finish_queue(/*all=*/false); }

  void record(void** event, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new double;
    *static_cast<double*>(*event) = now_milliseconds();
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  double elapsedTime(void* start, void* end, c10::DeviceIndex) const override {
    TORCH_CHECK(start && end, "Both events must be recorded before calculating elapsed time");
    return *static_cast<double*>(end) - *static_cast<double*>(start);
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<double*>(event); }

  c10::DeviceCapability getDeviceCapability(c10::Device) const override {
    c10::DeviceCapability capability;
    uint64_t bits = 0;
    for (const int index :
         {c10::kIndex_Byte, c10::kIndex_Char, c10::kIndex_Short, c10::kIndex_Int, c10::kIndex_Long, c10::kIndex_UInt16,
          c10::kIndex_UInt32, c10::kIndex_UInt64, c10::kIndex_Bool, c10::kIndex_Half, c10::kIndex_BFloat16,
          c10::kIndex_Float, c10::kIndex_ComplexHalf, c10::kIndex_ComplexFloat}) {
      bits |= uint64_t{1} << index;
    }
    capability.capability_data.capability_bits = bits;
    return capability;
  }

 private:
  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
};

}  // namespace

void install_guard() { c10::impl::DeviceGuardImplRegistrar(c10::kMPS, new Guard); }

}  // namespace metalcore::simulated_device
