"""simd_ and quad_ functions, simdgroup_matrix and atomics against NumPy, on whole, partial and divergent simdgroups."""

import numpy as np
import pytest
import torch

import metalcore

pytestmark = pytest.mark.usefixtures("compiles_for_cuda")
LANES = 32
TYPES = {"float": np.float32, "half": np.float16, "int": np.int32, "uchar": np.uint8, "short": np.int16}
RNG = np.random.default_rng(0)


def program(body, element, extra=""):
    return f"""
        #include <metal_stdlib>
        using namespace metal;
        {extra}
        kernel void k(device const {element}* x [[buffer(0)]], device {element}* out [[buffer(1)]],
                      uint i [[thread_position_in_grid]], uint n [[threads_per_grid]],
                      uint lane [[thread_index_in_simdgroup]]) {{
          {element} v = x[i];
          {body}
        }}"""


def run(device, body, x, outputs, element="float", group=64, extra=""):
    """Runs `body` in a kernel; out[j * n + i] is output j of thread i."""
    library = metalcore.compile_shader(program(body, element, extra))
    out = torch.zeros(outputs * len(x), dtype=torch.from_numpy(x).dtype, device=device)
    library.k(torch.from_numpy(x).to(device), out, threads=len(x), group_size=group)
    return out.cpu().numpy().reshape(outputs, -1)


def values(count, dtype):
    return RNG.integers(1, 4, count).astype(dtype)


def by_group(x, width):
    """The groups of lanes: rows of `width`, and a shorter last one."""
    return [x[start : start + width] for start in range(0, len(x), width)]


def spread(results, groups):
    return np.concatenate([np.broadcast_to(np.asarray(r), g.shape) for r, g in zip(results, groups)])


@pytest.mark.parametrize("prefix, width", [("simd", 32), ("quad", 4)])
@pytest.mark.parametrize("element", TYPES)
@pytest.mark.parametrize("count", [64, 50])
def test_reductions_and_prefixes(device, prefix, width, element, count):
    dtype = TYPES[element]
    x = values(count, dtype)
    names = ["sum", "product", "min", "max", "prefix_inclusive_sum", "prefix_exclusive_sum"]
    names += ["prefix_inclusive_product", "prefix_exclusive_product"]
    if np.issubdtype(dtype, np.integer):
        names += ["and", "or", "xor"]
    body = "".join(f"out[{j} * n + i] = {prefix}_{name}(v); " for j, name in enumerate(names))
    if element == "half":  # a product of 32 halves overflows where one of up to four threes does not
        x = np.where(np.arange(count) % 8 == 0, x, 1).astype(dtype)
    got = dict(zip(names, run(device, body, x, len(names), element)))
    groups = by_group(x, width)

    def exclusive(values, first):
        return np.concatenate([[first], values[:-1]]).astype(dtype)

    with np.errstate(over="ignore"):
        sums, products = [np.cumsum(g, dtype=dtype) for g in groups], [np.cumprod(g, dtype=dtype) for g in groups]
    expected = {
        "sum": [s[-1] for s in sums],
        "product": [p[-1] for p in products],
        "min": [g.min() for g in groups],
        "max": [g.max() for g in groups],
        "prefix_inclusive_sum": sums,
        "prefix_exclusive_sum": [exclusive(s, 0) for s in sums],
        "prefix_inclusive_product": products,
        "prefix_exclusive_product": [exclusive(p, 1) for p in products],
        "and": [np.bitwise_and.reduce(g) for g in groups] if "and" in got else None,
        "or": [np.bitwise_or.reduce(g) for g in groups] if "or" in got else None,
        "xor": [np.bitwise_xor.reduce(g) for g in groups] if "xor" in got else None,
    }
    for name in names:
        np.testing.assert_array_equal(got[name], spread(expected[name], groups), err_msg=name)


