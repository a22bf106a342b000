// Sums of rows of pairs, or of the products of two rows. A threadgroup takes a part of a row.
#include "double/double.h"
#include "double/pairs.h"

template <bool PRODUCTS>
[[kernel]] [[max_total_threads_per_threadgroup(DOUBLE_THREADS)]] void double_sum(
    device const Pair* x [[buffer(0)]], device const Pair* y [[buffer(1)]], device Pair* sums [[buffer(2)]],
    constant DoubleSumParams& p [[buffer(3)]], uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float2 partial[DOUBLE_THREADS];
  const long row = group / p.parts, first = long(group % p.parts) * p.share;
  const long end = min(first + p.share, long(p.length));
  Pair sum = Pair(0.0f, 0.0f);
  for (long i = first + thread_index; i < end; i += DOUBLE_THREADS) {
    const long at = row * p.length + i;
    sum = PRODUCTS ? add_product_to(sum, x[at], y[at]) : add_to(sum, x[at]);
    sum = ordered_sum(sum.x, sum.y);
  }
  partial[thread_index] = sum;
  for (uint half_way = DOUBLE_THREADS / 2; half_way > 0; half_way /= 2) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (thread_index < half_way) partial[thread_index] = add(partial[thread_index], partial[thread_index + half_way]);
  }
  if (thread_index == 0) sums[group] = pair(partial[0].x, partial[0].y);
}

template [[host_name("double_sum")]] [[kernel]] decltype(double_sum<false>) double_sum<false>;
template [[host_name("double_dot")]] [[kernel]] decltype(double_sum<true>) double_sum<true>;
