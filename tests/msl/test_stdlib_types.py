"""Scalar, vector, packed and matrix types: sizes, constructors, conversions, operators, half and bfloat."""

import numpy as np
import pytest
import torch

import metalcore
from metalcore.msl.errors import MSLError

pytestmark = pytest.mark.usefixtures("compiles_for_cuda")
HEADER = "#include <metal_stdlib>\nusing namespace metal;\n"


ELEMENTS = {torch.float32: "float", torch.int32: "int"}


def run(device, body, count, dtype=torch.float32):
    """The values that one thread writes to out[0 .. count)."""
    library = metalcore.compile_shader(HEADER + "kernel void k(device " + ELEMENTS[dtype] + "* out) {" + body + "}")
    out = torch.zeros(count, dtype=dtype, device=device)
    library.k(out, threads=1)
    return out.tolist()


SIZES = {"bool": 1, "char": 1, "uchar": 1, "short": 2, "ushort": 2, "half": 2, "bfloat": 2, "int": 4, "uint": 4,
         "float": 4, "long": 8, "ulong": 8}  # fmt: skip


def test_sizes_and_alignments(device):
    expected, terms = [], []
    for name, size in SIZES.items():
        for n in (2, 3, 4):
            room = size * (4 if n == 3 else n)
            expected += [room, room, size * n, size]
            terms += [f"{what}({kind}{name}{n})" for kind in ("", "packed_") for what in ("sizeof", "alignof")]
    for columns in (2, 3, 4):
        for rows in (2, 3, 4):
            expected.append(4 * columns * (4 if rows == 3 else rows))
            terms.append(f"sizeof(float{columns}x{rows})")
    body = "".join(f"out[{i}] = {term};" for i, term in enumerate(terms))
    assert run(device, body, len(terms), dtype=torch.int32) == expected


def test_chains_of_conditionals_mix_types(device):
    body = """
        half h = 1.5h; bfloat b = 2.5bf; int n = 3;
        for (int i = 0; i < 4; ++i) {
          out[i] = i == 0 ? h : i == 1 ? b : i == 2 ? n : 4.5f;
          out[4 + i] = i < 2 ? i == 0 ? h : 2.5f : i == 2 ? b : 1.5f;
          out[8 + i] = (i == 0 ? n : i == 1 ? h : 1.5f) + (i < 3 ? i == 1 ? b : b : n);
        }
    """
    assert run(device, body, 12) == [1.5, 2.5, 3, 4.5, 1.5, 2.5, 2.5, 1.5, 5.5, 4, 4, 4.5]


@pytest.mark.parametrize("vector", [
    "float4(1, 2, 3)", "metal::half3(1, x[0])", "vec<float, 4>(1, float2(2))", "V(1, 2)", "packed_float3(1, 2)",
    "v; float4 w(1, 2, 3); w",
])  # fmt: skip
def test_too_few_components(vector, device):
    with pytest.raises(MSLError, match="program_source:5:.*too few components for this vector"):
        metalcore.compile_shader(f"""#include <metal_stdlib>
using namespace metal; typedef float4 V;
kernel void k(device float* x) {{
  float4 v = {{1, 2, 3}};
  x[0] = {vector}.x;
}}""")


def test_constructors(device):
    body = """
        float2 a(1, 2);
        float3 b(a, 3);
        float4 c = float4(0.0f, a, 5.0f), d = float4(a, a), e = {1, 2, 3, 4}, f = 7, g = float4(b, 9);
        float4 h = float4(0, b), z = {};
        int4 whole = int4(float4(1.9f, -1.9f, 2.5f, 0.5f));
        half4 small = half4(float4(1.0f / 3));
        float4 v[11] = {float4(b, 0), c, d, e, f, g, h, z, float4(whole), float4(small), float4(packed_float3(b), 8)};
        for (int i = 0; i < 11; ++i)
          for (int j = 0; j < 4; ++j) out[4 * i + j] = v[i][j];
    """
    third = float(np.float16(1 / 3))
    assert run(device, body, 44) == [
        *(1, 2, 3, 0), *(0, 1, 2, 5), *(1, 2, 1, 2), *(1, 2, 3, 4), *(7, 7, 7, 7), *(1, 2, 3, 9), *(0, 1, 2, 3),
        *(0, 0, 0, 0), *(1, -1, 2, 0), *[third] * 4, *(1, 2, 3, 8),
    ]  # fmt: skip


