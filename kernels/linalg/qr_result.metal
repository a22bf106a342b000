// The results of the blocked variant, one thread per element: the first columns of the identity, from which Q is made,
// and the upper triangle that the panels left.
#include <metal_stdlib>
using namespace metal;

#include "qr.h"
#include "scalars.h"

template <typename T>
[[kernel]] void qr_identity(device T* q [[buffer(0)]], constant QrResultParams& p [[buffer(1)]],
                            uint at [[thread_position_in_grid]]) {
  q[at] = number<T>(at / p.columns % p.rows == at % p.columns ? 1.0f : 0.0f);
}

template [[host_name("qr_identity")]] [[kernel]] void qr_identity<float>(device float*, constant QrResultParams&, uint);
template [[host_name("qr_identity_complex")]] [[kernel]] void qr_identity<float2>(device float2*,
                                                                                  constant QrResultParams&, uint);

[[kernel]] void qr_upper(device float* r [[buffer(0)]], constant QrResultParams& p [[buffer(1)]],
                         device const float* a [[buffer(2)]], uint at [[thread_position_in_grid]]) {
  const uint column = at % p.columns, row = at / p.columns % p.rows, matrix = at / p.columns / p.rows;
  r[at] = row <= column ? a[(ulong(matrix) * p.source_rows + row) * p.columns + column] : 0.0f;
}
