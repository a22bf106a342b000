#import "device.h"

#import "io_registry.h"

#import <Foundation/Foundation.h>

#include <atomic>

namespace metalcore::mps {

id<MTLDevice> copy_device() {
  NSArray* all = MTLCopyAllDevices();
  id<MTLDevice> first = all.count > 0 ? [[all objectAtIndex:0] retain] : nil;
  [all release];
  return first ? first : MTLCreateSystemDefaultDevice();
}

namespace {

std::string newest_family() {
  id<MTLDevice> device = copy_device();
  std::string family;
  for (int generation = 20; device && family.empty() && generation > 0; --generation)
    if ([device supportsFamily:static_cast<MTLGPUFamily>(MTLGPUFamilyApple1 + generation - 1)])
      family = "apple" + std::to_string(generation);
  [device release];
  return family;
}

}  // namespace

uint32_t gpu_cores() {
  io_iterator_t gpus = 0;
  if (IOServiceGetMatchingServices(0, IOServiceMatching("AGXAccelerator"), &gpus) != 0) return 0;
  uint32_t cores = 0;
  while (const io_object_t gpu = IOIteratorNext(gpus)) {
    @autoreleasepool {
      NSString* const key = [NSString stringWithCString:"gpu-core-count" encoding:NSUTF8StringEncoding];
      if (const CFTypeRef number = IORegistryEntryCreateCFProperty(gpu, (CFStringRef)key, nullptr, 0)) {
        int32_t count = 0;
        if (cores == 0 && CFNumberGetValue(static_cast<CFNumberRef>(number), kCFNumberSInt32Type, &count) && count > 0)
          cores = static_cast<uint32_t>(count);
        CFRelease(number);
      }
    }
    IOObjectRelease(gpu);
  }
  IOObjectRelease(gpus);
  return cores;
}

const std::string& gpu_family() {
  static const std::string none;
  static std::atomic<const std::string*> found = nullptr;  // an empty answer is not kept: a GPU may appear
  if (const std::string* family = found.load(std::memory_order_acquire)) return *family;
  std::string family = newest_family();
  if (family.empty()) return none;
  const std::string* made = new std::string(std::move(family));
  const std::string* other = nullptr;
  if (found.compare_exchange_strong(other, made, std::memory_order_acq_rel)) return *made;
  delete made;
  return *other;
}

}  // namespace metalcore::mps
