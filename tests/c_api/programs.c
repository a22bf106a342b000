/* Loads and runs the programs that a file lists, one a line: the path of a program, that of its weights or "-", and the
 * files of its inputs, and then those that its outputs get. Where there are no such files, inputs are zeros.
 *
 *   programs [--device 0|1|2] [--trusted 1] [--repeat N] [--describe 1] FILE
 *
 * It prints for each line the status, the allocations of the last run, and the error. With METALCORE_CUDA arrays are
 * copied to the first GPU. Arrays have no byte more than the program says, so that sanitizers see what lies beyond. */
#include "driver.h"

#include <metalcore.h>

#define MOST 64
#define LINE 16384

static int device, trusted, repeat = 1, describes;

/* Memory at a multiple of 16. */
static char* new_memory(size_t bytes) {
  void* memory;
  if (posix_memalign(&memory, 16, bytes ? bytes : 1)) fail("no memory");
  memset(memory, 0, bytes);
  return (char*)memory;
}

static void read_file(const char* path, char* data, size_t bytes) {
  FILE* file = fopen(path, "rb");
  if (!file || fread(data, 1, bytes, file) != bytes) fail(path);
  fclose(file);
}

static void write_file(const char* path, const char* data, size_t bytes) {
  FILE* file = fopen(path, "wb");
  if (!file || fwrite(data, 1, bytes, file) != bytes) fail(path);
  fclose(file);
}

static void print_array(const char* kind, const metalcore_array* array) {
  int d;
  printf("%s %s %d", kind, array->name, array->dtype);
  for (d = 0; d < array->dims; ++d) printf(" %ld:%ld", (long)array->sizes[d], (long)array->strides[d]);
  printf("\n");
}

static int run(metalcore_program* program, char** files, int count, size_t* allocated) {
  metalcore_array arrays[MOST];
  char* host[MOST];
  void* given[MOST];
  const void* read[MOST];
  int inputs, outputs, all, i, status = 0;
  if (metalcore_program_counts(program, &inputs, &outputs)) fail(metalcore_last_error());
  all = inputs + outputs;
  if (all > MOST) return METALCORE_OK; /* no program of ours */
  if (count && count != all) fail("another number of files than of arrays");
  for (i = 0; i < all; ++i) {
    const int wrong = i < inputs ? metalcore_program_input(program, i, &arrays[i])
                                 : metalcore_program_output(program, i - inputs, &arrays[i]);
    if (wrong) fail(metalcore_last_error());
    if (describes) print_array(i < inputs ? "input" : "output", &arrays[i]);
    if (arrays[i].bytes > 1 << 28) return METALCORE_OUT_OF_MEMORY;
  }
  for (i = 0; i < all; ++i) {
    host[i] = new_memory(arrays[i].bytes);
    if (count && i < inputs) read_file(files[i], host[i], arrays[i].bytes);
    given[i] = host[i];
    if (device == METALCORE_CUDA) {
      if (metalcore_memory_allocate(arrays[i].bytes, &given[i])) fail(metalcore_last_error());
      if (arrays[i].bytes) check_cuda(cuda.to_device(given[i], host[i], arrays[i].bytes), "cuMemcpyHtoD");
    }
    read[i] = given[i];
  }
  for (i = 0; i < repeat && !status; ++i) {
    const size_t before = allocations();
    status = metalcore_program_run(program, read, given + inputs);
    *allocated = allocations() - before;
  }
  if (device == METALCORE_CUDA) check_cuda(cuda.wait(NULL), "cuStreamSynchronize");
  for (i = 0; i < all; ++i) {
    if (device == METALCORE_CUDA) {
      if (arrays[i].bytes) check_cuda(cuda.to_host(host[i], given[i], arrays[i].bytes), "cuMemcpyDtoH");
      if (metalcore_memory_free(given[i])) fail(metalcore_last_error());
    }
    if (count && i >= inputs && !status) write_file(files[i], host[i], arrays[i].bytes);
    free(host[i]);
  }
  return status;
}

static void run_line(char* line) {
  char* words[MOST + 2];
  char *rest, *word = strtok_r(line, " \n", &rest);
  int count = 0, status;
  size_t allocated = 0;
  metalcore_program* program;
  for (; word && count < MOST + 2; word = strtok_r(NULL, " \n", &rest)) words[count++] = word;
  if (count < 2) fail("a line names a program and its weights");
  status = metalcore_program_load(words[0], strcmp(words[1], "-") ? words[1] : NULL, trusted ? METALCORE_TRUSTED : 0,
                                  &program);
  if (!status) status = run(program, words + 2, count - 2, &allocated);
  printf("%s\t%lu\t%s\n", metalcore_status_name(status), (unsigned long)allocated,
         status ? metalcore_last_error() : "");
  if (metalcore_program_free(program)) fail(metalcore_last_error());
}

int main(int count, char** words) {
  static char line[LINE];
  metalcore_context* context = NULL;
  FILE* file = fopen(words[count - 1], "r");
  int i, own = 0;
  if (!file) fail(words[count - 1]);
  for (i = 1; i + 1 < count; i += 2) {
    if (!strcmp(words[i], "--device"))
      device = atoi(words[i + 1]), own = 1;
    else if (!strcmp(words[i], "--trusted"))
      trusted = atoi(words[i + 1]);
    else if (!strcmp(words[i], "--repeat"))
      repeat = atoi(words[i + 1]);
    else if (!strcmp(words[i], "--describe"))
      describes = atoi(words[i + 1]);
  }
  if (device == METALCORE_CUDA) open_cuda(), enter_cuda();
  if (own && (metalcore_context_create(&context, device, 0, NULL) || metalcore_context_use(context)))
    fail(metalcore_last_error());
  while (fgets(line, sizeof line, file)) run_line(line);
  fclose(file);
  if (metalcore_context_destroy(context)) fail(metalcore_last_error());
  return 0;
}
