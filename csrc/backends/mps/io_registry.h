// IOKit's registry of devices, as far as the number of a GPU's cores needs it: PyTorch asks it in the same way.
// Declared here because the Linux builds of this backend have no headers of IOKit; tools/mac_check links against its
// symbols.
#pragma once

#include <cstdint>

extern "C" {

using io_object_t = uint32_t;
using io_iterator_t = io_object_t;
using CFTypeRef = const void*;
using CFStringRef = const void*;

constexpr long kCFNumberSInt32Type = 3;

CFTypeRef IOServiceMatching(const char* name);
int IOServiceGetMatchingServices(uint32_t main_port, CFTypeRef matching, io_iterator_t* existing);
io_object_t IOIteratorNext(io_iterator_t iterator);
CFTypeRef IORegistryEntryCreateCFProperty(io_object_t entry, CFStringRef key, CFTypeRef allocator, uint32_t options);
int IOObjectRelease(io_object_t object);
unsigned char CFNumberGetValue(CFTypeRef number, long type, void* value);
void CFRelease(CFTypeRef object);

}  // extern "C"
