// Numbers in blocks that share a scale, the largest absolute value in them: in 4 bits (NF4 and FP4) or in 8 bits, as
// indices of a table. Blocks are of consecutive numbers, whatever their shape. The even numbers of 4 bits are the upper
// halves of bytes. What kernels and host share.
//
// Source: Dettmers, Pagnoni, Holtzman and Zettlemoyer, "QLoRA: Efficient Finetuning of Quantized LLMs", 2023; Dettmers,
// Lewis, Shleifer and Zettlemoyer, "8-bit Optimizers via Block-wise Quantization", 2022. The tables, layouts and
// roundings are those of github.com/bitsandbytes-foundation/bitsandbytes, bitsandbytes/backends/default/ops.py.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

// A thread has so many numbers at a time, and a block of 32 at least has several threads.
#define BLOCKWISE_RUN 8
#define BLOCKWISE_THREADS 128
#define BLOCKWISE_MOST 4096      // numbers of a block
#define BLOCKWISE_UNITS 4        // runs of a thread that makes numbers
#define BLOCKWISE_SCALE_BLOCK 8  // log2 of the size of the blocks of scales that are packed in 8 bits themselves

struct BlockwiseParams {
  uint64_t count;   // numbers
  uint32_t shift;   // log2 of a block's size
  uint32_t dtype;   // of the numbers: QUANT_FLOAT, QUANT_HALF or QUANT_BFLOAT
  uint32_t nested;  // whether the scales are packed in 8 bits
};