def test_operators_and_swizzles(device):
    body = """
        float4 v(1, 2, 3, 4);
        v.xy = v.yx;
        v.zw *= 2;
        v.wzyx += float4(0, 0, 10, 0);
        out[0] = v.x; out[1] = v.g; out[2] = v.b; out[3] = v.w;
        float3 w = 2 - v.wyz / float3(2) * 0.5f;
        out[4] = w.x; out[5] = w.y; out[6] = w.z;
        int3 i = int3(7, -7, 9) % 4 << 1;
        out[7] = i.x; out[8] = i.y; out[9] = i.z;
        bool4 c = v > 5 && !(v == 11.0f);
        out[10] = all(c) + 2 * any(c) + 4 * c.z + 8 * c.y;
        uchar2 u = uchar2(250, 3) + uchar2(10);
        out[11] = u.x; out[12] = u.y;
        i.yz = ~i.xy;
        ++i;
        out[13] = i.y + (-i).z;
        packed_float3 p = float3(1, 2, 3);
        p += v.xyz;
        p.z -= 1;
        out[14] = dot(p, float3(1)) + (p * 2).x + p[1];
        device float4* as_vectors = reinterpret_cast<device float4*>(out + 16);
        as_vectors[0].xz = float2(3, 4);
        as_vectors->yw = v.xx;
        out[15] = select(v, -v, c).z;
    """
    got = run(device, body, 20)
    # v = (2, 11, 6, 8); w = 2 - (8, 11, 6) / 4; i = (3, -3, 1) << 1 = (6, -6, 2)
    assert got[:4] == [2, 11, 6, 8]
    assert got[4:7] == [0, -0.75, 0.5]
    assert got[7:10] == [6, -6, 2]
    assert got[10] == 2 + 4
    assert got[11:13] == [4, 13]
    assert got[13] == -6 - 6  # i = (6, ~6, ~-6) + 1 = (7, -6, 6)
    assert got[14] == (3 + 13 + 8) + 6 + 13
    assert got[15] == -6
    assert got[16:] == [3, 2, 4, 2]


def test_qualifiers_that_stand_twice(device):
    """Clang warns about them alone, also where an address space stands between them."""
    library = metalcore.compile_shader("""
        #include <metal_stdlib>
        using namespace metal;
        kernel void twice(const device const float* x, device float* out, const constant const int& n,
                          uint i [[thread_position_in_grid]]) {
          const device const float* const device const * z = &x;
          const volatile const float w = 2;
          out[i] = (*z)[i] * w + n;
        }
    """)
    x = torch.arange(4.0, device=device)
    library.twice(x, out := torch.empty_like(x), 1)
    assert out.tolist() == [1, 3, 5, 7]


def test_vectors_of_more_elements(device):
    """Clang's ext_vector_type works wherever the attribute stands."""
    library = metalcore.compile_shader(
        HEADER
        + """
        typedef float float8 __attribute__((ext_vector_type(8)));
        typedef __attribute__((ext_vector_type(8))) int int8;
        using half8 = half __attribute__((ext_vector_type(8)));
        kernel void k(device float8* out) {
          float8 v = {1, 2, 3, 4, 5, 6, 7, 8};
          v = v * 2 + float8(half8(0.5h));
          v[3] = int8(v)[7];
          *out = v;
        }"""
    )
    out = torch.empty(8, device=device)
    library.k(out, threads=1)
    assert out.tolist() == [2.5, 4.5, 6.5, 16, 10.5, 12.5, 14.5, 16.5]


