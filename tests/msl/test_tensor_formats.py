"""Tensors of formats with few bits, their scales, and convolution2d of Metal 4, against float64."""

import pytest
import torch
import torch.nn.functional as F
from checking import needs_clang

import metalcore
from metalcore.msl.check import check
from metalcore.msl.errors import MSLError

pytestmark = [pytest.mark.only_on("simulator", "cuda"), pytest.mark.usefixtures("compiles_for_cuda")]

HEAD = """
#include <metal_stdlib>
#include <metal_tensor>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
using namespace metal;
using namespace mpp::tensor_ops;
"""
HALF, FLOAT = torch.float16, torch.float32
DTYPES = {"half": HALF, "bfloat": torch.bfloat16, "float": FLOAT, "int32_t": torch.int32, "int8_t": torch.int8}
DTYPES["uint8_t"] = torch.uint8
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.double)
CODES = torch.arange(256, dtype=torch.uint8)
# The number of each code.
VALUES = {
    "int2b_format": torch.tensor([0.0, 1, -2, -1], dtype=torch.double),
    "uint2b_format": torch.arange(4.0, dtype=torch.double),
    "int4b_format": torch.tensor([*range(8), *range(-8, 0)], dtype=torch.double),
    "uint4b_format": torch.arange(16.0, dtype=torch.double),
    "metal_fp4_e2m1_format": torch.cat([E2M1, -E2M1]),
    "metal_fp8_e4m3_format": CODES.view(torch.float8_e4m3fn).double(),
    "metal_fp8_e5m2_format": CODES.view(torch.float8_e5m2).double(),
}
INTEGERS, FLOATS = list(VALUES)[:4], list(VALUES)[4:]


