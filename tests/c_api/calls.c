/* Runs the calls that a file lists, one a line: a function's name without metalcore_, and its arguments.
 *
 *   calls [--device 0|1|2] [--threads N] [--repeat N] [--allocate 1] FILE
 *
 * An argument is a number; NULL; <PATH, the bytes of a file; >PATH:BYTES, memory whose bytes the file gets; or
 * =PATH:OTHER, the bytes of the file OTHER in memory whose bytes the file PATH gets. A path may end with +N before all
 * that: the array then begins N bytes behind what malloc returned. The program is C99 and C++. It prints for each call
 * its status, the allocations of the last repetition, and the error. With threads each has a context of its own, and
 * writes files whose names end with .<its number>. A context is of the metalcore_device of --device; without it, and
 * without threads, the calls run in the thread's own. With METALCORE_CUDA arrays are copied to the first GPU, and each
 * context has a new stream. With --allocate 1 arrays lie in memory of metalcore_memory_allocate(). */
#include "driver.h"

#include <metalcore.h>
#include <pthread.h>

#define MOST 32
#define LINE 8192

static int by_metalcore; /* --allocate */

typedef struct {
  void *memory, *data; /* on the host */
  void *device_memory, *device_data;
  size_t size;
  char* saved_to;
  double number;
} Argument;

typedef struct {
  const char* file;
  int number, repeat, own_context, device;
  FILE* report;
} Work;

/* A stream of the first GPU, whose context becomes the thread's. */
static void* new_stream(void) {
  void* stream;
  enter_cuda();
  check_cuda(cuda.stream(&stream, 0), "cuStreamCreate");
  return stream;
}

static void move_to_device(Argument* a) {
  const size_t offset = (size_t)((char*)a->data - (char*)a->memory);
  check_cuda(cuda.allocate(&a->device_memory, a->size + offset ? a->size + offset : 1), "cuMemAlloc");
  a->device_data = (char*)a->device_memory + offset;
  if (a->size) check_cuda(cuda.to_device(a->device_data, a->data, a->size), "cuMemcpyHtoD");
}

static void move_to_host(Argument* a, void* stream) {
  check_cuda(cuda.wait(stream), "cuStreamSynchronize");
  if (a->size) check_cuda(cuda.to_host(a->data, a->device_data, a->size), "cuMemcpyDtoH");
  check_cuda(cuda.free(a->device_memory), "cuMemFree");
}

static void* get_memory(Argument* argument, size_t offset) {
  const size_t size = argument->size + offset ? argument->size + offset : 1;
  if (by_metalcore) {
    if (metalcore_memory_allocate(size, &argument->memory)) fail(metalcore_last_error());
  } else {
    argument->memory = malloc(size);
  }
  if (!argument->memory) fail("malloc");
  return (char*)argument->memory + offset;
}

static void load(Argument* argument, const char* path, size_t offset) {
  FILE* file = fopen(path, "rb");
  if (!file || fseek(file, 0, SEEK_END)) fail(path);
  argument->size = (size_t)ftell(file);
  rewind(file);
  argument->data = get_memory(argument, offset);
  if (argument->size && fread(argument->data, 1, argument->size, file) != argument->size) fail(path);
  fclose(file);
}

static void parse(Argument* argument, char* text) {
  size_t offset = 0;
  char* at = strrchr(text, '+');
  char* colon;
  memset(argument, 0, sizeof *argument);
  if (*text != '<' && *text != '>' && *text != '=') {
    argument->number = strtod(text, NULL);
    return;
  }
  if (at) {
    offset = (size_t)strtoul(at + 1, NULL, 10);
    *at = 0;
  }
  if (*text == '<') {
    load(argument, text + 1, offset);
    return;
  }
  colon = strchr(text, ':');
  *colon = 0;
  argument->saved_to = text + 1;
  if (*text == '=') {
    load(argument, colon + 1, offset);
  } else {
    argument->size = (size_t)strtoul(colon + 1, NULL, 10);
    argument->data = get_memory(argument, offset);
    memset(argument->data, 0x5a, argument->size);
  }
}

static void save(const Argument* argument, int number) {
  char path[LINE];
  FILE* file;
  if (number < 0)
    snprintf(path, sizeof path, "%s", argument->saved_to);
  else
    snprintf(path, sizeof path, "%s.%d", argument->saved_to, number);
  file = fopen(path, "wb");
  if (!file) fail(path);
  if (argument->size && fwrite(argument->data, 1, argument->size, file) != argument->size) fail(path);
  fclose(file);
}

