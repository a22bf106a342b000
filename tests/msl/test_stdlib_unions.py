"""half, bfloat and vectors behave in unions and anonymous structs as anywhere else."""

import numpy as np
import pytest
import torch

import metalcore

pytestmark = pytest.mark.usefixtures("compiles_for_cuda")
HEADER = """
    #include <metal_stdlib>
    using namespace metal;
    typedef half number;
    struct Block { union { struct { half d; number m; }; half2 dm; ushort bits[2]; }; uchar scales[4]; };
    typedef struct {
      __extension__ union { struct { bfloat d, m; }; bfloat2 dm; uint word; };
      packed_half3 p;
    } Brain;
    float which(half) { return 1; }
    float which(float) { return 2; }
    float which(bfloat) { return 3; }
    template <typename T> float kind_of(T) { return is_same_v<T, half> ? 1 : is_same_v<T, bfloat> ? 3 : 2; }
    template <typename T> float kind_of_both(T, T) { return kind_of(T()); }
    void put(thread half& target, half value) { target = value; }
"""
D, M = np.float16(0.02057), np.float16(1.5)  # as bfloat, 1.5 is the same and d is another number
H = np.float16


def run(device, body, count, block=(D, M), header=HEADER):
    """The values that one thread writes to out[0 .. count), from a Block and a Brain with these numbers."""
    library = metalcore.compile_shader(
        header + "kernel void k(device float* out, device const Block* b, "
        "device const Brain* c, device Block* w) {" + body + "}"
    )
    out = torch.zeros(count, device=device)
    numbers = torch.tensor([*block, 0, 0, 0, 0], dtype=torch.float32)
    written = torch.zeros(4, dtype=torch.float16, device=device)
    library.k(out, numbers.half().to(device), numbers.bfloat16().to(device), written, threads=1)
    return out.tolist(), written.tolist()


def check(device, terms, body="", **options):
    """terms: MSL expressions and their values."""
    body += "".join(f"out[{i}] = {term};\n" for i, term in enumerate(terms))
    got, _ = run(device, body, len(terms), **options)
    assert dict(zip(terms, got)) == {term: float(value) for term, value in terms.items()}


def brain(value):
    return float(torch.tensor(float(value)).bfloat16())


def test_arithmetic_is_that_of_half(device):
    check(device, {
        "b->d / 16.h": D / H(16), "b->d * b->m": D * M, "b->d - b->m": D - M, "b->d / 3": D / H(3),
        "b->d + 1.0f": np.float32(D) + np.float32(1), "7 - b->m": 5.5, "-b->d": -D, "+b->d": D, "!b->d": 0,
        "b->d < b->m": 1, "b->m == 1.5h": 1, "b->d >= 1": 0, "b->d != b->d": 0, "b->d && b->m": 1,
        "max(b->d, b->m)": M, "min(b->d, 0.5h)": D, "clamp(b->d, 0.h, 0.01h)": H(0.01), "abs(-b->d)": D,
        "sqrt(b->d)": np.sqrt(D), "fma(b->d, b->m, b->m)": H(float(D) * 1.5 + 1.5), "select(b->d, b->m, true)": M,
        "b->d ? b->d : 2.h": D, "b->m > 1 ? b->d : 2.0f": D, "b->m > 2 ? 3.0f : b->d": D, "b->m > 1 ? b->d : b->m": D,
        "(b->dm * b->d).x": D * D, "(b->d * half4(1, 2, 3, 4)).z": D * H(3), "(half2(b->d) + b->dm).y": D + M,
        "half4(b->d, b->m, b->dm).w": M, "float2(b->d, 1).x": D, "dot(half2(b->d, b->m), half2(0, 1))": M,
        "float(b->d)": D, "int(b->m)": 1, "bool(b->d)": 1, "half(b->d)": D, "float(bfloat(b->d))": brain(D),
        "as_type<ushort>(b->d)": int(D.view(np.uint16)), "as_type<half>(b->bits[1])": M,
        "simd_sum(b->m)": M, "simd_shuffle_xor(b->d, 0)": D,
    })  # fmt: skip


def test_bfloat(device):
    d = brain(D)
    check(device, {
        "c->d * c->m": brain(d * 1.5), "c->d / 3": brain(d / 3), "c->d * b->m": np.float32(d) * np.float32(1.5),
        "c->m > 1 ? c->d : 2.0bf": d, "max(c->d, c->m)": M, "(c->dm * c->d).y": brain(d * 1.5),
        "float(half(c->d))": H(d), "c->word >> 16": 0x3FC0,
    })  # fmt: skip


def test_overloads_and_templates_see_half(device):
    check(device, {
        "which(b->d)": 1, "which(c->d)": 3, "which(b->d * 2.0f)": 2, "which(b->d * 2)": 1, "which(b->d * c->d)": 2,
        "kind_of(b->d)": 1, "kind_of(c->d)": 3, "kind_of_both(b->m, 2.h)": 1, "which(copy)": 1,
        "copy / 16.h": D / H(16), "is_same_v<decltype(t.d), half>": 1, "kind_of(t.d += 1)": 1,
    }, "auto copy = b->d; Block t;")  # fmt: skip


