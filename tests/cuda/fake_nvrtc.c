// Stands for libnvrtc.so: it keeps the programs and options that it is given. Its "code" is what fake_driver.c takes.
// The block's size comes from the members of the entry's struct, which stands behind `#line 1 "msl_entries"`.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { INVALID_PROGRAM = 2, COMPILATION = 6, MOST = 1024 };

typedef struct {
  char *text, *options, code[1024], log[64];
} Program;

static Program* programs[MOST];
static int count;

int fake_program_count(void) { return count; }
const char* fake_program(int i) { return programs[i]->text; }
const char* fake_options(int i) { return programs[i]->options; }  // each ends with a line feed

#ifndef MINOR
#define MINOR 6
#endif
int nvrtcVersion(int* major, int* minor) { return *major = 12, *minor = MINOR, 0; }
int nvrtcGetNumSupportedArchs(int* number) { return *number = 2, 0; }
int nvrtcGetSupportedArchs(int* found) { return found[0] = 70, found[1] = 90, 0; }
const char* nvrtcGetErrorString(int status) {
  return status == COMPILATION ? "NVRTC_ERROR_COMPILATION" : "NVRTC_ERROR_INVALID_PROGRAM";
}

int nvrtcCreateProgram(Program** made, const char* text, const char* name, int headers, const char* const* contents,
                       const char* const* names) {
  if (!name || headers || contents || names || count == MOST) return INVALID_PROGRAM;
  *made = programs[count++] = calloc(1, sizeof(Program));
  (*made)->text = strdup(text);
  return 0;
}

// Appends a binding to the signature and adds its bytes to the block.
static void bind(char* signature, const char* kind, const char* index, int capacity) {
  char* end = signature + strlen(signature);
  end += sprintf(end, "%s%s%d", *signature ? "," : "", kind, atoi(index));
  if (capacity) sprintf(end, ":%d", capacity);
}

int nvrtcCompileProgram(Program* program, int options, const char* const* texts) {
  const char* at = strstr(program->text, "#line 1 \"msl_entries\"");
  char signature[512] = "";
  int block = 48, inlined = 0, capacity, arch = 0;
  program->options = calloc(1, 65536);
  for (int i = 0; i < options; ++i) strcat(strcat(program->options, texts[i]), "\n");
  if (strstr(program->options, "-DFAIL")) return strcpy(program->log, "msl_program(7): error: failed\n"), COMPILATION;
  if (!at || !(at = strstr(at, "{ msl::Grid grid;"))) return INVALID_PROGRAM;
  const char* const end = strstr(at, "};");
  for (; at < end; ++at) {
    if (!strncmp(at, "void* b", 7)) bind(signature, "b", at + 7, 0), block += 8;
    if (!strncmp(at, "uint64_t t", 10)) bind(signature, "t", at + 10, 0), block += 8;
    if (sscanf(at, "msl::Bytes<%d>", &capacity) == 1) {
      bind(signature, "i", strchr(at, '>') + 3, capacity);
      if (!inlined) block = (block + 15) / 16 * 16;
      inlined = 1, block += capacity;
    }
  }
  sscanf(texts[0], "--gpu-architecture=%*[^_]_%d", &arch);
  sprintf(program->code, "entry metalcore_0 block %d threads 1024 shared 0 for %d@%s@%d@0", (block + 15) / 16 * 16,
          count - 1, signature, arch);
  return 0;
}

int nvrtcDestroyProgram(Program** program) { return *program = 0, 0; }
int nvrtcGetProgramLogSize(Program* program, size_t* size) { return *size = strlen(program->log) + 1, 0; }
int nvrtcGetProgramLog(Program* program, char* text) { return strcpy(text, program->log), 0; }
int nvrtcGetCUBINSize(Program* program, size_t* size) { return *size = strlen(program->code) + 1, 0; }
int nvrtcGetCUBIN(Program* program, char* code) { return strcpy(code, program->code), 0; }
int nvrtcGetPTXSize(Program* program, size_t* size) { return nvrtcGetCUBINSize(program, size); }
int nvrtcGetPTX(Program* program, char* code) { return nvrtcGetCUBIN(program, code); }
