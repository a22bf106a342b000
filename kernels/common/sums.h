// Sums of many terms.
#pragma once

#include <metal_stdlib>

using namespace metal;

// A running sum that carries what an addition rounds off into the next one, so that its error does not grow with the
// number of terms. Source: Kahan, "Further remarks on reducing truncation errors", 1965; Knuth's exact error of a sum
// (The Art of Computer Programming 2, 4.2.2). Threads add blocks of terms, where what it costs does not count. Each
// number of V is summed by itself.
template <typename V>
struct LongSum {
  V sum = V(0.0f);
  V lost = V(0.0f);

  void add(V term) {
    const V all = term + lost;
    const V next = sum + all;
    const V part = next - sum;
    const V rest = (sum - (next - part)) + (all - part);
    lost = select(V(0.0f), rest, rest == rest);  // an infinite sum has lost NaN
    sum = next;
  }
  void scale(V factor) {
    sum *= factor;
    lost *= factor;
  }
  V total() const { return sum + lost; }
};
