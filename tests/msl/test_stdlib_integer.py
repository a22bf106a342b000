"""Integer functions of <metal_stdlib> against Python's integers."""

import numpy as np
import pytest
import torch

import metalcore

pytestmark = pytest.mark.usefixtures("compiles_for_cuda")
TYPES = {"char": np.int8, "uchar": np.uint8, "short": np.int16, "int": np.int32, "uint": np.uint32, "long": np.int64}
RNG = np.random.default_rng(0)


class Integer:
    """Arithmetic in one integer type."""

    def __init__(self, dtype):
        info = np.iinfo(dtype)
        self.bits, self.least, self.greatest = info.bits, int(info.min), int(info.max)

    def wrap(self, x):
        x &= (1 << self.bits) - 1
        return x - (1 << self.bits) if x > self.greatest else x

    def unsigned(self, x):
        return x & ((1 << self.bits) - 1)

    def saturate(self, x):
        return min(max(x, self.least), self.greatest)


FUNCTIONS = {
    "clz(x)": lambda t, x, y, z: t.bits - t.unsigned(x).bit_length(),
    "ctz(x)": lambda t, x, y, z: (t.unsigned(x) & -t.unsigned(x)).bit_length() - 1 if x else t.bits,
    "popcount(x)": lambda t, x, y, z: bin(t.unsigned(x)).count("1"),
    "reverse_bits(x)": lambda t, x, y, z: t.wrap(int(f"{t.unsigned(x):0{t.bits}b}"[::-1], 2)),
    "mulhi(x, y)": lambda t, x, y, z: (x * y) >> t.bits,
    "madhi(x, y, z)": lambda t, x, y, z: t.wrap(((x * y) >> t.bits) + z),
    "addsat(x, y)": lambda t, x, y, z: t.saturate(x + y),
    "subsat(x, y)": lambda t, x, y, z: t.saturate(x - y),
    "madsat(x, y, z)": lambda t, x, y, z: t.saturate(x * y + z),
    "hadd(x, y)": lambda t, x, y, z: (x + y) >> 1,
    "rhadd(x, y)": lambda t, x, y, z: (x + y + 1) >> 1,
    "absdiff(x, y)": lambda t, x, y, z: t.wrap(abs(x - y)),
    "abs(x)": lambda t, x, y, z: t.wrap(abs(x)),
    "rotate(x, y)": lambda t, x, y, z: t.wrap(t.unsigned(x) << (y % t.bits) | t.unsigned(x) >> (t.bits - y % t.bits)),
    "min(x, y)": lambda t, x, y, z: min(x, y),
    "max3(x, y, z)": lambda t, x, y, z: max(x, y, z),
    "median3(x, y, z)": lambda t, x, y, z: sorted((x, y, z))[1],
    "clamp(x, min(y, z), max(y, z))": lambda t, x, y, z: min(max(x, min(y, z)), max(y, z)),
    "extract_bits(x, 3u, 4u)": lambda t, x, y, z: extract(t, x, 3, 4),
    "extract_bits(x, 0u, 8u)": lambda t, x, y, z: extract(t, x, 0, 8),
    "insert_bits(x, y, 2u, 5u)": lambda t, x, y, z: t.wrap(t.unsigned(x) & ~(31 << 2) | (t.unsigned(y) & 31) << 2),
}


def extract(t, x, offset, bits):
    field = (t.unsigned(x) >> offset) & ((1 << bits) - 1)
    return field - (1 << bits) if t.least < 0 and field >> (bits - 1) else field


@pytest.mark.parametrize("element", TYPES)
def test_functions(device, element):
    dtype = TYPES[element]
    info, count = np.iinfo(dtype), 512
    edges = np.array([info.min, info.max, 0, 1, info.max // 2, info.min + 1], dtype)
    x, y, z = (
        np.concatenate([RNG.integers(info.min, info.max, count - 36, dtype, True), e])
        for e in (np.repeat(edges, 6), np.tile(edges, 6), np.tile(edges[::-1], 6))
    )
    lines = "\n".join(f"out[{j} * n + i] = {call};" for j, call in enumerate(FUNCTIONS))
    vectors = "\n".join(f"out4[{j} * n / 4 + i] = {element}4({call});" for j, call in enumerate(FUNCTIONS))
    library = metalcore.compile_shader(f"""
        #include <metal_stdlib>
        using namespace metal;
        kernel void scalar(device const {element}* a, device const {element}* b, device const {element}* c,
                           device {element}* out, constant uint& n, uint i [[thread_position_in_grid]]) {{
          {element} x = a[i], y = b[i], z = c[i];
          {lines}
        }}
        kernel void vector(device const {element}4* a, device const {element}4* b, device const {element}4* c,
                           device {element}4* out4, constant uint& n, uint i [[thread_position_in_grid]]) {{
          {element}4 x = a[i], y = b[i], z = c[i];
          {vectors}
        }}""")
    inputs = [torch.from_numpy(v.view(f"i{v.itemsize}") if element == "uint" else v).to(device) for v in (x, y, z)]
    t = Integer(dtype)
    expected = np.array([[f(t, int(p), int(q), int(r)) for p, q, r in zip(x, y, z)] for f in FUNCTIONS.values()])
    for kernel, threads in (("scalar", count), ("vector", count // 4)):
        out = torch.empty(len(FUNCTIONS) * count, dtype=inputs[0].dtype, device=device)
        getattr(library, kernel)(*inputs, out, count, threads=threads)
        got = out.cpu().numpy().view(dtype).reshape(len(FUNCTIONS), count)
        for call, row, wanted in zip(FUNCTIONS, got, expected):
            np.testing.assert_array_equal(row, wanted.astype(dtype), err_msg=f"{kernel} {call}")


def test_products_of_24_bits(device):
    library = metalcore.compile_shader("""
        #include <metal_stdlib>
        using namespace metal;
        kernel void k(device const int* x, device int* out, uint i [[thread_position_in_grid]]) {
          out[2 * i] = mul24(x[i], 3);
          out[2 * i + 1] = mad24(x[i], -5, 7);
        }""")
    x = torch.tensor([0, 1, -1, 8388607, -8388608, 123456], dtype=torch.int32)
    out = torch.empty(6, 2, dtype=torch.int32, device=device)
    library.k(x.to(device), out, threads=6)
    assert torch.equal(out.cpu(), torch.stack([x * 3, x * -5 + 7], 1))
