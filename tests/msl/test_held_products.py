"""Products of fragments that lanes hold, in PTX: a warp that is computed here multiplies what its lanes load. Loads of
neighbours that are joined bring the same elements."""

import re

import ptx_warp
import pytest

from metalcore.msl.language.cuda_source import HAS_MATRICES, HOLDS_FRAGMENTS
from metalcore.msl.language.translate import translate
from metalcore.msl.nvidia import nvrtc
from metalcore.msl.nvidia.cuda import CudaProgram
from metalcore.msl.nvidia.wide_loads import widen_loads

pytestmark = pytest.mark.only_on("simulator", "cuda")  # Linux, where NVRTC is
M, N, K, SLOTS = 16, 32, 32, 8

PRODUCT = """
#include <metal_tensor>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
using namespace metal;
using namespace mpp::tensor_ops;
kernel void k(device const {type}* x, device const {type}* y, device float* z,
              uint lane [[thread_index_in_simdgroup]]) {{
  constexpr auto descriptor = matmul2d_descriptor({m}, {n}, {k}, {left}, {right}, true,
                                                  matmul2d_descriptor::mode::multiply_accumulate);
  matmul2d<descriptor, execution_simdgroup> op;
  auto a = op.template get_left_input_cooperative_tensor<{type}, {type}, float>();
  auto b = op.template get_right_input_cooperative_tensor<{type}, {type}, float>();
  auto c = op.template get_destination_cooperative_tensor<decltype(a), decltype(b), float>();
  #pragma unroll
  for (int i = 0; i < a.get_capacity(); ++i) a[i] = x[i + {pitch} * lane];
  #pragma unroll
  for (int i = 0; i < b.get_capacity(); ++i) b[i] = y[i + {pitch} * lane];
  #pragma unroll
  for (int i = 0; i < c.get_capacity(); ++i) c[i] = 0.0f;
  op.run(a, b, c);
  #pragma unroll
  for (int i = 0; i < c.get_capacity(); ++i) z[i + 64 * lane] = c[i];
}}
"""
_LOAD = re.compile(r"ld\.global(?:\.nc)?\.u16\s+(%rs\d+), \[(%rd\d+)(?:\+(\d+))?\];")
_STORE = re.compile(r"st\.global\.f32\s+\[%rd\d+(?:\+(\d+))?\], (%f\d+);")


def compiled(type, left, right):
    names = {"type": type, "m": M, "n": N, "k": K, "left": str(left).lower(), "right": str(right).lower(), "pitch": 64}
    text, _ = translate(PRODUCT.format(**names)).cuda_source([("k", "b0,b1,b2")])
    return nvrtc.find().compile_with_ptx(text, 90)[1].rstrip(b"\0").decode()


def place(lane, slot, columns):
    """The row and the column of a lane's element of a matrix that has so many columns. The lane is the warp's."""
    fragment, within = divmod(slot, SLOTS)
    row = (lane >> 1 & 4) | (lane >> 3 & 2) | (lane >> 2 & 1) | (within & 4) * 2
    column = lane % 4 * 4 + within % 4
    return fragment // (columns // 16) * 16 + row, fragment % (columns // 16) * 16 + column


def matrix(warp, number, loads, columns):
    return {
        place(lane, slot, columns): number(warp._read(name)[lane])
        for slot, name in loads.items()
        for lane in ptx_warp.LANES
    }


