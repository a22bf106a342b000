/* Preloaded, it counts the allocations of a process. */
#include <stdatomic.h>
#include <stddef.h>

extern void* __libc_malloc(size_t);
extern void* __libc_calloc(size_t, size_t);
extern void* __libc_realloc(void*, size_t);
extern void* __libc_memalign(size_t, size_t);

static atomic_size_t count;

size_t allocations_so_far(void) { return count; }

void* malloc(size_t size) { return ++count, __libc_malloc(size); }
void* calloc(size_t number, size_t size) { return ++count, __libc_calloc(number, size); }
void* realloc(void* memory, size_t size) { return ++count, __libc_realloc(memory, size); }
void* memalign(size_t alignment, size_t size) { return ++count, __libc_memalign(alignment, size); }
void* aligned_alloc(size_t alignment, size_t size) { return ++count, __libc_memalign(alignment, size); }
int posix_memalign(void** memory, size_t alignment, size_t size) {
  ++count;
  *memory = __libc_memalign(alignment, size);
  return *memory ? 0 : 12;
}
