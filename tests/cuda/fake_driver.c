// Stands for libcuda.so.1 with two GPUs that run nothing: it notes what it is told, for tests to look at, and refuses
// what the real driver refuses. Its "code" is text: "entry <name> block <bytes> threads <most> shared <bytes>", and
// perhaps " for <name>", by which launches are then noted. A GPU's memory is the host's.
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
  INVALID_VALUE = 1,
  OUT_OF_MEMORY = 2,
  NOT_INITIALIZED = 3,
  INVALID_CONTEXT = 201,
  NOT_FOUND = 500,
  CAPTURE_UNSUPPORTED = 900
};
enum { DEVICES = 2, RELAXED = 2, CLUSTER_DIMENSION = 4, PROGRAMMATIC_STREAM_SERIALIZATION = 6 };
enum { DEFAULT_SHARED = 48 * 1024, MOST_SHARED = 227 * 1024 };

typedef struct {
  char entry[256], name[256];
  int block, threads, shared;
} Code;

typedef struct {
  const Code* code;
  int device, dynamic_shared;
} Function;

typedef struct {
  char entry[256];
  int device;
  unsigned grid[3], block[3], shared;
  int overlaps;
  unsigned together;
  void* stream;
  unsigned parameter_bytes;
  unsigned char parameters[32768];
} Launch;

typedef struct {
  void* memory;
  unsigned value, width;
  size_t count;
  void* stream;
} Fill;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static Launch launches[4096];
static int launch_count;
static Fill fills[1024];
static int fill_count;
static atomic_int initialized, failure, capturing, loads, functions, allocations, allocated, waits, memory_is_full;

static _Thread_local void* contexts[16];  // a stack; contexts[depth - 1] is current
static _Thread_local int depth;
static _Thread_local int capture_mode;  // 0: global

// ---- for the tests

int fake_launch_count(void) { return launch_count; }
const Launch* fake_launch(int i) { return &launches[i]; }
int fake_fill_count(void) { return fill_count; }
const Fill* fake_fill(int i) { return &fills[i]; }
int fake_allocations(void) { return allocations; }  // so far
int fake_allocated(void) { return allocated; }      // not yet freed
int fake_waits(void) { return waits; }
void fake_fill_memory(int on) { memory_is_full = on; }
int fake_loads(void) { return loads; }
int fake_functions(void) { return functions; }
int fake_depth(void) { return depth; }
int fake_capture_mode(void) { return capture_mode; }
void fake_fail_launches(int status) { failure = status; }
void fake_capture(int on) { capturing = on; }

// ---- the driver

static void* context_of(int device) { return (void*)(size_t)(0x1000 + device); }
static int is_forbidden(void) { return capturing && capture_mode != RELAXED; }

int cuInit(unsigned flags) { return flags ? INVALID_VALUE : (initialized = 1, 0); }
#ifndef VERSION
#define VERSION 13000
#endif
int cuDriverGetVersion(int* version) { return *version = VERSION, 0; }
int cuGetErrorName(int status, const char** name) {
  *name = status == INVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE" : status == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : 0;
  return *name ? 0 : INVALID_VALUE;
}
int cuGetErrorString(int status, const char** text) {
  *text = status == INVALID_VALUE ? "invalid argument" : status == 700 ? "an illegal memory access was encountered" : 0;
  return *text ? 0 : INVALID_VALUE;
}
int cuDeviceGetCount(int* count) { return *count = DEVICES, initialized ? 0 : NOT_INITIALIZED; }
int cuDeviceGet(int* device, int index) {
  if (!initialized) return NOT_INITIALIZED;
  return *device = index, index < DEVICES ? 0 : 101;
}
int cuDeviceGetName(char* name, int size, int device) { return snprintf(name, size, "Fake GPU %d", device), 0; }
int cuDeviceTotalMem_v2(size_t* bytes, int device) { return *bytes = (size_t)(device + 1) << 33, 0; }
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  switch (attribute) {
    case 16: return *value = 100 + device, 0;
    case 75: return *value = 9 - device, 0;  // compute capabilities 9.0 and 8.0
    case 76: return *value = 0, 0;
    case 97: return *value = MOST_SHARED, 0;
    default: return INVALID_VALUE;
  }
}

int cuMemAlloc_v2(void** memory, size_t bytes) {
  if (!depth) return INVALID_CONTEXT;
  if (is_forbidden()) return CAPTURE_UNSUPPORTED;
  if (memory_is_full || posix_memalign(memory, 256, bytes)) return OUT_OF_MEMORY;
  ++allocations, ++allocated;
  return 0;
}
int cuMemFree_v2(void* memory) {
  if (!depth) return INVALID_CONTEXT;
  free(memory);
  --allocated;
  return 0;
}
static int fill(void* memory, unsigned value, unsigned width, size_t count, void* stream) {
  if (!depth) return INVALID_CONTEXT;
  if (!memory || !count) return INVALID_VALUE;
  pthread_mutex_lock(&mutex);
  if (fill_count < (int)(sizeof fills / sizeof *fills))
    fills[fill_count++] = (Fill){memory, value, width, count, stream};
  pthread_mutex_unlock(&mutex);
  return 0;
}
int cuMemsetD8Async(void* memory, unsigned char value, size_t count, void* stream) {
  return fill(memory, value, 1, count, stream);
}
int cuMemsetD32Async(void* memory, unsigned value, size_t count, void* stream) {
  return fill(memory, value, 4, count, stream);
}
int cuMemcpyHtoD_v2(void* to, const void* from, size_t bytes) {
  return depth ? memcpy(to, from, bytes), 0 : INVALID_CONTEXT;
}
int cuMemcpyDtoH_v2(void* to, const void* from, size_t bytes) {
  return depth ? memcpy(to, from, bytes), 0 : INVALID_CONTEXT;
}
int cuStreamCreate(void** stream, unsigned flags) {
  static atomic_int count;
  return *stream = (void*)(size_t)(0x5000 + ++count), depth && !flags ? 0 : INVALID_CONTEXT;
}
int cuStreamSynchronize(void* stream) {
  (void)stream;
  if (!depth) return INVALID_CONTEXT;
  if (is_forbidden()) return CAPTURE_UNSUPPORTED;
  ++waits;
  return 0;
}