#define I(n) ((int)a[n].number)
#define F(n) ((float)a[n].number)
#define P(type, n) ((type*)(a[n].device_data ? a[n].device_data : a[n].data))

static metalcore_pages pages_of(const Argument* a) {
  metalcore_pages pages;
  pages.pages = I(0);
  pages.page_size = I(1);
  pages.heads = I(2);
  pages.head_size = I(3);
  pages.heads_first = I(4);
  pages.requests = I(5);
  pages.indices = I(6);
  pages.kv_indptr = P(const int32_t, 7);
  pages.kv_indices = P(const int32_t, 8);
  pages.kv_last_page_len = P(const int32_t, 9);
  return pages;
}

/* The functions for both types. */
#define CALLS_OF(suffix, T)                                                                                           \
  static int call_##suffix(const char* name, const Argument* a) {                                                     \
    metalcore_pages p;                                                                                                \
    if (!strcmp(name, "softmax")) return metalcore_softmax_##suffix(P(T, 0), P(T, 1), I(2), I(3), F(4));              \
    if (!strcmp(name, "silu_and_mul")) return metalcore_silu_and_mul_##suffix(P(T, 0), P(T, 1), I(2), I(3));          \
    if (!strcmp(name, "rms_norm")) return metalcore_rms_norm_##suffix(P(T, 0), P(T, 1), P(T, 2), I(3), I(4), F(5));   \
    if (!strcmp(name, "add_rms_norm"))                                                                                \
      return metalcore_add_rms_norm_##suffix(P(T, 0), P(T, 1), P(T, 2), P(T, 3), P(T, 4), I(5), I(6), F(7));          \
    if (!strcmp(name, "rope"))                                                                                        \
      return metalcore_rope_##suffix(P(T, 0), P(T, 1), P(float, 2), P(float, 3), P(int64_t, 4), P(T, 5), P(T, 6),     \
                                     I(7), I(8), I(9), I(10), I(11), I(12), I(13));                                   \
    if (!strcmp(name, "rope_in_place"))                                                                               \
      return metalcore_rope_##suffix(P(T, 0), P(T, 1), P(float, 2), P(float, 3), P(int64_t, 4), P(T, 0), P(T, 1),     \
                                     I(5), I(6), I(7), I(8), I(9), I(10), I(11));                                     \
    if (!strcmp(name, "embedding"))                                                                                   \
      return metalcore_embedding_##suffix(P(T, 0), P(int32_t, 1), P(T, 2), I(3), I(4), I(5));                         \
    if (!strcmp(name, "sample"))                                                                                      \
      return metalcore_sample_##suffix(P(T, 0), P(float, 1), P(int64_t, 2), I(3), I(4), F(5), I(6), F(7));            \
    if (!strcmp(name, "add")) return metalcore_add_##suffix(P(T, 0), P(T, 1), P(T, 2), I(3));                         \
    if (!strcmp(name, "add_in_place")) return metalcore_add_##suffix(P(T, 0), P(T, 1), P(T, 1), I(2));                \
    if (!strcmp(name, "topk")) return metalcore_topk_##suffix(P(T, 0), P(T, 1), P(int64_t, 2), I(3), I(4), I(5));     \
    if (!strcmp(name, "top_k_mask_logits"))                                                                           \
      return metalcore_top_k_mask_logits_##suffix(P(T, 0), P(T, 1), I(2), I(3), I(4));                                \
    if (!strcmp(name, "gemm"))                                                                                        \
      return metalcore_gemm_##suffix(P(T, 0), P(T, 1), P(T, 2), P(T, 3), I(4), I(5), I(6), I(7), I(8), I(9), I(10));  \
    if (!strcmp(name, "grouped_gemm"))                                                                                \
      return metalcore_grouped_gemm_##suffix(P(T, 0), P(T, 1), P(int32_t, 2), P(T, 3), I(4), I(5), I(6), I(7), I(8)); \
    p = pages_of(a);                                                                                                  \
    a += 10;                                                                                                          \
    if (!strcmp(name, "batch_prefill"))                                                                               \
      return metalcore_batch_prefill_##suffix(P(T, 0), P(int32_t, 1), P(T, 2), P(T, 3), &p, P(T, 4), P(float, 5),     \
                                              I(6), I(7), I(8), I(9), F(10), F(11));                                  \
    if (!strcmp(name, "batch_decode"))                                                                                \
      return metalcore_batch_decode_##suffix(P(T, 0), P(T, 1), P(T, 2), &p, P(T, 3), P(float, 4), I(5), I(6), F(7),   \
                                             F(8));                                                                   \
    if (!strcmp(name, "paged_append"))                                                                                \
      return metalcore_paged_append_##suffix(P(T, 0), P(T, 1), P(int32_t, 2), P(int32_t, 3), P(T, 4), P(T, 5), &p,    \
                                             I(6));                                                                   \
    fprintf(stderr, "calls: no function %s\n", name);                                                                 \
    exit(3);                                                                                                          \
  }
