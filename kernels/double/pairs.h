// Arithmetic of pairs of floats: hi is the float next to the number, and lo is the rest, so that a pair has 48 bits.
//
// The algorithms are Knuth's and Dekker's error-free sums and products, and those of Joldes, Muller and Popescu ("Tight
// and rigorous error bounds for basic building blocks of double-word arithmetic", 2017). u is 2^-24.
//
// An error term is lost if a compiler reorders sums, or if it joins the product that an error belongs to with a sum.
// All programs are compiled without fast math, so that sums keep their order. The pragma keeps Apple's compiler from
// joining. NVRTC does not know it: there a product that is summed is a call of fma, which is not a product to join.
#pragma once

#include <metal_stdlib>
using namespace metal;

#pragma METAL fp contract(off)

typedef float2 Pair;  // x is hi, and y is lo

inline float rounded_product(float a, float b) { return fma(a, b, 0.0f); }

// The rounded sum and its error, if |a| >= |b|.
inline Pair ordered_sum(float a, float b) {
  const float sum = a + b;
  return Pair(sum, b - (sum - a));
}

// The rounded sum and its error.
inline Pair exact_sum(float a, float b) {
  const float sum = a + b, b_part = sum - a;
  return Pair(sum, (a - (sum - b_part)) + (b - b_part));
}

// The rounded product and its error.
inline Pair exact_product(float a, float b) {
  const float product = rounded_product(a, b);
  return Pair(product, fma(a, b, -product));
}

// The pair of a result whose parts overlap. An infinity or NaN has no rest.
inline Pair pair(float hi, float lo) { return isfinite(hi) ? ordered_sum(hi, lo) : Pair(hi, 0.0f); }

// The errors of what follows are relative. Where they are u², only the last sum rounds what is as large as lo.
inline Pair add(Pair a, Pair b) {  // error u²
  const Pair high = exact_sum(a.x, b.x), low = exact_sum(a.y, b.y), middle = exact_sum(high.y, low.x);
  const Pair sum = ordered_sum(high.x, middle.x);
  return isfinite(high.x) ? ordered_sum(sum.x, sum.y + (middle.y + low.y)) : Pair(high.x, 0.0f);
}
inline Pair add(Pair a, float b) {  // error 2u²
  const Pair high = exact_sum(a.x, b);
  return pair(high.x, a.y + high.y);
}

inline Pair multiply(Pair a, Pair b) {  // error u²
  const Pair high = exact_product(a.x, b.x), left = exact_product(a.x, b.y), right = exact_product(a.y, b.x);
  const Pair cross = exact_sum(left.x, right.x), middle = exact_sum(high.y, cross.x);
  const float rest = middle.y + (cross.y + fma(a.y, b.y, left.y + right.y));
  const Pair sum = ordered_sum(high.x, middle.x);
  return isfinite(high.x) ? ordered_sum(sum.x, sum.y + rest) : Pair(high.x, 0.0f);
}

// a - x y for a float y, where hi of the difference is less than a's by a factor of about u.
inline Pair remainder(Pair a, Pair x, float y) {
  const Pair high = exact_product(x.x, y), low = exact_product(x.y, y);
  const Pair left = exact_sum(a.x - high.x, -high.y), right = exact_sum(a.y, -low.x);
  const Pair sum = exact_sum(left.x, right.x);
  return ordered_sum(sum.x, sum.y + (left.y + (right.y - low.y)));
}

// A long division with three digits, which are floats.
inline Pair quotient(Pair a, Pair b) {  // error u²
  const float first = a.x / b.x;
  if (!isfinite(first) || isinf(b.x)) return Pair(first, 0.0f);
  const Pair rest = remainder(a, b, first);
  const float second = rest.x / b.x;
  const float third = (fma(-second, b.x, rest.x) + fma(-second, b.y, rest.y)) / b.x;
  const Pair sum = ordered_sum(first, second);
  return ordered_sum(sum.x, sum.y + third);
}

// A root, which is a float, and what two steps of Newton's method add to it.
inline Pair square_root(Pair a) {  // error u²
  const float root = sqrt(a.x), twice = root + root;
  if (!(root > 0.0f) || isinf(root)) return Pair(root, 0.0f);
  const Pair rest = remainder(a, Pair(root, 0.0f), root);
  const float second = rest.x / twice;
  const float third = (fma(-second, twice, rest.x) + fma(-second, second, rest.y)) / twice;
  const Pair sum = ordered_sum(root, second);
  return ordered_sum(sum.x, sum.y + third);
}

// The sums that a reduction carries: a rounded sum, and the sum of all errors.
inline Pair add_to(Pair sum, Pair term) {
  const Pair high = exact_sum(sum.x, term.x);
  return Pair(high.x, sum.y + (high.y + term.y));
}
inline Pair add_product_to(Pair sum, Pair a, Pair b) {
  const Pair product = exact_product(a.x, b.x);
  return add_to(sum, Pair(product.x, fma(a.x, b.y, fma(a.y, b.x, product.y))));
}
