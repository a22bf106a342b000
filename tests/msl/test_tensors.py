"""Tensors, cooperative tensors and matmul2d of Metal 4, against products in float64."""

import itertools
import re

import pytest
import torch

import metalcore

pytestmark = [pytest.mark.only_on("simulator", "cuda"), pytest.mark.usefixtures("compiles_for_cuda")]

HEAD = """
#include <metal_stdlib>
#include <metal_tensor>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
using namespace metal;
using namespace mpp::tensor_ops;
using mode = matmul2d_descriptor::mode;
"""
HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32
DTYPES = {
    "half": HALF,
    "bfloat": BFLOAT,
    "float": FLOAT,
    "int8_t": torch.int8,
    "uint8_t": torch.uint8,
    "int32_t": torch.int32,
}


def random(shape, dtype, device):
    if dtype.is_floating_point:
        return torch.randn(shape).to(dtype).to(device)
    return torch.randint(0 if dtype == torch.uint8 else -128, 127, shape).to(dtype).to(device)


def assert_product(found, expected, left, right):
    """The sum of K products in float32 has K roundings of the sum of their absolute values, and the result its own."""
    found, bound = found.cpu().double(), left.cpu().double().abs() @ right.cpu().double().abs()
    if not expected.dtype.is_floating_point:
        assert torch.equal(found, expected.double())
        return
    eps = torch.finfo(FLOAT).eps * left.shape[1] * bound + torch.finfo(expected.dtype).eps * expected.double().abs()
    assert ((found - left.cpu().double() @ right.cpu().double()).abs() <= eps).all()


# Every combination of types ------------------------------------------------------------------------------------------

M, N, K = 12, 20, 9
SMALL = ("half", "bfloat")
COMBINATIONS = [
    *((left, right, "float") for left, right in itertools.product(("half", "bfloat", "float", "int8_t"), repeat=2)
      if (left, right) != ("int8_t", "int8_t")),
    *((left, right, to) for left, right in itertools.product((*SMALL, "int8_t"), repeat=2) for to in SMALL
      if to in (left, right)),
    *((left, "uint8_t", to) for left in SMALL for to in (left, "float")),
    *(("uint8_t", right, to) for right in SMALL for to in (right, "float")),
    ("uint8_t", "float", "float"), ("float", "uint8_t", "float"),
    ("int8_t", "int8_t", "int32_t"), ("uint8_t", "uint8_t", "int32_t"),
]  # fmt: skip


def test_every_combination_of_types(device):
    pointers = ", ".join(
        f"device {name}* {side}_{name}"
        for side in ("l", "r", "d")
        for name in DTYPES
        if (side, name) != ("d", "uint8_t")
    )
    calls = "\n".join(
        f"  one(l_{left}, r_{right}, d_{to} + {i * M * N}, K);" for i, (left, right, to) in enumerate(COMBINATIONS)
    )
    lib = metalcore.compile_shader(
        HEAD
        + f"""
        template <class L, class R, class D>
        void one(device L* l, device R* r, device D* d, int K) {{
          auto left = tensor<device L, dextents<int, 2>, tensor_inline>(l, dextents<int, 2>(K, {M}));
          using Right = extents<int, {N}, dynamic_extent>;
          auto right = tensor<device R, Right, tensor_inline>(r, Right(K));
          auto to = tensor<device D, extents<int, {N}, {M}>, tensor_inline>(d, extents<int, {N}, {M}>());
          constexpr auto descriptor = matmul2d_descriptor({M}, {N}, dynamic_length_v<int>);
          matmul2d<descriptor, execution_simdgroup> op;
          op.run(left, right, to);
        }}
        kernel void all({pointers}, constant int& K) {{\n{calls}\n}}"""
    )
    count = len(COMBINATIONS)
    lefts, rights = (
        {name: random(shape, dtype, device) for name, dtype in DTYPES.items()} for shape in ((M, K), (K, N))
    )
    results = {
        name: torch.zeros(count, M, N, dtype=dtype, device=device)
        for name, dtype in DTYPES.items()
        if name != "uint8_t"
    }
    lib.all(*lefts.values(), *rights.values(), *results.values(), K, threads=32, group_size=32)
    for i, (left, right, to) in enumerate(COMBINATIONS):
        a, b = lefts[left].cpu().double(), rights[right].cpu().double()
        assert_product(results[to][i], (a @ b).to(DTYPES[to]), a, b)


# Tensors as arguments, slices, scopes --------------------------------------------------------------------------------

