"""Kernels whose outcome depends on lanes that take no part, each with its clean twin."""

from checked_kernels import Buffer, Case


def _case(name, body, threads, message, thread=None):
    source = f"""
kernel void run(device const float* x, device float* out, uint t [[thread_position_in_threadgroup]],
                uint lane [[thread_index_in_simdgroup]]) {{
  float v = x[t];
{body}
}}"""
    return Case(name, "inactive lane read", source, (Buffer(64), Buffer(64)), (threads,), (threads,), message, thread)


LANE_READS = [
    _case(
        "a sum by shuffles over a short simdgroup",
        """
  v = simd_sum(v);  // @good
  for (ushort n = 16; n; n /= 2) v += simd_shuffle_down(v, n);  // @bad @here
  if (t == 0) out[t] = v;""",
        20,
        "of its simdgroup, which takes no part here",
        lambda t: t[0] >= 4,
    ),
    _case(
        "a maximum over lanes of which some have ended",
        """
  if (t >= 20) v = -1;    // @good
  if (t >= 20) return;  // @bad
  v = -v - 1;
  for (ushort n = 16; n; n /= 2) v = max(v, simd_shuffle_xor(v, n));  // @here
  out[t] = v;""",
        32,
        "and the outcome depends on it: Metal leaves it open, and Apple's GPUs give 0",
    ),
    _case(
        "broadcast from a lane that is not in the branch",
        """
  if (t >= 3) {
    out[t] = simd_broadcast(v, 3);  // @good
    out[t] = simd_broadcast(v, 2);  // @bad @here
  }""",
        64,
        "takes the value of lane 2 of its simdgroup",
        lambda t: t[0] % 32 >= 3,
    ),
    _case(
        "a lane that no simdgroup has",
        """
  const ushort next = (lane + 1) % 32;  // @good
  const ushort next = lane + 1;  // @bad
  out[t] = simd_shuffle(v, next);  // @here""",
        64,
        "a lane that its simdgroup or quad does not have",
        lambda t: t[0] % 32 == 31,
    ),
    _case(
        "a rotation in a short quad, of wide values",
        """
  const long4 all = quad_shuffle_rotate_down(long4(v * 100, 2, 3, 4 + t), 1);  // @here
  if (t < 16)  // @good
  out[t] = float(all.x + all.w);""",
        18,
        "takes the value of lane 18 of its simdgroup",
        lambda t: t[0] == 17,
    ),
    _case(
        "a matrix product by half a simdgroup",
        """
  simdgroup_float8x8 a = make_filled_simdgroup_matrix<float, 8, 8>(2), b = a, c;
  simdgroup_multiply(c, a, b);  // @here
  if (lane > 99)  // @good
  out[t] = c.thread_elements()[0];""",
        16,
        "which takes no part here",
    ),
    _case(
        "a shuffle up whose lowest lanes keep their own",
        """
  v = simd_shuffle_up(v, 3) + simd_shuffle_down(v, 40) + quad_shuffle_up(v, 1);
  v = lane < 30 ? simd_shuffle_down(v, 1) : v;  // @here
  if (lane < 29 || lane > 29)  // @good
  out[t] = v;""",
        64,
        "takes the value of lane 30 of its simdgroup",
        lambda t: t[0] % 32 == 29,
    ),
]
