// Sums of many terms.
#pragma once

#include <metal_stdlib>

using namespace metal;

// A running sum that also adds up what each addition rounds off, so that its error does not grow with the number of
// terms. Source: Ogita, Rump and Oishi, "Accurate sum and dot product", 2005, algorithm 4.4. Threads add blocks of
// terms, where what it costs does not count. Each number of V is summed by itself.
template <typename V>
struct LongSum {
  V sum = V(0.0f);
  V lost = V(0.0f);

  void add(V term) {
    const V next = sum + term;
    const V part = next - sum;
    lost += (sum - (next - part)) + (term - part);
    sum = next;
  }
  void scale(V factor) {
    sum *= factor;
    lost *= factor;
  }
  // An infinite sum has lost NaN.
  V total() const { return select(sum, sum + lost, isfinite(sum)); }
};
