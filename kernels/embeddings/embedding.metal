// Rows of a table, by index. They are copied in words of 16, 4 or 2 bytes. A row that the table does not have is all
// ones, which is NaN in float32, float16 and bfloat16.
#include <metal_stdlib>

#include "embeddings/embedding.h"

using namespace metal;

template <typename Word>
kernel void embedding_rows(device const Word* table [[buffer(0)]], device const int* indices [[buffer(1)]],
                           device Word* out [[buffer(2)]], constant EmbeddingParams& params [[buffer(3)]],
                           uint2 at [[thread_position_in_grid]]) {
  const long index = params.wide ? reinterpret_cast<device const long*>(indices)[at.y] : long(indices[at.y]);
  Word word = Word(~0u);
  if (index >= 0 && index < params.rows) word = table[index * params.depth + at.x];
  out[ulong(at.y) * params.depth + at.x] = word;
}

#define INSTANTIATE(name, ...) template [[host_name(name)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;

INSTANTIATE("embedding_16", embedding_rows<uint4>)
INSTANTIATE("embedding_4", embedding_rows<uint>)
INSTANTIATE("embedding_2", embedding_rows<ushort>)
