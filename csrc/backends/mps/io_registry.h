// IOKit's registry of devices, as far as the number of a GPU's cores needs it: PyTorch asks it in the same way.
#pragma once

#if __has_include(<IOKit/IOKitLib.h>)

#include <CoreFoundation/CoreFoundation.h>
#include <IOKit/IOKitLib.h>

#else

// The Linux builds of this backend have no headers of IOKit; tools/mac_check links against its symbols. Types are the
// SDK's own, so that what compiles here compiles with its headers.
#include <cstdint>

extern "C" {

using kern_return_t = int;
using mach_port_t = uint32_t;
using io_object_t = mach_port_t;
using io_iterator_t = io_object_t;
using CFTypeRef = const void*;
using CFStringRef = const struct __CFString*;
using CFAllocatorRef = const struct __CFAllocator*;
using CFNumberRef = const struct __CFNumber*;
using CFDictionaryRef = const struct __CFDictionary*;
using CFMutableDictionaryRef = struct __CFDictionary*;
using Boolean = unsigned char;

enum CFNumberType : long { kCFNumberSInt32Type = 3 };

CFMutableDictionaryRef IOServiceMatching(const char* name);
kern_return_t IOServiceGetMatchingServices(mach_port_t main_port, CFDictionaryRef matching, io_iterator_t* existing);
io_object_t IOIteratorNext(io_iterator_t iterator);
CFTypeRef IORegistryEntryCreateCFProperty(io_object_t entry, CFStringRef key, CFAllocatorRef allocator,
                                          uint32_t options);
kern_return_t IOObjectRelease(io_object_t object);
Boolean CFNumberGetValue(CFNumberRef number, CFNumberType type, void* value);
void CFRelease(CFTypeRef object);

}  // extern "C"

#endif