def test_matrices(device):
    rng = np.random.default_rng(0)
    a, b, v = rng.integers(-3, 4, (4, 4)), rng.integers(-3, 4, (4, 4)), rng.integers(-3, 4, 4)
    columns = ", ".join(f"float4({', '.join(map(str, column))})" for column in a.T)
    elements = ", ".join(str(e) for column in b.T for e in column)
    body = f"""
        float4x4 a({columns}), b({elements}), products = a * b, t = transpose(a);
        float4 v({", ".join(map(str, v))}), av = a * v, va = v * a;
        float2x3 tall(float3(1, 2, 3), float3(4, 5, 6));
        float3 stretched = tall * float2(1, -1);
        half2x2 h = half2x2(float2x2(1, 2, 3, 4)) * half(2);
        for (int i = 0; i < 4; ++i) {{
          for (int j = 0; j < 4; ++j) {{
            out[4 * i + j] = products[j][i];
            out[16 + 4 * i + j] = t[j][i];
            out[32 + 4 * i + j] = (a + b * 2.0f - float4x4(1))[j][i];
          }}
          out[48 + i] = av[i];
          out[52 + i] = va[i];
        }}
        out[56] = determinant(a);
        out[57] = determinant(float3x3(2, 0, 1, 1, 3, 2, 1, 1, 1));
        out[58] = determinant(float2x2(1, 2, 3, 4)) + h[1][0];
        out[59] = stretched.x + 10 * stretched.y + 100 * stretched.z;
    """
    got = np.array(run(device, body, 60))
    np.testing.assert_array_equal(got[:16].reshape(4, 4), a @ b)
    np.testing.assert_array_equal(got[16:32].reshape(4, 4), a.T)
    np.testing.assert_array_equal(got[32:48].reshape(4, 4), a + 2 * b - np.eye(4))
    np.testing.assert_array_equal(got[48:52], a @ v)
    np.testing.assert_array_equal(got[52:56], v @ a)
    assert got[56] == round(np.linalg.det(a))
    assert got[57:].tolist() == [0, -2 + 6, -3 - 30 - 300]


def test_geometry(device):
    body = """
        float3 a(1, 2, 2), b(0, 3, 4);
        out[0] = dot(a, b); out[1] = length(a); out[2] = distance(a, b); out[3] = length_squared(b);
        float3 c = cross(a, b);
        out[4] = c.x; out[5] = c.y; out[6] = c.z;
        float3 n = normalize(b);
        out[7] = n.y; out[8] = n.z;
        out[9] = reflect(float2(1, -1), float2(0, 1)).y;
        out[10] = faceforward(a, b, b).x;
        out[11] = dot(half4(100), half4(100));
        out[12] = refract(float2(0, -1), float2(0, 1), 0.5f).y;
    """
    got = run(device, body, 13)
    eps = np.finfo(np.float32).eps
    expected = [14, 3, np.sqrt(6), 25, 2, -4, 3, 0.6, 0.8, 1, -1, 40000, -1]
    np.testing.assert_allclose(got, expected, rtol=4 * eps)


SMALL = {torch.float16: "half", torch.bfloat16: "bfloat"}


@pytest.mark.parametrize("dtype", SMALL, ids=SMALL.get)
def test_small_float_conversions(device, dtype):
    """Every bit pattern converts to float, and many floats convert to nearest even, as in torch."""
    name = SMALL[dtype]
    library = metalcore.compile_shader(f"""{HEADER}
        kernel void widen(device const {name}* x, device float* y, uint i [[thread_position_in_grid]]) {{
          y[i] = x[i];
        }}
        kernel void narrow(device const float* x, device {name}* y, uint i [[thread_position_in_grid]]) {{
          y[i] = {name}(x[i]);
        }}
    """)
    x = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    y = torch.empty(len(x), device=device)
    library.widen(x.to(device), y)
    assert torch.equal(y.cpu().nan_to_num(7e7), x.float().nan_to_num(7e7))
    rng = np.random.default_rng(0)
    wide = torch.from_numpy(rng.integers(0, 1 << 32, 1_000_000, dtype=np.uint32).view(np.float32))
    # These are ties, halfway between neighbours, and one bit to either side.
    step = 13 if dtype == torch.float16 else 16
    ties = x.float().view(torch.int32) + (1 << (step - 1)) + torch.tensor([[-1], [0], [1]], dtype=torch.int32)
    wide = torch.cat([wide, ties.flatten().view(torch.float32)])
    narrow = torch.empty(len(wide), dtype=dtype, device=device)
    library.narrow(wide.to(device), narrow)
    assert torch.equal(narrow.cpu().nan_to_num(77.0), wide.to(dtype).nan_to_num(77.0))