@pytest.mark.parametrize("left, right", [(False, True), (False, False), (True, False), (True, True)])
def test_they_are_products(left, right):
    type = "half" if left else "bfloat"
    ptx = compiled(type, left, right)
    loads = [(base, int(offset or 0) // 2, name) for name, base, offset in _LOAD.findall(ptx)]
    first = loads[0][0]
    lefts = {slot: name for base, slot, name in loads if base == first}
    rights = {slot: name for base, slot, name in loads if base != first}
    warp = ptx_warp.Warp()
    ran = warp.run(ptx)
    assert len([opcode for opcode in ran if opcode.startswith("mma.")]) == N // 8 * (K // 16)
    number = getattr(ptx_warp, type)
    a, b = matrix(warp, number, lefts, M if left else K), matrix(warp, number, rights, K if right else N)
    for offset, name in _STORE.findall(ptx):
        found = warp.floats(name)
        for lane in ptx_warp.LANES:
            row, column = place(lane, int(offset or 0) // 4, N)
            terms = [a[(k, row) if left else (row, k)] * b[(column, k) if right else (k, column)] for k in range(K)]
            # Each of two instructions adds 16 exact products, whose sum is rounded to float.
            assert abs(found[lane] - sum(terms)) <= 2 * 2**-24 * sum(map(abs, terms))


def test_loads_of_neighbours_are_joined():
    ptx = compiled("bfloat", False, True)
    joined = widen_loads(ptx.encode()).decode()
    singles, wide = _LOAD.findall(joined), re.findall(r"ld\.global\.v2\.u32 \{(%\w+), (%\w+)\}", joined)
    assert len(_LOAD.findall(ptx)) == len(singles) == 4 * len(wide) == (M * K + N * K) // 32
    # Both ways give products the same words: pairs of the elements that lie in 8 bytes.
    pairs = dict(re.findall(r"mov\.b32 (%wl\d+), \{(%rs\d+,%rs\d+)\};", joined))
    assert [pairs[word] for words in wide for word in words] == [
        f"{low[0]},{high[0]}" for low, high in zip(singles[::2], singles[1::2])
    ]
    assert {word for words in wide for word in words} <= set(re.findall(r"%wl\d+", joined.split("wide_join_1:")[1]))
    test = joined[: joined.index("@%wp bra $wide_narrow_1")]
    assert "and.b32 %wl0, %wl0, 7" in test and "vote.sync.any.pred" in test


def test_other_uses_and_writes_between_keep_loads():
    ptx = compiled("bfloat", False, True)
    stored = ptx.replace("ld.global.u16", "st.global.u16 [%rd1], %rs1;\n\tld.global.u16", 2)
    assert widen_loads(stored.encode()).count(b"ld.global.v2.u32") < widen_loads(ptx.encode()).count(
        b"ld.global.v2.u32"
    )
    assert widen_loads(ptx.replace("u16", "u32").encode()).decode() == ptx.replace("u16", "u32")


MATRICES = """
kernel void matrices(device half* x, device half* y) {
  simdgroup_half8x8 a, b;
  simdgroup_load(a, x), simdgroup_load(b, y);
  simdgroup_multiply(a, a, b);
  simdgroup_store(a, y);
}
kernel void moves(device half* x, device half* y) {
  simdgroup_half8x8 a;
  simdgroup_load(a, x), simdgroup_store(a, y);
}
"""


def test_each_kernel_has_lanes_for_what_it_multiplies(monkeypatch):
    """A program may have kernels that hold fragments, and others that hold matrices of simdgroup_matrix."""
    names = {"type": "half", "m": M, "n": N, "k": K, "left": "false", "right": "true", "pitch": 64}
    translation = translate("#include <metal_stdlib>" + PRODUCT.format(**names) + MATRICES)
    program = CudaProgram("", lambda: (translation.guarded, translation.cuda_kernels()))
    texts, compiler = [], nvrtc.find()

    def compile_with_ptx(text, *arguments, **keywords):
        texts.append(text)
        return type(compiler).compile_with_ptx(compiler, text, *arguments, **keywords)

    monkeypatch.setattr(compiler, "compile_with_ptx", compile_with_ptx)
    for name, define in (("k", HOLDS_FRAGMENTS), ("matrices", HAS_MATRICES), ("moves", HAS_MATRICES)):
        program._compile(90, [(name, "b0,b1" + ",b2" * (name == "k"))])
        assert define in texts[-1]