def test_assignments_references_and_pointers(device):
    got, written = run(
        device,
        """
        Block t; t.d = b->d; t.m = 1; t.m += t.d; t.m *= 3; t.d -= 0.25f; ++t.d;
        out[0] = t.m; out[1] = t.d;
        thread half& r = t.d; r = 2.5h; put(t.m, 3.25h);
        out[2] = t.d; out[3] = t.dm.y;
        thread half* p = &t.d; p[1] = p[0] * 2;
        out[4] = t.m;
        device half* q = &w->m; *q = 7; q[-1] = b->d;
        w[0].scales[0] = uchar(b->m); w->scales[2] = 0;
        struct Block again = *w; out[5] = again.d;
        Block lit = {{{1.h, 2.h}}, {1, 2, 3, 4}}, flat[2] = {1.h, 2.h, 1, 2, 3, 4, 5.h};
        out[6] = lit.dm.y + lit.scales[3]; out[7] = flat[1].d;
        """,
        8,
    )
    assert got == [(D + H(1)) * H(3), D - H(0.25) + H(1), 2.5, 3.25, 5, D, 6, 5]
    assert written[:2] == [D, 7]


def test_where_such_structs_may_stand(device):
    """They may stand in classes, templates and functions, with vectors, matrices, arrays and packed types as
    members."""
    header = (
        HEADER
        + """
        template <typename T> struct Both {
          union { struct { T d; half m; }; uint word; };
          half scaled() const { return m / 16.h; }
        };
        struct Wide {
          struct { half2 a; float3 b; packed_float3 c; half2x2 e; half many[3]; struct { half inner; } deep; };
          int tail;
          Wide() : tail(3) {}
        };
        struct Outer { struct Inner { union { struct { half a, b; }; uint word; }; }; Inner inner; };
        namespace space { struct Plain { union { struct { float x, y; }; float2 v; }; }; }
    """
    )
    check(device, {
        "first.scaled()": D / H(16), "second.scaled()": D / H(16), "wide.a.y + wide.b.z + wide.c.x": 8,
        "wide.e[1][1] + wide.tail": 5, "wide.many[1] / 16.h": D / H(16), "wide.deep.inner / 16.h": D / H(16),
        "o.inner.a + o.inner.b": 3, "local.hi * 2 + local.lo": 5, "which(local.hi)": 1, "l.x + l.y": 4,
        "also.h / 16.h": D / H(16), "plain.v.y": 2, "sizeof(Block)": 8, "sizeof(Brain)": 12, "sizeof(Wide)": 80,
        "sizeof(local) + alignof(Outer)": 8,
    }, """
        Both<half> first; first.m = b->d;
        Both<bfloat> second; second.m = b->d;
        Wide wide; wide.a = half2(1, 2); wide.b = float3(1, 2, 3); wide.c = float3(3, 2, 1); wide.e = half2x2(2.h);
        wide.many[1] = wide.deep.inner = b->d;
        Outer o; o.inner.word = 0x40003c00;
        union { struct { half lo, hi; }; uint word; half2 v; } local;
        local.word = 0x40003c00u;
        const struct L { union { struct { bfloat x; half y; }; uint word; }; } l = {{{1.5bf, 2.5h}}};
        typedef union { struct { half h; }; ushort u; } Also;
        Also also; also.h = b->d;
        space::Plain plain; plain.x = 1; plain.y = 2;
    """, header=header)  # fmt: skip


def test_blocks_of_a_quantized_format(device):
    """Blocks have two half scales, which are also a vector: 4-bit numbers with 6-bit scales and minima."""
    library = metalcore.compile_shader(
        HEADER
        + """
        struct Quantized { union { struct { half d; half dmin; }; half2 dm; }; uchar scales[8], minima[8], qs[128]; };
        kernel void decode(device const Quantized* blocks, device float* out, uint i [[thread_position_in_grid]]) {
          device const Quantized* block = blocks + i / 256;
          const uint at = i % 256, j = at / 32;
          const float d = j & 1 ? block->d / 16.h : block->d, dmin = block->dmin;
          const uchar q = block->qs[j / 2 * 32 + at % 32];
          out[i] = d * block->scales[j] * (j & 1 ? q & 0xf0 : q & 0x0f) - dmin * block->minima[j];
        }"""
    )
    rng, count = np.random.default_rng(0), 20
    d, dmin = (rng.random((2, count)) * 1e-2).astype(np.float16)
    scales, minima = rng.integers(0, 64, (2, count, 8), dtype=np.uint8)
    qs = rng.integers(0, 256, (count, 128), dtype=np.uint8)
    blocks = np.concatenate([np.stack([d, dmin], 1).view(np.uint8), scales, minima, qs], 1)
    out = torch.zeros(count, 256, device=device)
    library.decode(torch.from_numpy(blocks).to(device), out, threads=256 * count)
    q = qs.reshape(count, 4, 1, 32) & np.array([0x0F, 0xF0])[:, None]
    wide = np.stack([d, d / H(16)], 1)[:, None] * np.ones((count, 4, 2))
    expected = (wide.reshape(count, 8) * scales)[..., None] * q.reshape(count, 8, 32)
    expected -= (dmin[:, None] * minima.astype(np.float64))[..., None]
    np.testing.assert_allclose(out.cpu().numpy().reshape(expected.shape), expected, rtol=1e-6, atol=1e-7)
