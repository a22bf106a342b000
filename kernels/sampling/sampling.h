// Arguments of the kernels of sampling, shared with the host.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

// Which classes of a row are drawn from, as float32 numbers. A row may have options of its own.
struct SampleOptions {
  float temperature;  // 0: the first of the largest logits
  float top_k;        // 0: all
  float top_p;        // 1: all
  float min_p;        // 0: all
};

struct SampleParams {
  uint32_t length;   // of a row
  uint32_t per_row;  // rows have options of their own
  SampleOptions options;
  uint32_t start;    // elements by which the first row begins past a multiple of 16 bytes
  int64_t x_stride;  // from row to row
};

// Rows that threadgroups share, of which all classes are drawn from.
#define SAMPLE_PART_THREADS 256
struct SamplePartsParams {
  uint32_t length;  // of a row
  uint32_t parts;   // of a row, at most SAMPLE_PART_THREADS
  uint32_t share;   // elements of a part
  float temperature;
  int64_t x_stride;
};

#define TOP_K_MOST 1024        // values that topk sorts in threadgroup memory
#define TOP_K_LONG_MOST 65536  // in device memory

#define RENORM_MASK_TOP_K 0u
#define RENORM_TOP_K 1u
#define RENORM_TOP_P 2u

struct TopKParams {
  uint32_t length;  // of a row
  uint32_t k;
  uint32_t smallest;
  uint32_t start;  // elements by which the first row begins past a multiple of 16 bytes
  int64_t x_stride;
};

struct RenormParams {
  uint32_t length;
  uint32_t kind;
  int64_t x_stride;
};