TILES = (
    HEAD
    + """
template <class Scope, int M, int N, int K, bool TA, bool TB, mode how>
kernel void tiles(tensor<device half, dextents<int32_t, 2>> a [[buffer(0)]],
                  tensor<const device half, dextents<int32_t, 2>> b [[buffer(1)]],
                  tensor<device float, dextents<int32_t, 2>> c, uint2 tile [[threadgroup_position_in_grid]]) {
  constexpr auto descriptor = matmul2d_descriptor(M, N, K, TA, TB, false, how);
  matmul2d<descriptor, Scope> op;
  auto to = c.slice(tile.x * N, tile.y * M);
  for (int k = 0; k < (K > 0 ? a.get_extent(TA ? 1 : 0) : 1); k += K > 0 ? K : 1) {
    auto left = TA ? a.slice(tile.y * M, k) : a.slice(k, tile.y * M);
    auto right = TB ? b.slice(k, tile.x * N) : b.slice(tile.x * N, k);
    op.run(left, right, to);
  }
}
#define TILES(name, ...) template [[host_name(name)]] kernel void tiles<__VA_ARGS__>( \\
    tensor<device half, dextents<int32_t, 2>>, tensor<const device half, dextents<int32_t, 2>>, \\
    tensor<device float, dextents<int32_t, 2>>, uint2);
TILES("nn", execution_thread, 8, 12, -1, false, false, mode::multiply)
TILES("tn", execution_simdgroup, 32, 16, 0, true, false, mode::multiply)
TILES("nt", execution_simdgroups<4>, 64, 48, 16, false, true, mode::multiply_accumulate)
TILES("tt", execution_simdgroups<2>, 32, 16, -1, true, true, mode::multiply_accumulate)
"""
)


@pytest.fixture(scope="module")
def tiles(compiles_for_cuda):
    return metalcore.compile_shader(TILES)