@pytest.mark.parametrize("dtype", SMALL, ids=SMALL.get)
def test_small_float_arithmetic(device, dtype):
    """Each operation rounds once to the small type; with a float the result is float, with an integer small."""
    name = SMALL[dtype]
    library = metalcore.compile_shader(f"""{HEADER}
        kernel void k(device const {name}* x, device const {name}* y, device float* out,
                      uint i [[thread_position_in_grid]], uint n [[threads_per_grid]]) {{
          {name} a = x[i], b = y[i];
          out[i] = a + b;
          out[n + i] = a * b;
          out[2 * n + i] = a / b;
          out[3 * n + i] = a + b - b * 2;
          out[4 * n + i] = a * 3.0f + 1;
          a += b;
          a *= 0.3f;
          out[5 * n + i] = a;
          out[6 * n + i] = i % 2 ? x[i] : 0.0f;
          out[7 * n + i] = i % 2 ? b : 0;
          out[8 * n + i] = max(x[i], b) + abs(-b) + (x[i] < b) + (x[i] > 0);
          static_assert(is_same_v<decltype(a + b), {name}> && is_same_v<decltype(a + 1), {name}>);
          static_assert(is_same_v<decltype(1.0f * a), float>);
          static_assert(is_same_v<decltype(i % 2 ? a : 1.0f), float> && is_same_v<decltype(i % 2 ? a : b), {name}>);
          static_assert(numeric_limits<{name}>::is_specialized && is_floating_point_v<{name}>);
        }}""")
    x, y = torch.randn(4096).to(dtype), torch.randn(4096).to(dtype)
    out = torch.empty(9, 4096, device=device)
    library.k(x.to(device), y.to(device), out, threads=4096)
    odd = torch.arange(4096) % 2 == 1
    moved = ((x + y).float() * torch.tensor(0.3)).to(dtype)
    expected = [
        x + y, x * y, x / y, (x + y) - y * 2, x.float() * 3 + 1, moved, torch.where(odd, x, 0), torch.where(odd, y, 0),
        ((torch.maximum(x, y) + y.abs()) + (x < y).to(dtype)) + (x > 0).to(dtype),
    ]  # fmt: skip
    for row, wanted in zip(out.cpu(), expected):
        assert torch.equal(row, wanted.float())


def test_limits_and_constants(device):
    body = """
        out[0] = numeric_limits<float>::max() == FLT_MAX && numeric_limits<float>::infinity() == INFINITY;
        out[1] = numeric_limits<half>::max(); out[2] = float(HALF_MAX);
        out[3] = numeric_limits<half>::epsilon(); out[4] = numeric_limits<half>::min();
        out[5] = isnan(NAN) && isinf(-HUGE_VALF) && !isfinite(INFINITY) && isnormal(1.0h) && signbit(-0.0f);
        out[6] = M_PI_F; out[7] = float(M_PI_H);
        out[8] = numeric_limits<short>::lowest(); out[9] = numeric_limits<uchar>::max();
        out[10] = numeric_limits<int>::max() == INT_MAX && numeric_limits<ulong>::max() == ULONG_MAX;
        out[11] = numeric_limits<bfloat>::max() == as_type<bfloat>(ushort(0x7f7f));
    """
    got = run(device, body, 12)
    assert got == [
        1, 65504, 65504, 2.0**-10, 2.0**-14, 1, np.float32(np.pi), np.float32(np.float16(np.pi)), -32768, 255, 1, 1,
    ]  # fmt: skip


def test_packing(device):
    body = """
        float4 v = unpack_unorm4x8_to_float(0xff804000u);
        out[0] = v.x; out[1] = v.y * 255; out[2] = v.z * 255; out[3] = v.w;
        out[4] = unpack_snorm2x16_to_float(0x80007fffu).x; out[5] = unpack_snorm2x16_to_float(0x80007fffu).y;
        out[6] = pack_float_to_unorm4x8(float4(0, 1, 0.5f, 2)) == 0xff80ff00u;
        out[7] = pack_float_to_snorm4x8(float4(-1, 1, 0, -2)) == 0x81007f81u;
        out[8] = pack_float_to_unorm565(float3(1, 0, 1)) == 0xf81f;
        out[9] = as_type<float>(0x40490fdbu);
        out[10] = as_type<ushort2>(as_type<uint>(half2(1, -2))).y == 0xc000;
    """
    got = run(device, body, 11)
    np.testing.assert_allclose(got, [0, 64, 128, 1, 1, -1, 1, 1, 1, np.pi, 1], rtol=2e-7)