@pytest.mark.parametrize("prefix, width", [("simd", 32), ("quad", 4)])
def test_shuffles(device, prefix, width):
    x = np.arange(64, dtype=np.float32) + 100
    body = "".join(
        f"out[{j} * n + i] = {prefix}_{call}; "
        for j, call in enumerate(
            [
                "shuffle(v, ushort(lane ^ 3))", "shuffle_xor(v, 2)", "shuffle_rotate_up(v, 1)",
                "shuffle_rotate_down(v, 3)", "broadcast(v, 2)", "broadcast_first(v)",
                "shuffle_up(v, 1)", "shuffle_down(v, 1)",
                "shuffle_and_fill_up(v, -v, 1)", "shuffle_and_fill_down(v, -v, 1)",
                "shuffle_and_fill_down(float2(v), -float2(v), 1, 2).y",
            ]
        )
    )  # fmt: skip
    if prefix == "quad":
        body = body.replace("lane ^ 3", "(lane & 3) ^ 3")
    got = run(device, body, x, 11)
    lane = np.arange(64) % width
    base = np.arange(64) - lane

    def fetch(source):
        return x[base + source % width]

    np.testing.assert_array_equal(got[0], fetch(lane ^ 3))
    np.testing.assert_array_equal(got[1], fetch(lane ^ 2))
    np.testing.assert_array_equal(got[2], fetch(lane - 1))
    np.testing.assert_array_equal(got[3], fetch(lane + 3))
    np.testing.assert_array_equal(got[4], fetch(np.full(64, 2)))
    np.testing.assert_array_equal(got[5], fetch(np.zeros(64, int)))
    inside = lane > 0  # MSL leaves open what lanes without a source get
    np.testing.assert_array_equal(got[6][inside], fetch(lane - 1)[inside])
    np.testing.assert_array_equal(got[7][lane < width - 1], fetch(lane + 1)[lane < width - 1])
    # Filling continues with the other vector, so that its last elements come first.
    np.testing.assert_array_equal(got[8], np.where(lane > 0, fetch(lane - 1), -fetch(lane - 1)))
    np.testing.assert_array_equal(got[9], np.where(lane < width - 1, fetch(lane + 1), -fetch(lane + 1)))
    pair = np.arange(64) % 2
    np.testing.assert_array_equal(got[10], np.where(pair == 0, x[np.arange(64) ^ 1], -x[np.arange(64) ^ 1]))


# (call, the lane whose value it takes, what it gives if the group has no such lane); k is the lane in its group of w.
FETCHES = [
    ("shuffle(v, ushort(k ^ 5))", lambda k, w: k ^ 5, "zero"),
    ("shuffle(v, ushort(k + w))", lambda k, w: k + w, "zero"),
    ("shuffle_xor(v, 2)", lambda k, w: k ^ 2, "zero"),
    ("broadcast(v, ushort(w - 1))", lambda k, w: 0 * k + w - 1, "zero"),
    ("shuffle_rotate_up(v, 1)", lambda k, w: (k - 1) % w, "zero"),
    ("shuffle_rotate_down(v, 3)", lambda k, w: (k + 3) % w, "zero"),
    ("shuffle_up(v, 1)", lambda k, w: k - 1, "own"),
    ("shuffle_down(v, 2)", lambda k, w: k + 2, "own"),
    ("shuffle_down(v, 70)", lambda k, w: k + 70, "own"),
    ("shuffle_and_fill_up(v, -v, 1)", lambda k, w: k - 1, "filling"),
    ("shuffle_and_fill_down(v, -v, 2)", lambda k, w: k + 2, "filling"),
    ("shuffle_down(float3(v), 2).z", lambda k, w: k + 2, "own"),
    ("shuffle_xor(long4(v), 1).w", lambda k, w: k ^ 1, "zero"),
]


@pytest.mark.parametrize("prefix, width", [("simd", 32), ("quad", 4)])
@pytest.mark.parametrize("statement, active", [
    ("", lambda lane: lane >= 0),
    ("if (lane % 3 == 1 || lane > 28)", lambda lane: (lane % 3 == 1) | (lane > 28)),
    ("if (lane % 5 == 4) return; else", lambda lane: lane % 5 != 4),
], ids=["the last simdgroup is short", "in a branch", "some have ended"])  # fmt: skip
def test_lanes_that_take_no_part_give_zero(device, prefix, width, statement, active):
    count = 53
    x = np.arange(count, dtype=np.float32) + 100
    calls = "".join(f"out[{j} * n + i] = {prefix}_{call}; " for j, (call, _, _) in enumerate(FETCHES))
    got = run(device, f"const ushort w = {width}, k = ushort(lane) % w; {statement} {{ {calls} }}", x, len(FETCHES))
    lane = np.arange(count)
    takes_part = np.append(active(lane % 32), np.zeros(64, bool))
    padded, k, base = np.append(x, np.zeros(64)), lane % width, lane - lane % width
    for row, (call, source, otherwise) in zip(got, FETCHES):
        chosen = source(k, width)
        taken = np.where(takes_part[base + chosen % width], padded[base + chosen % width], 0)
        outside = {"zero": 0 * x, "own": x, "filling": -taken}[otherwise]
        expected = np.where((chosen >= 0) & (chosen < width), taken, outside)
        np.testing.assert_array_equal(row, np.where(active(lane % 32), expected, 0), err_msg=call)


