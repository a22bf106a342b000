// What top_k.metal, renorm.metal and csrc/ops/sampling share.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

#define TOP_K_MOST 1024        // values that topk sorts in threadgroup memory
#define TOP_K_LONG_MOST 65536  // in device memory

#define RENORM_MASK_TOP_K 0u
#define RENORM_TOP_K 1u
#define RENORM_TOP_P 2u

struct TopKParams {
  uint32_t length;  // of a row
  uint32_t k;
  uint32_t smallest;
  int64_t x_stride;
};

struct RenormParams {
  uint32_t length;
  uint32_t kind;
  int64_t x_stride;
};
