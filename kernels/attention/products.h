// Sums of products of two matrices' rows.
#pragma once

#include "fragments.h"

// Adds a lane's part of the products of two matrices' rows.
template <uint kPitch, typename T, uint kDown, uint kAcross>
METAL_FUNC void add_products(thread float (&sums)[kDown], thread Fragments<T, kDown, kAcross>& a,
                             thread Fragments<T, kDown, kAcross>& b) {
#pragma unroll
  for (uint m = 0; m < kDown; ++m) {
#pragma unroll
    for (uint n = 0; n < kAcross; ++n) {
      const metal::float2 product = metal::float2(elements(a.at[m][n])) * metal::float2(elements(b.at[m][n]));
      sums[m] += product.x + product.y;
    }
  }
}

template <uint kPitch, typename T, uint kDown, uint kAcross>
METAL_FUNC void add_products(thread float (&sums)[kDown], thread const SharedRows<T, kDown, kAcross>& a,
                             thread const SharedRows<T, kDown, kAcross>& b) {
#pragma unroll
  for (uint n = 0; n < kAcross; ++n) {
    Fragments<T, kDown, 1> left, right;
    load<kPitch>(left, a.first + n * 8);
    load<kPitch>(right, b.first + n * 8);
    add_products<kPitch>(sums, left, right);
  }
}
