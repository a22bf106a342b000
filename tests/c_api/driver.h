/* What calls.c and programs.c share: CUDA's driver, counts of allocations, and how they give up. */
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* What --device 1 needs of libcuda.so.1. */
static struct {
  int (*init)(unsigned flags);
  int (*retain)(void** context, int device);
  int (*push)(void* context);
  int (*stream)(void** stream, unsigned flags);
  int (*wait)(void* stream);
  int (*allocate)(void** memory, size_t bytes);
  int (*free)(void* memory);
  int (*to_device)(void* to, const void* from, size_t bytes);
  int (*to_host)(void* to, const void* from, size_t bytes);
} cuda;

/* Defined by count_allocations.c where that is preloaded. */
#ifdef __cplusplus
extern "C"
#endif
    size_t allocations_so_far(void) __attribute__((weak));

static size_t allocations(void) { return allocations_so_far ? allocations_so_far() : 0; }

static void fail(const char* what) {
  fprintf(stderr, "%s: %s\n", what, strerror(errno));
  exit(3);
}

static void check_cuda(int status, const char* what) {
  if (!status) return;
  fprintf(stderr, "%s: CUDA error %d\n", what, status);
  exit(3);
}

static void find_cuda(void* library, const char* name, void* function) {
  void* found = dlsym(library, name);
  if (!found) fail(name);
  memcpy(function, &found, sizeof found);
}

static void open_cuda(void) {
  void* library = dlopen("libcuda.so.1", RTLD_NOW);
  if (!library) fail(dlerror());
  find_cuda(library, "cuInit", &cuda.init);
  find_cuda(library, "cuDevicePrimaryCtxRetain", &cuda.retain);
  find_cuda(library, "cuCtxPushCurrent_v2", &cuda.push);
  find_cuda(library, "cuStreamCreate", &cuda.stream);
  find_cuda(library, "cuStreamSynchronize", &cuda.wait);
  find_cuda(library, "cuMemAlloc_v2", &cuda.allocate);
  find_cuda(library, "cuMemFree_v2", &cuda.free);
  find_cuda(library, "cuMemcpyHtoD_v2", &cuda.to_device);
  find_cuda(library, "cuMemcpyDtoH_v2", &cuda.to_host);
  check_cuda(cuda.init(0), "cuInit");
}

/* The context of the first GPU becomes the thread's. */
static void enter_cuda(void) {
  void* context;
  check_cuda(cuda.retain(&context, 0), "cuDevicePrimaryCtxRetain");
  check_cuda(cuda.push(context), "cuCtxPushCurrent");
}