int cuDevicePrimaryCtxRetain(void** context, int device) { return *context = context_of(device), 0; }
int cuCtxGetCurrent(void** context) {
  return *context = depth ? contexts[depth - 1] : 0, initialized ? 0 : NOT_INITIALIZED;
}
int cuCtxPushCurrent_v2(void* context) { return contexts[depth++] = context, 0; }
int cuCtxPopCurrent_v2(void** context) { return depth ? (*context = contexts[--depth], 0) : INVALID_CONTEXT; }
int cuThreadExchangeStreamCaptureMode(int* mode) {
  const int before = capture_mode;
  capture_mode = *mode;
  *mode = before;
  return 0;
}

#ifndef WITHOUT_LIBRARIES  // CUDA 12
int cuLibraryLoadData(Code** library, const void* text, void* a, void* b, unsigned c, void* d, void* e, unsigned f) {
  (void)a, (void)b, (void)c, (void)d, (void)e, (void)f;
  if (is_forbidden()) return CAPTURE_UNSUPPORTED;
  Code code;
  if (sscanf(text, "entry %255s block %d threads %d shared %d for %255s", code.entry, &code.block, &code.threads,
             &code.shared, strcpy(code.name, "")) < 4)
    return INVALID_VALUE;
  *library = malloc(sizeof code);
  **library = code;
  ++loads;
  return 0;
}
#endif
int cuLibraryGetKernel(Code** kernel, Code* library, const char* name) {
  return *kernel = library, strcmp(library->entry, name) ? NOT_FOUND : 0;
}
int cuKernelGetFunction(Function** function, Code* kernel) {
  if (!depth) return INVALID_CONTEXT;
  if (is_forbidden()) return CAPTURE_UNSUPPORTED;
  *function = malloc(sizeof **function);
  **function = (Function){kernel, (int)((size_t)contexts[depth - 1] - 0x1000), DEFAULT_SHARED - kernel->shared};
  ++functions;
  return 0;
}
int cuFuncLoad(Function* function) { return (void)function, is_forbidden() ? CAPTURE_UNSUPPORTED : 0; }
int cuFuncGetParamInfo(Function* function, size_t index, size_t* offset, size_t* size) {
  return *offset = 0, *size = (size_t)function->code->block, index ? INVALID_VALUE : 0;
}
int cuFuncGetAttribute(int* value, int attribute, Function* function) {
  switch (attribute) {
    case 0: return *value = function->code->threads, 0;
    case 1: return *value = function->code->shared, 0;
    case 3: return *value = 8, 0;
    case 4: return *value = 40, 0;
    default: return INVALID_VALUE;
  }
}
int cuFuncSetAttribute(Function* function, int attribute, int value) {
  if (attribute == 14) return 0;  // clusters of more than eight threadgroups
  if (attribute != 8 || value < 0 || value + function->code->shared > MOST_SHARED) return INVALID_VALUE;
  return function->dynamic_shared = value, 0;
}

typedef struct {
  int id, padding, value, rest[15];
} Attribute;

typedef struct {
  unsigned grid[3], block[3], shared;
  void* stream;
  const Attribute* attributes;
  unsigned attribute_count;
} Config;

int cuLaunchKernelEx(const Config* config, Function* function, void** parameters, void** extra) {
  const Code* code = function->code;
  const unsigned *grid = config->grid, *block = config->block;
  if (failure) return failure;
  if (!depth || contexts[depth - 1] != context_of(function->device)) return INVALID_CONTEXT;
  if (!grid[0] || !grid[1] || !grid[2] || !block[0] || !block[1] || !block[2] || grid[0] > 0x7fffffff ||
      grid[1] > 65535 || grid[2] > 65535 || block[0] > 1024 || block[1] > 1024 || block[2] > 64 ||
      block[0] * block[1] * block[2] > (unsigned)code->threads || (int)config->shared > function->dynamic_shared ||
      extra)
    return INVALID_VALUE;
  int overlaps = 0;
  unsigned together = 1;
  for (unsigned i = 0; i < config->attribute_count; ++i) {
    const Attribute* attribute = &config->attributes[i];
    if (attribute->id == PROGRAMMATIC_STREAM_SERIALIZATION) {
      overlaps = attribute->value;
    } else if (attribute->id == CLUSTER_DIMENSION) {
      together = (unsigned)attribute->rest[0];
      if (attribute->value != 1 || attribute->rest[1] != 1 || together > 16 || grid[1] % together) return INVALID_VALUE;
    } else {
      return INVALID_VALUE;
    }
  }
  pthread_mutex_lock(&mutex);
  if (launch_count == (int)(sizeof launches / sizeof *launches)) abort();
  Launch* launch = &launches[launch_count++];
  *launch = (Launch){.device = function->device,
                     .grid = {grid[0], grid[1], grid[2]},
                     .block = {block[0], block[1], block[2]},
                     .shared = config->shared,
                     .overlaps = overlaps,
                     .together = together,
                     .stream = config->stream,
                     .parameter_bytes = (unsigned)code->block};
  strcpy(launch->entry, *code->name ? code->name : code->entry);
  memcpy(launch->parameters, parameters[0], (size_t)code->block);
  pthread_mutex_unlock(&mutex);
  return 0;
}
