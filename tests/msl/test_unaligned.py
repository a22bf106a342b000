"""Reads and writes through pointers that were cast from smaller types, at any misalignment and in every address
space."""

import numpy
import pytest
import torch

import metalcore

HEADER = """#include <metal_stdlib>
using namespace metal;
struct Bytes16 { uchar bytes[16]; };
struct Bytes32 { uchar bytes[32]; };
struct Bytes40 { uchar bytes[40]; };
"""
# type: (NumPy's, elements, bytes)
TYPES = {
    "ushort": ("u2", 1, 2), "half": ("f2", 1, 2), "uint": ("u4", 1, 4), "float": ("f4", 1, 4), "ulong": ("u8", 1, 8),
    "half4": ("f2", 4, 8), "float2": ("f4", 2, 8), "float3": ("f4", 3, 16), "float4": ("f4", 4, 16),
    "half2x4": ("f2", 8, 16), "float2x4": ("f4", 8, 32), "packed_float3": ("f4", 3, 12),
    "Bytes16": ("u1", 16, 16), "Bytes32": ("u1", 32, 32), "Bytes40": ("u1", 40, 40),
}  # fmt: skip
MOVES = HEADER + """
template <typename T>
kernel void copy(device const uchar* x, device uchar* y, constant uint& from, constant uint& to,
                 uint i [[thread_position_in_grid]]) {
  device const T* source = (device const T*)(x + from);
  device T* target = reinterpret_cast<device T*>(y + to);
  const T value = source[i];
  target[i] = value;
}
template <typename T>
kernel void fixed(constant uchar* x, device uchar* y, constant uint& from, constant uint&,
                  uint i [[thread_position_in_grid]]) {
  ((device T*)y)[i] = *((constant T*)(x + from) + i);
}
template <typename T>
kernel void shared(device const uchar* x, device uchar* y, constant uint& from, constant uint& to,
                   threadgroup uchar* memory [[threadgroup(0)]], uint i [[thread_position_in_grid]],
                   uint n [[threads_per_threadgroup]]) {
  *((threadgroup T*)(memory + to) + i) = *(device const T*)(x + from + i * sizeof(T));
  threadgroup_barrier(mem_flags::mem_threadgroup);
  threadgroup const T* mine = (threadgroup const T*)(memory + to);
  ((device T*)y)[i] = mine[n - 1 - i];
}
""" + "".join(f"""template [[host_name("{kernel}_{name}")]] kernel void {kernel}<{name}>(
    {space} const uchar*, device uchar*, constant uint&, constant uint&,{more} uint{", uint" if more else ""});
""" for name in TYPES for kernel, space, more in (
    ("copy", "device", ""), ("fixed", "constant", ""), ("shared", "device", " threadgroup uchar*,")))  # fmt: skip
# The type of `fixed` has no const of its own.
MOVES = MOVES.replace("constant const uchar*", "constant uchar*")


@pytest.fixture(scope="module")
def library(compiles_for_cuda):
    return metalcore.compile_shader(MOVES)


def elements(name, content, start, count):
    """[count, elements] of what lies at a byte offset."""
    dtype, length, size = TYPES[name]
    whole = numpy.frombuffer(content, numpy.uint8, count * size, start).reshape(count, size)
    return whole[:, : length * numpy.dtype(dtype).itemsize].copy().view(dtype)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("kernel", ["copy", "fixed", "shared"])
def test_moves(library, device, kernel, name):
    dtype, length, size = TYPES[name]
    content = numpy.random.default_rng(0).integers(0, 60, 8 * size + 16, dtype=numpy.uint8)  # no NaN in any type
    x = torch.from_numpy(content).to(device)
    for start, target in [(0, 0), (1, 0), (2, 4), (4, 2), (3, 1), (8, 16), (12, 12), (16, 3)]:
        y = torch.zeros(8 * size + 32, dtype=torch.uint8, device=device)
        memory = 8 * size + 32 if kernel == "shared" else ()
        getattr(library, f"{kernel}_{name}")(
            x, y, start, target, threads=8, group_size=8, threadgroup_memory=memory, arg_casts={2: "int32", 3: "int32"}
        )
        at = target if kernel == "copy" else 0
        wanted, result = elements(name, content, start, 8), y.cpu().numpy()
        found = elements(name, result, at, 8)
        numpy.testing.assert_array_equal(found, wanted[::-1] if kernel == "shared" else wanted)
        if length * numpy.dtype(dtype).itemsize == size:  # nothing beside it is written to
            assert not result[:at].any() and not result[at + 8 * size :].any()


