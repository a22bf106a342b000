// As programs of zero-knowledge proofs write fields and curves: big integers of limbs, constants made of constants,
// Montgomery products, points in Jacobian coordinates, buckets.
#include <metal_stdlib>
using namespace metal;

constant uint LIMB_BITS = 16;
constant uint BITS = 256;
constant uint NUM_LIMBS = BITS / LIMB_BITS;
constant uint WIDE_LIMBS = NUM_LIMBS * 2;
constant uint MASK = (1u << LIMB_BITS) - 1;
constant uint N0 = 25481;
constant uint P_LIMBS[16] = {64839, 55420, 35862, 15392, 51853, 26737, 27281, 38785,
                             22621, 33153, 17846, 47184, 41001, 57649, 20082, 12388};
constant uint LAST_LIMB = P_LIMBS[NUM_LIMBS - 1];

struct BigInt {
  array<uint, 16> limbs;
};

constant BigInt ZERO = {{0}};

struct Point {
  BigInt x, y, z;
};

bool operator==(const BigInt a, const BigInt b) {
  for (uint i = 0; i < NUM_LIMBS; i++) {
    if (a.limbs[i] != b.limbs[i]) return false;
  }
  return true;
}

bool is_zero(BigInt a) { return a == ZERO; }

BigInt modulus() {
  BigInt p;
#pragma unroll(16)
  for (uint i = 0; i < NUM_LIMBS; i++) p.limbs[i] = P_LIMBS[i];
  return p;
}

bool at_least(BigInt a, BigInt b) {
  for (int i = int(NUM_LIMBS) - 1; i >= 0; i--) {
    if (a.limbs[i] > b.limbs[i]) return true;
    if (a.limbs[i] < b.limbs[i]) return false;
  }
  return true;
}

uint add_limbs(BigInt a, BigInt b, thread BigInt* sum) {
  uint carry = 0;
  for (uint i = 0; i < NUM_LIMBS; i++) {
    uint c = a.limbs[i] + b.limbs[i] + carry;
    carry = c >> LIMB_BITS;
    sum->limbs[i] = c & MASK;
  }
  return carry;
}

void subtract_limbs(BigInt a, BigInt b, thread BigInt* difference) {
  uint borrow = 0;
  for (uint i = 0; i < NUM_LIMBS; i++) {
    uint c = a.limbs[i] - b.limbs[i] - borrow;
    borrow = (c >> LIMB_BITS) ? 1 : 0;
    difference->limbs[i] = c & MASK;
  }
}

BigInt operator+(BigInt a, BigInt b) {
  BigInt sum, p = modulus();
  uint carry = add_limbs(a, b, &sum);
  if (carry || at_least(sum, p)) subtract_limbs(sum, p, &sum);
  return sum;
}

BigInt operator-(BigInt a, BigInt b) {
  BigInt result;
  if (at_least(a, b)) {
    subtract_limbs(a, b, &result);
  } else {
    subtract_limbs(modulus(), b, &result);
    result = result + a;
  }
  return result;
}

BigInt operator*(BigInt x, BigInt y) {
  uint t[34];
  for (uint i = 0; i < WIDE_LIMBS + 2; i++) t[i] = 0;
  for (uint i = 0; i < NUM_LIMBS; i++) {
    ulong carry = 0;
    for (uint j = 0; j < NUM_LIMBS; j++) {
      ulong c = ulong(t[i + j]) + ulong(x.limbs[i]) * y.limbs[j] + carry;
      t[i + j] = uint(c) & MASK;
      carry = c >> LIMB_BITS;
    }
    t[i + NUM_LIMBS] += uint(carry);
  }
  for (uint i = 0; i < NUM_LIMBS; i++) {
    uint m = (t[i] * N0) & MASK;
    ulong carry = 0;
    for (uint j = 0; j < NUM_LIMBS || carry; j++) {
      ulong product = j < NUM_LIMBS ? ulong(m) * P_LIMBS[j] : 0ul;
      ulong c = ulong(t[i + j]) + product + carry;
      t[i + j] = uint(c) & MASK;
      carry = c >> LIMB_BITS;
    }
  }
  BigInt result, p = modulus();
  for (uint i = 0; i < NUM_LIMBS; i++) result.limbs[i] = t[i + NUM_LIMBS];
  if (t[WIDE_LIMBS] || at_least(result, p)) subtract_limbs(result, p, &result);
  return result;
}

Point doubled(Point q) {
  if (is_zero(q.z)) return q;
  BigInt a = q.x * q.x, b = q.y * q.y, c = b * b;
  BigInt d = (q.x + b) * (q.x + b) - a - c;
  d = d + d;
  BigInt e = a + a + a, f = e * e;
  BigInt c8 = c + c;
  c8 = c8 + c8;
  c8 = c8 + c8;
  Point r;
  r.x = f - (d + d);
  r.y = e * (d - r.x) - c8;
  r.z = q.y * q.z;
  r.z = r.z + r.z;
  return r;
}

Point operator+(Point p, Point q) {
  if (is_zero(p.z)) return q;
  if (is_zero(q.z)) return p;
  BigInt z1z1 = p.z * p.z, z2z2 = q.z * q.z;
  BigInt u1 = p.x * z2z2, u2 = q.x * z1z1;
  BigInt s1 = p.y * q.z * z2z2, s2 = q.y * p.z * z1z1;
  BigInt h = u2 - u1, r = s2 - s1;
  if (is_zero(h)) {
    if (is_zero(r)) return doubled(p);
    return Point{p.x, p.y, ZERO};
  }
  BigInt hh = h * h, hhh = h * hh, v = u1 * hh;
  Point sum;
  sum.x = r * r - hhh - (v + v);
  sum.y = r * (v - sum.x) - s1 * hhh;
  sum.z = p.z * q.z * h;
  return sum;
}

kernel void mont_mul(device BigInt* result [[buffer(0)]], device const BigInt* a [[buffer(1)]],
                     device const BigInt* b [[buffer(2)]], uint i [[thread_position_in_grid]]) {
  BigInt x = a[i], y = b[i];
  result[i] = x * y;
}

// The sum of the points of each bucket; bucket i has points offsets[i] to offsets[i + 1] of `order`.
kernel void sum_buckets(device Point* sums [[buffer(0)]], device const Point* points [[buffer(1)]],
                        constant uint* offsets [[buffer(2)]], constant uint* order [[buffer(3)]],
                        uint bucket [[thread_position_in_grid]]) {
  Point sum = {ZERO, ZERO, ZERO};
  for (uint i = offsets[bucket]; i < offsets[bucket + 1]; i++) {
    Point q = points[order[i]];
    sum = sum + q;
  }
  sums[bucket] = sum;
}

kernel void top_limb(device uint* out [[buffer(0)]]) { out[0] = LAST_LIMB; }