CALLS_OF(float, float)
CALLS_OF(bfloat16, metalcore_bfloat16)

static int run_call(char* name, const Argument* a) {
  char* type = strrchr(name, '_');
  const int is_float = !strcmp(type, "_float");
  int status;
  if (!strcmp(name, "cast_float_to_bfloat16"))
    return metalcore_cast_float_to_bfloat16(P(float, 0), P(metalcore_bfloat16, 1), I(2));
  if (!strcmp(name, "cast_bfloat16_to_float"))
    return metalcore_cast_bfloat16_to_float(P(metalcore_bfloat16, 0), P(float, 1), I(2));
  *type = 0;
  status = is_float ? call_float(name, a) : call_bfloat16(name, a);
  *type = '_';
  return status;
}

static void run_line(const Work* work, char* line, void* stream) {
  char* words[MOST + 1];
  Argument arguments[MOST];
  char *rest, *word = strtok_r(line, " \n", &rest);
  int count = 0, i, status = 0;
  size_t before = 0, after = 0;
  for (; word && count <= MOST; word = strtok_r(NULL, " \n", &rest)) words[count++] = word;
  memset(arguments, 0, sizeof arguments);
  for (i = 1; i < count; ++i) parse(&arguments[i - 1], words[i]);
  for (i = 0; stream && i + 1 < count; ++i)
    if (arguments[i].memory) move_to_device(&arguments[i]);
  for (i = 0; i < work->repeat; ++i) {
    before = allocations();
    status = run_call(words[0], arguments);
    after = allocations();
  }
  fprintf(work->report, "%d\t%lu\t%s\n", status, (unsigned long)(after - before),
          status == METALCORE_OK ? "" : metalcore_last_error());
  for (i = 0; i + 1 < count; ++i) {
    if (arguments[i].device_memory) move_to_host(&arguments[i], stream);
    if (arguments[i].saved_to) save(&arguments[i], work->number);
    if (!by_metalcore)
      free(arguments[i].memory);
    else if (metalcore_memory_free(arguments[i].memory))
      fail(metalcore_last_error());
  }
}

static void* run_file(void* argument) {
  const Work* work = (const Work*)argument;
  char line[LINE];
  FILE* file = fopen(work->file, "r");
  metalcore_context* context = NULL;
  void* const stream = work->device == METALCORE_CUDA ? new_stream() : NULL;
  if (!file) fail(work->file);
  if (work->own_context) {
    if (metalcore_context_create(&context, work->device, 0, stream) || metalcore_context_use(context))
      fail(metalcore_last_error());
  }
  while (fgets(line, sizeof line, file)) run_line(work, line, stream);
  fclose(file);
  if (metalcore_context_destroy(context)) fail(metalcore_last_error());
  return NULL;
}

int main(int count, char** words) {
  int threads = 0, repeat = 1, device = -1, i;
  Work all[64];
  pthread_t running[64];
  for (i = 1; i + 1 < count; i += 2) {
    if (!strcmp(words[i], "--threads"))
      threads = atoi(words[i + 1]);
    else if (!strcmp(words[i], "--repeat"))
      repeat = atoi(words[i + 1]);
    else if (!strcmp(words[i], "--device"))
      device = atoi(words[i + 1]);
    else if (!strcmp(words[i], "--allocate"))
      by_metalcore = atoi(words[i + 1]);
  }
  if (device == METALCORE_CUDA) open_cuda();
  for (i = 0; i < (threads ? threads : 1); ++i) {
    all[i].file = words[count - 1];
    all[i].number = threads ? i : -1;
    all[i].repeat = repeat;
    all[i].own_context = threads || device >= 0;
    all[i].device = device < 0 ? METALCORE_CPU : device;
    all[i].report = i ? tmpfile() : stdout;
  }
  if (!threads) {
    run_file(&all[0]);
    return 0;
  }
  for (i = 0; i < threads; ++i)
    if (pthread_create(&running[i], NULL, run_file, &all[i])) fail("pthread_create");
  for (i = 0; i < threads; ++i) pthread_join(running[i], NULL);
  for (i = 1; i < threads; ++i) fclose(all[i].report);
  return 0;
}