FORMS = (
    HEADER
    + """
struct Block { half scale; uchar high[4]; uchar low[16]; };  // 22 bytes
struct Rows {
  device const float4* at;
  Rows(device const float* x, uint i) : at((device const float4*)(x + i)) {}
  float4 operator()(uint i) const { return at[i]; }
};
template <typename T> T second(device const T* p) {
  device const vec<float, 4>* q = (device const vec<float, 4>*)p;
  return p > q ? p[0] : (*q, *(q + 1));
}
float sum_of(device const float4* v, uint n) {
  float4 sum = 0;
  for (uint i = 0; i < n; ++i) sum += v[i];
  return sum.x + sum.y + sum.z + sum.w;
}
device float2* pair_at(device float* x, uint i) { return (device float2*)(x + i); }
void twice(device float& x) { x *= 2; }
template <typename T> T read(T value) { return value; }  // whatever a program's own functions are called
float4 write(thread float4& value, int i) { return value[i]; }
using Pairs = device float2*;

kernel void blocks(device const Block* b, device float* y, uint i [[thread_position_in_grid]]) {
  const uint high = *((device const uint*)b[i].high);
  device const ushort* low = (device const ushort*)b[i].low;
  device const uint* words = (device const uint*)b[i].low;
  uint sum = 0;
  for (uint k = 0; k < 8; ++k) sum += low[k] & 0xff;
  y[3 * i] = float(b[i].scale) * float(high >> 24);
  y[3 * i + 1] = float(sum);
  y[3 * i + 2] = float(words[2] % 1000);
}
kernel void flows(device const float* x, device float* y, constant uint& at) {
  Rows rows(x, at);
  device const float4* v = (device const float4*)(x + at);
  device float4* out = (device float4*)(y + at);
  out[0] = rows(1) * 2;
  out[1] = v[0];
  out[1] += read(second(v));
  out[2].x = sum_of(v, 3);
  out[2].yz = v[2].zw;
  out[2].w = v->x + v->y + v->z + v->w;
  out[3].x = 1, out[3].y = 2, out[3].z = 3, out[3].w = 4;
  (out + 3)->x += 1, (*(out + 3)).y += 1, (*(out + 3))[2] += 1;
  Pairs p = pair_at(y, at + 16);
  p[0] = float2(v[3].x, 1);
  *++p = float2(5, 6);
  twice(((device float*)p)[1]);
  p[1] = pair_at(y, at + 16)[1] - 1;
  device float2* h = p + 1;
  const float low = at > 9 ? h[0].x : (h + 0)->y > 0 ? (h[0]).x : 2.0f;
  p[1].x = low > 3 ? low : (*h).y;
  device float2& last = p[2];
  *((device float*)&last) = 7;
  device float* tail = (device float*)((device uchar*)y + 4 * (at + 24) + 2);
  *tail++ = 1.5f;
  tail[0] = tail[-1] * 2;
}
"""
)


@pytest.fixture(scope="module")
def forms(compiles_for_cuda):
    return metalcore.compile_shader(FORMS)


def test_blocks_of_22_bytes(forms, device):
    generator = numpy.random.default_rng(1)
    content = generator.integers(0, 60, 22 * 9, dtype=numpy.uint8)
    y = torch.zeros(27, device=device)
    forms.blocks(torch.from_numpy(content).to(device), y, threads=9, group_size=9)
    expected = []
    for block in content.reshape(9, 22):
        scale, low = block[:2].view(numpy.float16)[0], block[6:]
        expected += [
            numpy.float32(scale) * block[5],
            int(low[::2].astype(int).sum()),
            int.from_bytes(low[8:12].tobytes(), "little") % 1000,
        ]
    numpy.testing.assert_allclose(y.cpu().numpy(), numpy.array(expected, numpy.float32), rtol=1e-6)


@pytest.mark.parametrize("at", range(5))
def test_how_pointers_go_through_a_program(forms, device, at):
    x = torch.arange(32.0)
    y = torch.zeros(44, device=device)
    forms.flows(x.to(device), y, at, threads=1, group_size=1, arg_casts={2: "int32"})
    v = x[at : at + 16].view(4, 4)
    out = torch.zeros(44)
    out[at : at + 4] = v[1] * 2
    out[at + 4 : at + 8] = v[0] + v[1]
    out[at + 8 : at + 12] = torch.stack([v[:3].sum(), v[2, 2], v[2, 3], v[0].sum()])
    out[at + 12 : at + 16] = torch.tensor([2.0, 3, 4, 4])
    out[at + 16 : at + 23] = torch.tensor([float(v[3, 0]), 1, 5, 12, 4, 11, 7])
    content = bytearray(out.numpy().tobytes())
    content[4 * (at + 24) + 2 : 4 * (at + 26) + 2] = numpy.array([1.5, 3], numpy.float32).tobytes()
    assert bytes(y.cpu().numpy().tobytes()) == bytes(content)


def test_rows_of_37_columns(compiles_for_cuda, device):
    """A tile is stored by float4 to rows that begin at multiples of 148 bytes."""
    library = metalcore.compile_shader(
        HEADER
        + """
    kernel void store(device const float* x, device char* y, constant ulong& pitch,
                      uint2 at [[thread_position_in_grid]]) {
      threadgroup float tile[8 * 36 + 1];
      threadgroup float4* row = (threadgroup float4*)(tile + 1 + 36 * at.y);
      device const float4* from = (device const float4*)(x + 37 * at.y);
      row[at.x] = from[at.x] * 2.0f;
      threadgroup_barrier(mem_flags::mem_threadgroup);
      device float4* to = (device float4*)(y + pitch * at.y);
      to[at.x] = row[at.x];
    }"""
    )
    x, y = torch.randn(8, 37, device=device), torch.zeros(8, 37, device=device)
    library.store(x, y, 148, threads=(9, 8), group_size=(9, 8))
    torch.testing.assert_close(y[:, :36], x[:, :36] * 2, rtol=0, atol=0)
    assert not y[:, 36].any()