def test_lanes_on_two_paths_do_not_see_each_other(device):
    """Both paths exchange values of one size, and no lane loses the value that it published."""
    x = np.arange(32, dtype=np.float32) + 100
    body = """
        for (int round = 0; round < 3; ++round) {
          if (lane < 10) {
            v = simd_shuffle_down(v, 1);
            v = simd_shuffle_rotate_up(v, 1);
          } else {
            v = simd_shuffle_down(v, 2);
          }
        }
        out[i] = v;
    """
    expected = x.copy()
    for _ in range(3):
        expected[:10] = [0, *expected[1:10]]  # down: lane 9 gets 0 of lane 10; up: lane 0 gets 0 of lane 31
        expected[10:] = [*expected[12:], *expected[30:]]
    np.testing.assert_array_equal(run(device, body, x, 1)[0], expected)


def test_votes_in_divergent_code(device):
    """Lanes 0, 3, 6 … take a branch, and only they vote there."""
    x = np.arange(64, dtype=np.int32)
    body = """
        if (lane % 3 == 0) {
          out[i] = int(simd_sum(v));
          out[n + i] = simd_is_first();
          out[2 * n + i] = int(ulong(simd_ballot(v % 2 == 0)));
          out[3 * n + i] = int(ulong(simd_active_threads_mask()));
          out[4 * n + i] = simd_all(lane % 3 == 0) + 2 * simd_any(lane == 1) + 4 * simd_any(lane == 9);
          out[5 * n + i] = simd_broadcast_first(v) + simd_max(v);
        } else {
          out[i] = int(simd_sum(1));
        }
        out[6 * n + i] = simd_sum(1) + simd_ballot(true).all() +
                         popcount((ulong)(simd_vote::vote_t)simd_ballot(v < 40));
    """
    got = run(device, body, x, 7, "int")
    lane, base = x % 32, x - x % 32
    branch = lane % 3 == 0
    inside = np.arange(0, 32, 3)
    np.testing.assert_array_equal(got[0], np.where(branch, inside.sum() + len(inside) * base, 32 - len(inside)))
    np.testing.assert_array_equal(got[1][branch], lane[branch] == 0)
    mask = int(sum(1 << int(j) for j in inside))
    even = int(sum(1 << int(j) for j in inside if j % 2 == 0))
    as_int = np.array([even, mask], np.uint32).view(np.int32)
    np.testing.assert_array_equal(got[2][branch], as_int[0])
    np.testing.assert_array_equal(got[3][branch], as_int[1])
    np.testing.assert_array_equal(got[4][branch], 1 + 0 + 4)
    np.testing.assert_array_equal(got[5][branch], (2 * base + 30)[branch])
    np.testing.assert_array_equal(got[6], 32 + 1 + np.where(base == 0, 32, 8))


def test_values_of_eight_bytes_and_more(device):
    """Values of other sizes pass between lanes whole."""
    x = np.arange(32, dtype=np.int64) * (1 << 40) + 5
    body = """
        out[i] = simd_shuffle_xor(v, 1);
        out[n + i] = simd_sum(long4(v, 2 * v, 0, 1)).y + simd_sum(long4(v)).w;
        out[2 * n + i] = simd_or(v);
    """
    got = run(device, body, x, 3, "long")
    np.testing.assert_array_equal(got[0], x[np.arange(32) ^ 1])
    np.testing.assert_array_equal(got[1], 3 * x.sum())
    np.testing.assert_array_equal(got[2], np.bitwise_or.reduce(x))


MATRIX = """
    #include <metal_stdlib>
    #include <metal_simdgroup_matrix>
    using namespace metal;
    kernel void product(device const {T}* a, device const {T}* b, device float* c, device {T}* transposed,
                        device float* elements, uint lane [[thread_index_in_simdgroup]]) {{
      simdgroup_matrix<{T}, 8, 8> x, y, z({T}(2));
      simdgroup_float8x8 sum = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);
      simdgroup_load(x, a, 16, ulong2(8, 2));
      simdgroup_load(y, b, 8, 0, true);
      simdgroup_multiply_accumulate(sum, x, y, sum);
      simdgroup_multiply_accumulate(sum, x, z, sum);
      simdgroup_store(sum, c, 8);
      simdgroup_store(x, transposed, 8, 0, true);
      {see}
    }}"""
SEE = "elements[2 * lane] = x.thread_elements()[0]; elements[2 * lane + 1] = x.thread_elements()[1];"