def packed(codes, name):
    """The bytes of rows of codes, the first of a byte in its low bits."""
    bits = len(VALUES[name]).bit_length() - 1
    parts = codes.view(*codes.shape[:-1], -1, 8 // bits).int() << torch.arange(0, 8, bits)
    return parts.sum(-1).to(torch.uint8)


def random(rows, columns, name):
    """Numbers of a type, whose products half has: as bytes or elements, and as float64."""
    if name in VALUES:
        codes = torch.randint(len(VALUES[name]), (rows, columns))
        codes = torch.where(VALUES[name][codes].abs() <= 64, codes, 1)  # no NaN either
        return packed(codes, name), VALUES[name][codes]
    low, high = (0, 255) if name == "uint8_t" else (-128, 127)
    given = torch.randn(rows, columns) if DTYPES[name].is_floating_point else torch.randint(low, high, (rows, columns))
    return given.to(DTYPES[name]), given.to(DTYPES[name]).double()


def assert_near(found, exact, magnitude, terms):
    """Sums in float32 have a rounding for each term, and the result its own. Those of integers are exact."""
    if not found.dtype.is_floating_point:
        assert torch.equal(found.cpu().double(), exact)
        return
    eps = torch.finfo(FLOAT).eps * terms * magnitude + torch.finfo(found.dtype).eps * exact.abs()
    assert ((found.cpu().double() - exact).abs() <= eps).all()


# Formats ------------------------------------------------------------------------------------------------------------

M, N, K = 12, 20, 12
COMBINATIONS = [
    *((left, right, to) for right in INTEGERS for left in ("half", "bfloat") for to in (left, "float")),
    *(("uint8_t" if right[0] == "u" else "int8_t", right, "int32_t") for right in INTEGERS),
    *((left, right, to) for right in FLOATS for left in ("half", right) for to in ("half", "float")),
]


def test_every_combination_with_formats(device):
    """The 32 rows of Apple's table that have one."""
    assert len(COMBINATIONS) == 32
    calls = "\n".join(
        f"  if (which == {i}) one<{left}, {right}, {to}>(l, r, d, K);"
        for i, (left, right, to) in enumerate(COMBINATIONS)
    )
    lib = metalcore.compile_shader(
        HEAD
        + f"""
        template <class L, class R, class D>
        void one(device uchar* l, device uchar* r, device uchar* d, int K) {{
          using Rows = dextents<int, 2>;
          using Left = tensor<device L, Rows, tensor_inline>;
          const auto left = Left((typename Left::data_handle_type)l, Rows(K, {M}));
          tensor<device R, Rows, tensor_inline> right(r, Rows{{K, {N}}}, array<int, 2>{{1, K}});
          auto to = tensor<device D, Rows, tensor_inline>((device D*)d, Rows({N}, {M}));
          constexpr auto descriptor = matmul2d_descriptor({M}, {N}, dynamic_length_v<int>, false, true);
          matmul2d<descriptor, execution_simdgroup> op;
          op.run(left, right, to);
        }}
        kernel void all(device uchar* l, device uchar* r, device uchar* d, constant int& which, constant int& K) {{
        {calls}
        }}"""
    )
    for i, (left, right, to) in enumerate(COMBINATIONS):
        (x, a), (w, b) = random(M, K, left), random(N, K, right)
        result = torch.zeros(M, N, dtype=DTYPES[to], device=device)
        lib.all(*(t.to(device).view(torch.uint8) for t in (x, w)), result.view(torch.uint8), i, K, threads=32)
        assert_near(result, a @ b.T, a.abs() @ b.abs().T, K)


def test_every_code_of_formats(device):
    """Also from the middle of a byte on."""
    lines = "\n".join(
        f"  if (which == {i}) read<{name}>(codes, values, first, count);" for i, name in enumerate(VALUES)
    )
    lib = metalcore.compile_shader(
        HEAD
        + f"""
        template <class T>
        void read(device uchar* codes, device float* values, int first, int count) {{
          auto all = tensor<device T, dextents<int, 1>, tensor_inline>(codes, dextents<int, 1>(count));
          auto part = all.slice(first);
          for (int i = 0; i < part.get_extent(0); ++i) values[i] = float(part[i]);
        }}
        kernel void all(device uchar* codes, device float* values, constant int& which, constant int& first,
                        constant int& count) {{
        {lines}
        }}"""
    )
    for i, (name, values) in enumerate(VALUES.items()):
        codes = packed(torch.arange(len(values)), name).to(device)
        for first in (0, 1, 3):
            found = torch.zeros(len(values), device=device)
            lib.all(codes, found, i, first, len(values), threads=1)
            assert torch.equal(found[: len(values) - first].cpu().nan_to_num(7), values[first:].float().nan_to_num(7))


@pytest.mark.parametrize("name", ["metal_fp4_e2m1_format", "metal_fp8_e4m3_format"])
def test_scales(device, name):
    """A scale for each 32 numbers, of slices too."""
    rows, columns, terms = 40, 24, 96
    lib = metalcore.compile_shader(
        HEAD
        + f"""
        using Scales = tensor_blockwise<tensor_plane_scales, device metal_fp8_ue8m0_format, 32, 1>;
        using Scaled = tensor<device {name}, dextents<int, 2>, tensor_inline, Scales>;
        kernel void scaled(device uchar* x, device uchar* w, device uchar* x_scales, device uchar* w_scales,
                           device float* y, uint2 tile [[threadgroup_position_in_grid]]) {{
          auto plane = Scales(w_scales);
          auto a = Scaled(x, dextents<int, 2>{{{terms}, {rows}}}, array<int, 2>{{1, {terms}}}, Scales(x_scales));
          auto b = Scaled(w, dextents<int, 2>{{{terms}, {columns}}}, array<int, 2>{{1, {terms}}}, plane);
          auto c = tensor(y, dextents<int, 2>{{{columns}, {rows}}});
          constexpr auto descriptor = matmul2d_descriptor(16, 16, dynamic_length_v<int>, false, true);
          matmul2d<descriptor, execution_simdgroups<2>> op;
          auto left = a.slice(0, tile.y * 16);
          auto right = b.template slice<dynamic_extent, 8>(0, tile.x * 8);
          auto to = c.template slice<8, dynamic_extent>(tile.x * 8, tile.y * 16);
          op.run(left, right, to);
        }}"""
    )
    (x, a), (w, b) = random(rows, terms, name), random(columns, terms, name)
    scales = [torch.randint(120, 130, (n, terms // 32), dtype=torch.uint8) for n in (rows, columns)]
    a, b = (v * (2.0 ** (s.double() - 127)).repeat_interleave(32, 1) for v, s in zip((a, b), scales))
    result = torch.zeros(rows, columns, device=device)
    arguments = [t.to(device) for t in (x, w, *scales)]
    lib.scaled(*arguments, result, threads=(64 * columns // 8, -(-rows // 16)), group_size=(64, 1))
    assert_near(result, a @ b.T, a.abs() @ b.abs().T, terms)


def test_formats_as_arguments(device):
    """PyTorch has two of them as types, and bytes for small ones."""
    lib = metalcore.compile_shader(
        HEAD
        + """
        kernel void product(tensor<device metal_fp8_e4m3_format, dextents<int, 2>> a,
                            tensor<device metal_fp8_e4m3_format, dextents<int, 2>> b, device float* c) {
          auto to = tensor(c, dextents<int, 2>(b.get_extent(1), a.get_extent(1)));
          constexpr auto descriptor = matmul2d_descriptor(16, 16, dynamic_length_v<int>, false, true);
          matmul2d<descriptor, execution_simdgroup> op;
          op.run(a, b, to);
        }
        kernel void small(tensor<device int4b_format, dextents<int, 2>> a, device int* c) {
          auto row = a.slice(0, 1);
          for (int i = 0; i < a.get_extent(0); ++i) c[i] = row[array<int, 2>{i, 0}];
        }"""
    )
    (x, a), (w, b) = (random(16, K, "metal_fp8_e4m3_format") for _ in range(2))
    found = torch.zeros(16, 16, device=device)
    lib.product(*(t.to(device).view(torch.float8_e4m3fn) for t in (x, w)), found, threads=32)
    assert_near(found, a @ b.T, a.abs() @ b.abs().T, K)
    (x, a), row = random(2, 6, "int4b_format"), torch.zeros(6, dtype=torch.int32, device=device)
    lib.small(x.to(device), row, threads=1)
    assert row.tolist() == a[1].tolist()
    with pytest.raises(RuntimeError, match="has elements of type int4b_format, and the tensor has torch.float32"):
        lib.small(found, row, threads=1)


# Convolutions -------------------------------------------------------------------------------------------------------

CONVOLUTIONS = """
template <typename T, typename D, typename S, bool held>
kernel void convolve(tensor<device T, dextents<int, 4>> x [[buffer(0)]],
                     tensor<device T, dextents<int, 4>> w [[buffer(1)]],
                     tensor<device D, dextents<int, 4>> y [[buffer(2)]], constant int& offset [[buffer(3)]],
                     uint2 tile [[threadgroup_position_in_grid]]) {
  constexpr auto descriptor = convolution2d_descriptor(
      int4(5, 4, 3, 2), int4(-1, 1 << 20, 16384, 1), int2(3, 2), convolution2d_activation_layout::nhwc,
      convolution2d_weights_layout::hwio, int2(2, 1), int2(1, 2), 1, false,
      convolution2d_descriptor::mode::multiply_accumulate);
  convolution2d<descriptor, execution_simdgroups<2>> op;
  op.set_offsets(int2(tile.x * 8 + offset, tile.y * 3 + offset));
  auto to = y.slice(0, tile.x * 4, tile.y * 3, 0);
  if constexpr (held) {
    auto sums = op.template get_destination_cooperative_tensor<decltype(x), decltype(w), S>();
    sums.load(to);
    op.run(x, w, sums);
    for (auto it = sums.begin(); it != sums.end(); ++it)
      if (it.is_valid_element()) *it += it.get_multidimensional_index()[0];
    sums.store(to);
  } else {
    op.run(x, w, to);
  }
}
#define CONVOLVE(name, T, D, held) template [[host_name(name)]] kernel void convolve<T, D, D, held>( \\
    tensor<device T, dextents<int, 4>>, tensor<device T, dextents<int, 4>>, tensor<device D, dextents<int, 4>>, \\
    constant int&, uint2);
CONVOLVE("half", half, half, false)
CONVOLVE("half_held", half, float, true)
CONVOLVE("bfloat", bfloat, bfloat, false)
CONVOLVE("float_held", float, float, true)
CONVOLVE("int8_t_held", int8_t, int32_t, true)
"""


@pytest.fixture(scope="module")
def convolutions(compiles_for_cuda):
    return metalcore.compile_shader(HEAD + CONVOLUTIONS)


@pytest.mark.parametrize("padded", [0, 1], ids=["inside", "padded"])
@pytest.mark.parametrize("name, to", [
    ("half", "half"), ("half_held", "float"), ("bfloat", "bfloat"), ("float_held", "float"), ("int8_t_held", "int32_t")
])  # fmt: skip
def test_convolutions(convolutions, device, name, to, padded):
    """With offsets of 0 the window's middle is at the first pixel: (3 - 1 + 1) / 2 and (2 (2 - 1) + 1) / 2 are 1."""
    T = DTYPES[name.removesuffix("_held")]
    x, w = torch.randn(2, 7, 11, 5), torch.randn(2, 3, 5, 6)
    x, w = (t.mul(40).to(T) if torch.int8 == T else t.to(T) for t in (x, w))
    out = F.conv2d(*(F.pad(x.double().permute(0, 3, 1, 2), [padded] * 4), w.double().permute(3, 2, 0, 1)),
                   stride=(1, 2), dilation=(2, 1)).permute(0, 2, 3, 1)  # fmt: skip
    size = F.conv2d(*(F.pad(x.double().abs().permute(0, 3, 1, 2), [padded] * 4), w.double().abs().permute(3, 2, 0, 1)),
                    stride=(1, 2), dilation=(2, 1)).permute(0, 2, 3, 1)  # fmt: skip
    result = torch.ones(out.shape, dtype=DTYPES[to], device=device)
    tiles = -(-out.shape[2] // 4), -(-out.shape[1] // 3)
    getattr(convolutions, name)(
        x.to(device), w.to(device), result, 1 - padded, threads=(64 * tiles[0], tiles[1]), group_size=(64, 1)
    )
    exact = out + 1 + (torch.arange(6) % 5 if name.endswith("held") else 0)
    exact[..., 5:] = 1  # the descriptor has 5 channels
    assert_near(result, exact, size + 7, 32)


@pytest.mark.parametrize(
    "body, message",
    [
        (
            """convolution2d<convolution2d_descriptor(int4(4), int4(4), int2(3), {}, {}, int2(1), int2(1), 2),
            execution_simdgroup> op; (void)op;""",
            "groups of 1",
        ),
        (
            """convolution2d<convolution2d_descriptor(int4(4), int4(4), int2(3)), execution_thread> op; (void)op;""",
            "of a whole threadgroup",
        ),
        (
            """tensor<device int4b_format, extents<int, 16, 16>, tensor_inline> a((device uchar*)h,
            extents<int, 16, 16>());
            matmul2d<matmul2d_descriptor(16, 16), execution_simdgroup> op; op.run(a, a, a);""",
            "does not multiply",
        ),
        (
            """tensor_blockwise<tensor_plane_scales, device metal_fp8_ue8m0_format, 16, 1> s((device uchar*)h);
            (void)s;""",
            "32 by 1 numbers",
        ),
    ],
    ids=["groups", "scope", "types", "scales"],
)
def test_what_is_wrong_is_named(body, message):
    with pytest.raises(MSLError, match=message):
        metalcore.compile_shader(HEAD + f"kernel void k(device half* h) {{ {body} }}")


@pytest.mark.only_on("simulator")
def test_checking_mode_finds_what_a_convolution_needs(device):
    """Sums that nothing has written, and simdgroups of which one does not come."""
    lib = metalcore.compile_shader(
        HEAD
        + """
        kernel void k(device half* x, constant int& which, uint simd [[simdgroup_index_in_threadgroup]]) {
          auto t = tensor(x, extents<int, 4, 4, 4, 1>());
          constexpr auto descriptor = convolution2d_descriptor(
              int4(4, 4, 4, 1), int4(4, 4, 4, 1), int2(1, 1), convolution2d_activation_layout::nhwc,
              convolution2d_weights_layout::hwio, int2(1, 1), int2(1, 1), 1, false,
              convolution2d_descriptor::mode::multiply_accumulate);
          convolution2d<descriptor, execution_simdgroups<2>> op;
          auto sums = op.get_destination_cooperative_tensor<decltype(t), decltype(t), float>();
          if (which == 0) op.run(t, t, sums);
          if (which == 1 && simd == 0) op.run(t, t, t);
        }"""
    )
    x = torch.zeros(64, dtype=HALF, device=device)

    def run(which):
        lib.k(x, which, threads=64, group_size=64)
        x.cpu()  # waits

    for which, kind in enumerate(("unwritten element", "divergent barrier")):
        with metalcore.simulator.checking(1), pytest.raises(metalcore.simulator.KernelError, match=kind):
            run(which)


@needs_clang
def test_the_check_takes_convolutions_and_formats():
    source = HEAD + CONVOLUTIONS + "kernel void k(tensor<device uint4b_format, dextents<int, 2>> a [[buffer(0)]]) {}"
    findings = check(source, std="metal4.0", strict=False)
    assert not findings, "\n".join(map(str, findings))


@needs_clang
@pytest.mark.parametrize(
    "name, std, needs",
    [
        ("uint4b_format", "metal3.2", "new in MSL 4.0, and on a Mac in macOS 26.4"),
        ("int2b_format", "metal4.0", "new in MSL 4.1, and on a Mac in macOS 27"),
        ("metal_fp8_e4m3_format", "metal4.0", "new in MSL 4.1, and on a Mac in macOS 27"),
        ("metal_fp8_e4m3_format", "metal4.1", None),
    ],
)
def test_the_check_knows_since_when_formats_are(name, std, needs):
    findings = check(HEAD + f"kernel void k(tensor<device {name}, dextents<int, 2>> a [[buffer(0)]]) {{}}", std=std)
    assert any(needs in finding.message for finding in findings) if needs else not findings


@pytest.mark.parametrize(
    "body",
    [
        "x[0] = unpack<float>(packed_metal_fp8_e4m3<4>(packed_uchar4(y[0], 0, 0, 0)))[0];",
        "y[0] = pack<metal::metal_fp8_e4m3_format>(float4(x[0])).as_storage_type()[0];",
    ],
)
def test_packing_small_floats_is_refused(body):
    with pytest.raises(MSLError, match="of MSL 4.1 is not supported: public sources disagree"):
        metalcore.compile_shader(HEAD + f"kernel void k(device float* x, device uchar* y) {{ {body} }}")