@pytest.mark.parametrize(
    "name, m, n, threads", [("nn", 8, 12, 1), ("tn", 32, 16, 32), ("nt", 64, 48, 128), ("tt", 32, 16, 64)]
)
def test_tiles_of_strided_tensors(tiles, device, name, m, n, threads):
    rows, columns, inner = 70, 53, 37
    a, b = random((rows, inner), HALF, device), random((inner, columns), HALF, device)
    whole = torch.ones(rows + 3, columns + 5, device=device)
    c = whole[1:-2, 2:-3]  # not contiguous, and not at the storage's beginning
    stored = [x.T.contiguous() if flag == "t" else x for x, flag in zip((a, b), name)]
    stored[0] = torch.cat([stored[0], stored[0]], 1)[:, : stored[0].shape[1]]
    grid = (-(-columns // n) * threads, -(-rows // m))
    getattr(tiles, name)(*stored, c, threads=grid, group_size=(threads, 1))
    accumulates = name in ("nt", "tt")
    assert_product(c - 1 if accumulates else c, (a.cpu().double() @ b.cpu().double()).float(), a, b)
    whole[1:-2, 2:-3] = 1
    assert (whole == 1).all(), "it wrote outside of the tensor"


def test_arguments_that_are_no_such_tensors(tiles, device):
    a, c = torch.zeros(4, 8, dtype=HALF, device=device), torch.zeros(4, 8, device=device)
    for arguments, message in (
        ((a, 3, c), "argument 'b' of kernel 'nn' must be a tensor of the kernel's device, and it is 3"),
        ((a, a, a), "argument 'c' of kernel 'nn' has elements of type float, and the tensor has torch.float16"),
        ((a, a[0], c), "argument 'b' of kernel 'nn' has 2 dimensions, and the tensor has 1"),
        ((a, a.T, c), "argument 'b' of kernel 'nn' needs a tensor of at least one dimension whose last stride is 1"),
    ):
        with pytest.raises(RuntimeError, match=re.escape(message)):
            tiles.nn(*arguments, threads=1, group_size=1)


# Cooperative tensors -------------------------------------------------------------------------------------------------

HELD = (
    HEAD
    + """
template <bool TA, bool TB, class T>
void held(device T* a, device T* b, device float* c) {
  constexpr int M = 24, N = 40, K = 20;
  constexpr auto descriptor = matmul2d_descriptor(M, N, K, TA, TB, false, mode::multiply_accumulate);
  matmul2d<descriptor, execution_simdgroup> op;
  auto left = op.template get_left_input_cooperative_tensor<T, T, float>();
  auto right = op.template get_right_input_cooperative_tensor<T, T, float>();
  auto to = op.template get_destination_cooperative_tensor<remove_addrspace_t<decltype(left)>,
                                                           remove_addrspace_t<decltype(right)>, float>();
  left.load(tensor(a, extents<int, TA ? M : K, TA ? K : M>()));
  for (ushort i = 0; i < right.get_capacity(); ++i) {
    if (!right.is_valid_element(i)) continue;
    const auto at = right.get_multidimensional_index(i);
    right[i] = b[at[1] * (TB ? K : N) + at[0]];
  }
  for (auto it = to.begin(); it != to.end(); ++it) *it = 1;
  op.run(left, right, to);
  to.store(tensor(c, extents<int, N, M>()));
}
kernel void operands(device half* a, device half* b, device float* c) {
  held<false, false>(a, b, c), held<false, true>(a, b, c + 960);
  held<true, false>(a, b, c + 1920), held<true, true>(a, b, c + 2880);
}

// One step of attention: the softmax of rows, from registers into the next product.
kernel void attention(device float* q, device float* k, device float* v, device float* out, device float* columns) {
  auto Q = tensor(q, extents<int, 32, 16>()), K = tensor(k, extents<int, 32, 16>());
  auto V = tensor(v, extents<int, 24, 16>()), O = tensor(out, extents<int, 24, 16>());
  matmul2d<matmul2d_descriptor(16, 16, 32, false, true), execution_simdgroup> scores;
  matmul2d<matmul2d_descriptor(16, 24, 16), execution_simdgroup> values;
  auto S = scores.get_destination_cooperative_tensor<decltype(Q), decltype(K), float>();
  scores.run(Q, K, S);
  auto largest = scores.get_row_reduction_destination_cooperative_tensor<decltype(Q), decltype(K), float>();
  auto sum = scores.get_row_reduction_destination_cooperative_tensor<decltype(Q), decltype(K), float>();
  auto least = scores.get_column_reduction_destination_cooperative_tensor<decltype(Q), decltype(K), float>();
  reduce_columns(S, least, reduction_operation::min, reduction_operation_identity<float>::min_identity);
  least.store(tensor(columns, extents<int, 16>()));
  reduce_rows(S, largest, reduction_operation::max, -INFINITY);
  if (!is_iterator_compatible(S, largest) || is_iterator_compatible(largest, S)) return;
  for (auto it = S.begin(); it != S.end(); it++) *it = exp(*it - *largest.map_iterator(it));
  reduce_rows(S, sum);
  if (!values.is_compatible_as_left_input<float, float, float>(S)) return;
  auto P = values.get_left_input_cooperative_tensor<float, float, float>(S);
  auto result = values.get_destination_cooperative_tensor<decltype(P), decltype(V), float>();
  values.run(P, V, result);
  for (ushort i = 0; i < result.get_capacity(); ++i)
    if (result.is_valid_element(i)) result.set(i, result.get(i));
  result.store(O);
  simdgroup_barrier(mem_flags::mem_device);
  for (ushort i = 0; i < sum.get_capacity(); ++i)
    if (sum.is_valid_element(i)) columns[16 + sum.get_multidimensional_index(i)[0]] = sum[i];
}

// A tile in threadgroup memory, and a destination that four simdgroups hold.
kernel void staged(device bfloat* a, device bfloat* b, device bfloat* c, uint t [[thread_index_in_threadgroup]]) {
  threadgroup bfloat tile[48 * 40];
  for (uint i = t; i < 48 * 40; i += 128) tile[i] = a[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  auto A = tensor<threadgroup bfloat, dextents<int, 2>, tensor_inline>(tile, dextents<int, 2>(40, 48),
                                                                       array<int, 2>({1, 40}));
  auto B = tensor<device bfloat, dextents<int, 2>, tensor_inline>(b, dextents<int, 2>{56, 40});
  matmul2d<matmul2d_descriptor(48, 56), execution_simdgroups<4>> op;
  auto to = op.get_destination_cooperative_tensor<decltype(A), decltype(B), bfloat>();
  op.run(A, B, to);
  for (ushort i = 0; i < to.get_capacity(); ++i)
    if (to.is_valid_element(i) && to[i] < bfloat(0)) to[i] = bfloat(0);
  to.store(tensor(c, extents<int, 56, 48>()));
}
"""
)


@pytest.fixture(scope="module")
def held(compiles_for_cuda):
    return metalcore.compile_shader(HELD)


@pytest.fixture(params=["plain", "checked"])
def checked(request, device):
    """Runs a test once more in checking mode, where the layouts of cooperative tensors are others."""
    if request.param == "plain":
        yield
    elif device != "mps":
        pytest.skip("checking mode is the simulator's")
    else:
        with metalcore.simulator.checking(1):
            yield


def test_operands_in_registers(held, device, checked):
    a, b = random((24 * 20,), HALF, device), random((40 * 20,), HALF, device)
    c = torch.zeros(4, 24, 40, device=device)
    held.operands(a, b, c, threads=32, group_size=32)
    for found, (ta, tb) in zip(c, itertools.product((False, True), repeat=2)):
        left = a.view(20, 24).T if ta else a.view(24, 20)
        right = b.view(40, 20).T if tb else b.view(20, 40)
        assert_product(found - 1, (left.cpu().double() @ right.cpu().double()).float(), left, right)


def test_reductions_and_a_destination_as_an_input(held, device, checked):
    q, k, v = random((16, 32), FLOAT, device), random((16, 32), FLOAT, device), random((16, 24), FLOAT, device)
    out, columns = torch.zeros(16, 24, device=device), torch.zeros(32, device=device)
    held.attention(q, k, v, out, columns, threads=32, group_size=32)
    scores = q.cpu().double() @ k.cpu().double().T
    weights = (scores - scores.amax(1, keepdim=True)).exp()
    # The scores have 32 roundings of sums below 32, and exp() makes a relative error of an absolute one.
    torch.testing.assert_close(columns[:16].cpu().double(), scores.amin(0), atol=32 * 32 * 6e-8, rtol=0)
    torch.testing.assert_close(columns[16:].cpu().double(), weights.sum(1), atol=0, rtol=1e-4)
    torch.testing.assert_close(out.cpu().double(), weights @ v.cpu().double(), atol=1e-4 * 16, rtol=1e-4)


def test_a_tile_in_threadgroup_memory(held, device, checked):
    a, b = random((48, 40), BFLOAT, device), random((40, 56), BFLOAT, device)
    c = torch.zeros(48, 56, dtype=BFLOAT, device=device)
    held.staged(a, b, c, threads=128, group_size=128)
    exact = a.cpu().double() @ b.cpu().double()
    bound = 40 * 6e-8 * (a.cpu().double().abs() @ b.cpu().double().abs()) + exact.abs() / 128
    assert ((c.cpu().double() - exact.clamp(min=0)).abs() <= bound).all()


# Descriptors as parameters of templates ------------------------------------------------------------------------------

PARAMETERS = (
    HEAD
    + """
template <matmul2d_descriptor D, class Scope, class Left, class Right, class To>
void multiply(thread Left& left, thread Right& right, thread To& to) {
  matmul2d<D, Scope> op;
  op.run(left, right, to);
}
template <matmul2d_descriptor D, class Scope>
constexpr int rows_of(matmul2d<D, Scope>) {
  return D.m;
}
template <mpp::tensor_ops::matmul2d_descriptor descriptor>
kernel void product(tensor<device half, dextents<int, 2>> a [[buffer(0)]],
                    tensor<device half, dextents<int, 2>> b [[buffer(1)]],
                    tensor<device float, dextents<int, 2>> c [[buffer(2)]], device int* rows [[buffer(3)]],
                    uint2 group [[threadgroup_position_in_grid]]) {
  using Scope = execution_simdgroups<2>;
  auto left = a.slice(0, group.y * descriptor.m), right = b.slice(group.x * descriptor.n, 0);
  auto to = c.slice(group.x * descriptor.n, group.y * descriptor.m);
  multiply<descriptor, Scope>(left, right, to);
  rows[0] = rows_of(matmul2d<descriptor, Scope>());
}
constexpr constant matmul2d_descriptor low(16, 32, dynamic_length_v<int>);
template [[host_name("low")]] kernel decltype(product<low>) product<low>;
template [[host_name("high")]] kernel decltype(product<matmul2d_descriptor(32, 16, dynamic_length_v<int>)>)
    product<matmul2d_descriptor(32, 16, dynamic_length_v<int>)>;
"""
)


@pytest.mark.parametrize("name, tile", [("low", (16, 32)), ("high", (32, 16))])
def test_descriptors_are_parameters_of_templates(device, name, tile):
    left, right = random((40, 50), HALF, device), random((50, 36), HALF, device)
    found, rows = torch.zeros(40, 36, device=device), torch.zeros(1, dtype=torch.int32, device=device)
    groups = -(-36 // tile[1]), -(-40 // tile[0])
    kernel = getattr(metalcore.compile_shader(PARAMETERS), name)
    kernel(left, right, found, rows, threads=[groups[0] * 64, groups[1]], group_size=[64, 1])
    assert rows.item() == tile[0]
    assert_product(found, left.cpu().float() @ right.cpu().float(), left, right)


# Whole threadgroups --------------------------------------------------------------------------------------------------

WHOLE = (
    HEAD
    + """
// Two products, of which the second has smaller tiles and adds to what the first one has written.
template <bool TA, bool TB>
kernel void whole(tensor<device bfloat, dextents<int, 2>> a, tensor<device bfloat, dextents<int, 2>> b,
                  tensor<device float, dextents<int, 2>> c, uint2 tile [[threadgroup_position_in_grid]]) {
  constexpr auto large = matmul2d_descriptor(128, 64, dynamic_length_v<int>, TA, TB);
  constexpr auto small = matmul2d_descriptor(64, 24, dynamic_length_v<int>, TA, TB, false, mode::multiply_accumulate);
  matmul2d<large, execution_simdgroups<4>> first;
  matmul2d<small, execution_simdgroups<4>> second;
  auto left = TA ? a.slice(tile.y * 128, 0) : a.slice(0, tile.y * 128);
  auto right = TB ? b.slice(0, tile.x * 64) : b.slice(tile.x * 64, 0);
  auto to = c.slice(tile.x * 64, tile.y * 128);
  auto sums = first.template get_destination_cooperative_tensor<decltype(left), decltype(right), float>();
  first.run(left, right, sums);
  sums.store(to);
  threadgroup_barrier(mem_flags::mem_device);
  auto corner = c.slice<24, 64>(tile.x * 64, tile.y * 128);
  second.run(left, right, corner);
}
#define WHOLE(name, ...) template [[host_name(name)]] kernel void whole<__VA_ARGS__>( \\
    tensor<device bfloat, dextents<int, 2>>, tensor<device bfloat, dextents<int, 2>>, \\
    tensor<device float, dextents<int, 2>>, uint2);
WHOLE("nn", false, false)
WHOLE("nt", false, true)
WHOLE("tn", true, false)
WHOLE("tt", true, true)
"""
)


@pytest.fixture(scope="module")
def whole(compiles_for_cuda):
    return metalcore.compile_shader(WHOLE)


@pytest.mark.parametrize("name", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("inner, offset", [(200, 0), (72, 8), (37, 1)], ids=["aligned", "offset", "unaligned"])
def test_whole_threadgroups(whole, device, name, inner, offset):
    rows, columns = 192, 152
    a, b = random((rows, inner), BFLOAT, device), random((inner, columns), BFLOAT, device)
    c = torch.zeros(rows, columns, device=device)
    stored = []
    for x, flag in zip((a, b), name):
        x = x.T if flag == "t" else x
        wide = torch.full((x.shape[0], x.shape[1] + 16 * bool(offset)), torch.nan, dtype=BFLOAT, device=device)
        stored.append(wide[:, offset : offset + x.shape[1]])
        stored[-1].copy_(x)
    getattr(whole, name)(*stored, c, threads=(3 * 128, 2), group_size=(128, 1))
    twice = torch.zeros(rows, columns, dtype=torch.bool)
    for row in (0, 128):
        for column in (0, 64, 128):
            twice[row : row + 64, column : column + 24] = True
    factor = 1 + twice.double()
    product = a.cpu().double() @ b.cpu().double()
    bound = 2 * torch.finfo(FLOAT).eps * inner * (a.cpu().double().abs() @ b.cpu().double().abs())
    assert ((c.cpu().double() - factor * product).abs() <= bound).all()


def test_an_argument_has_a_type_by_another_name(device):
    source = "using Matrix = tensor<device float, dextents<int, 2>>;\n"
    source += "kernel void k(Matrix x, device float* y, uint2 at [[thread_position_in_grid]])"
    source += "{ y[at.y * 3 + at.x] = x[array<int, 2>{int(at.x), int(at.y)}]; }"
    x = torch.arange(20.0).view(4, 5).to(device)[:, :3]
    y = torch.empty(4, 3, device=device)
    metalcore.compile_shader(HEAD + source).k(x, y, threads=(3, 4))
    assert torch.equal(y, x)