@pytest.mark.parametrize("seen", [True, False])  # a target may choose where elements are that the program cannot see
@pytest.mark.parametrize(
    "element, dtype", [("float", torch.float32), ("half", torch.float16), ("bfloat", torch.bfloat16)]
)
def test_simdgroup_matrix(device, element, dtype, seen):
    a, b = torch.randn(10, 16).to(dtype), torch.randn(8, 8).to(dtype)
    c, elements = torch.empty(8, 8, device=device), torch.empty(32, 2, device=device)
    transposed = torch.empty(8, 8, dtype=dtype, device=device)
    library = metalcore.compile_shader(MATRIX.format(T=element, see=SEE if seen else ""))
    library.product(a.to(device), b.to(device), c, transposed, elements, threads=32, group_size=32)
    x, y = a[2:10, 8:16].double(), b.double()
    exact = 1 + x @ y.T + 2 * x
    # Nine roundings of sums whose terms are bounded by the sum of magnitudes.
    bound = 9 * torch.finfo(torch.float32).eps * (1 + x.abs() @ y.T.abs() + 2 * x.abs())
    assert ((c.cpu().double() - exact).abs() <= bound).all()
    assert torch.equal(transposed.cpu().double(), x.T)
    for lane in range(32) if seen else ():
        quad = lane // 4
        row, column = (quad & 4) + (lane // 2) % 4, (quad & 2) * 2 + (lane % 2) * 2
        assert elements[lane].tolist() == x[row, column : column + 2].tolist()


def test_atomics(device):
    library = metalcore.compile_shader("""
        #include <metal_stdlib>
        using namespace metal;
        kernel void count(device atomic_int* ints, device atomic_float* floats, device atomic_ulong* longs,
                          device atomic_uint* locks, device int* claimed,
                          uint i [[thread_position_in_grid]], uint t [[thread_index_in_threadgroup]]) {
          threadgroup atomic_uint local;
          if (t == 0) atomic_store_explicit(&local, 0u, memory_order_relaxed);
          threadgroup_barrier(mem_flags::mem_threadgroup);
          int v = int(i) - 40;
          atomic_fetch_add_explicit(&ints[0], v, memory_order_relaxed);
          atomic_fetch_sub_explicit(&ints[1], 2, memory_order_relaxed);
          atomic_fetch_min_explicit(&ints[2], v, memory_order_relaxed);
          atomic_fetch_max_explicit(&ints[3], v, memory_order_relaxed);
          atomic_fetch_or_explicit(&ints[4], 1 << (i % 31), memory_order_relaxed);
          atomic_fetch_and_explicit(&ints[5], ~(1 << (i % 8)), memory_order_relaxed);
          atomic_fetch_xor_explicit(&ints[6], int(i), memory_order_relaxed);
          atomic_fetch_add_explicit(&floats[0], 0.5f, memory_order_relaxed);
          atomic_max_explicit(&longs[0], ulong(i) << 40, memory_order_relaxed);
          atomic_min_explicit(&longs[1], (ulong(i) + 7) << 40, memory_order_relaxed);
          uint expected = 0;
          if (atomic_compare_exchange_weak_explicit(&locks[i % 4], &expected, 1u, memory_order_relaxed,
                                                    memory_order_relaxed))
            claimed[i % 4] += 1;
          atomic_fetch_add_explicit(&local, 1u, memory_order_relaxed);
          threadgroup_barrier(mem_flags::mem_threadgroup);
          const int all = int(atomic_load_explicit(&local, memory_order_relaxed));
          if (t == 0) atomic_fetch_add_explicit(&ints[7], all, memory_order_relaxed);
          if (t == 1) atomic_exchange_explicit(&ints[8], 9, memory_order_relaxed);
        }""")
    n = 1024
    ints = torch.zeros(9, dtype=torch.int32, device=device)
    ints[5] = -1
    floats, claimed = torch.zeros(1, device=device), torch.zeros(4, dtype=torch.int32, device=device)
    longs, locks = torch.tensor([0, -1], device=device), torch.zeros(4, dtype=torch.int32, device=device)
    library.count(ints, floats, longs, locks, claimed, threads=n, group_size=128)
    v = np.arange(n) - 40
    assert ints.tolist() == [v.sum(), -2 * n, v.min(), v.max(), (1 << 31) - 1, ~255, 0, n, 9]
    assert floats.item() == n / 2
    assert longs.tolist() == [(n - 1) << 40, 7 << 40]
    assert locks.tolist() == claimed.tolist() == [1, 1, 1, 1]
