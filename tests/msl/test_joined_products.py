"""Products of matrices that are joined in PTX: a warp that is computed here gets the same numbers from them."""

import math
import re
from collections import Counter

import ptx_warp
import pytest

from metalcore.msl.language.translate import translate
from metalcore.msl.nvidia import nvrtc
from metalcore.msl.nvidia.joined_products import join_products

pytestmark = pytest.mark.only_on("simulator", "cuda")  # Linux, where NVRTC is
ROUNDING = 2**-24

PRODUCTS = """
#include <metal_stdlib>
using namespace metal;
#define DOWN %d
#define ACROSS %d
#define TERMS %d
#define EACH _Pragma("unroll") for (int m = 0; m < DOWN; ++m) _Pragma("unroll") for (int n = 0; n < ACROSS; ++n)
kernel void k(device const %s* x, device const %s* y, device float* z) {
  simdgroup_matrix<%s, 8, 8> left[DOWN][TERMS], right[TERMS][ACROSS];
  simdgroup_float8x8 sums[DOWN][ACROSS];
  #pragma unroll
  for (int k = 0; k < TERMS; ++k) {
    #pragma unroll
    for (int m = 0; m < DOWN; ++m) %s
    #pragma unroll
    for (int n = 0; n < ACROSS; ++n) %s
  }
  EACH simdgroup_load(sums[m][n], z + 64 * (ACROSS * m + n));
  EACH {
    #pragma unroll
    for (int k = 0; k < TERMS; ++k) simdgroup_multiply_accumulate(sums[m][n], left[m][k], right[k][n], sums[m][n]);
  }
  EACH simdgroup_store(sums[m][n], z + 64 * (ACROSS * m + n));
}
"""
LOAD = "simdgroup_load({0}, {1} + 64 * {2});"
CONVERT = """{{
  simdgroup_{type}8x8 read;
  simdgroup_load(read, {1} + 64 * {2});
  {0}.thread_elements() = float2(read.thread_elements());
}}"""


def compiled(down, across, terms, type, held):
    """The PTX of sums of products of matrices that are read as `type` and held as `held`."""
    load = LOAD if held == type else CONVERT
    left = load.format("left[m][k]", "x", "(TERMS * m + k)", type=type)
    right = load.format("right[k][n]", "y", "(ACROSS * k + n)", type=type)
    translation = translate(PRODUCTS % (down, across, terms, type, type, held, left, right))
    text, _ = translation.cuda_source([("k", "b0,b1,b2")])
    return nvrtc.find().compile_with_ptx(text, 90)[1].rstrip(b"\0").decode()


def joined_of(ptx):
    return join_products(ptx.encode()).decode()


def products(ptx):
    return Counter(re.findall(r"^\s*mma\.sync\.aligned\.(m16n8k\d+)\.row\.col\.f32\.(\w+)", ptx, re.MULTILINE))


def shuffles(ptx):
    return len(re.findall(r"^\s*shfl", ptx, re.MULTILINE))


def assert_same_numbers(ptx, joined, terms=8):
    """All floats of a warp are the same, but for the order of the sums."""
    before, after = ptx_warp.Warp(), ptx_warp.Warp()
    before.run(ptx)
    after.run(joined)
    names = [name for name in before.registers if name.startswith("%f")]
    assert names
    for name in names:
        for expected, found in zip(before.floats(name), after.floats(name)):
            assert found == pytest.approx(expected, rel=terms * ROUNDING, abs=terms * ROUNDING * 4, nan_ok=True), name


@pytest.mark.parametrize("type, held", [("half", "half"), ("bfloat", "bfloat"), ("half", "float"), ("bfloat", "float")])
@pytest.mark.parametrize(
    "down, across, terms", [(1, 1, 1), (2, 1, 1), (1, 1, 2), (2, 2, 2), (3, 2, 3), (4, 4, 2), (4, 1, 4)]
)
def test_products_of_a_kernel(down, across, terms, type, held):
    ptx = compiled(down, across, terms, type, held)
    assert ptx.count("// msl.product ") == down * across * terms
    joined = joined_of(ptx)
    pairs, kind = math.ceil(down / 2) * across, {"half": "f16", "bfloat": "bf16"}[type]
    expected = {("m16n8k16", kind): pairs * (terms // 2), ("m16n8k8", kind): pairs * (terms % 2)}
    assert products(joined) == {key: count for key, count in expected.items() if count}
    assert shuffles(joined) == 2 * math.ceil(across * terms / 2)
    assert_same_numbers(ptx, joined, terms=8 * terms)


# Right matrices that are read in columns ------------------------------------------------------------------------------

TILES = """
#include <metal_stdlib>
using namespace metal;
kernel void k(device const TYPE* x, device const TYPE* y, device float* z, constant int& steps,
              uint thread_index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup TYPE left[16 * 24], right[16 * 24];
  const short row = (lane / 4 & 4) + lane / 2 % 4, column = (lane / 4 & 2) * 2 + lane % 2 * 2;
  threadgroup const TYPE* const rows = left + row * 24 + column;
  threadgroup const TYPE* const columns = right + row * ROW + column * COLUMN;
  simdgroup_matrix<HELD, 8, 8> l, r;
  simdgroup_float8x8 sums[2];
  for (short m = 0; m < 2; ++m) sums[m] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  for (int step = 0; step < steps; ++step) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    left[thread_index] = x[step * 32 + thread_index];
    right[thread_index] = y[step * 32 + thread_index];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    #pragma unroll
    for (short k = 0; k < 16; k += 8) {
      r.thread_elements()[0] = HELD(columns[k * ROW]);
      r.thread_elements()[1] = HELD(columns[k * ROW + COLUMN]);
      #pragma unroll
      for (short m = 0; m < 2; ++m) {
        l.thread_elements()[0] = HELD(rows[m * 8 * 24 + k]);
        l.thread_elements()[1] = HELD(rows[m * 8 * 24 + k + 1]);
        simdgroup_multiply_accumulate(sums[m], l, r, sums[m]);
      }
    }
  }
  simdgroup_store(sums[0], z);
  simdgroup_store(sums[1], z + 64);
}
"""


@pytest.mark.parametrize("row, column", [(24, 1), (1, 24)])
@pytest.mark.parametrize("type, held", [("half", "half"), ("bfloat", "bfloat"), ("half", "float"), ("bfloat", "float")])
def test_columns_of_tiles_are_read_where_they_lie(type, held, row, column):
    """The lanes exchange their addresses before the loop, and nothing in it."""
    defines = f"#define TYPE {type}\n#define HELD {held}\n#define ROW {row}\n#define COLUMN {column}\n"
    text, _ = translate(defines + TILES).cuda_source([("k", "b0,b1,b2,i3:16")])
    ptx = nvrtc.find().compile_with_ptx(text, 90)[1].rstrip(b"\0").decode()
    joined = joined_of(ptx)
    in_loop = re.search(r"\n\$(\w+):\n(.*?)bra(?:\.uni)? \t?\$\1;", joined, re.DOTALL)[2]
    assert "mma.sync" in in_loop and shuffles(in_loop) == 0
    assert shuffles(joined) == 4  # two addresses of 64 bits
    assert_same_numbers(ptx, joined, terms=16)


ROW = "\tld.shared.u32 %r12, [%rd1+{}];"
LOOP = "\tadd.s64 %rd1, %rd2, %rd3;", "$L1:"
AGAIN = "\t@%p2 bra $L1;"


def shuffles_of(*lines):
    ptx = function(*lines)
    joined = joined_of(ptx)
    assert_same_numbers(ptx, joined)
    return shuffles(joined)


def test_rows_that_are_loaded_in_a_loop():
    assert shuffles_of(*LOOP, ROW.format(8), product(0, A, C), AGAIN) == 4
    two = "\tld.shared.u16 %rs1, [%rd1+4];", "\tld.shared.u16 %rs2, [%rd1+-60];", "\tmov.b32 %r12, {%rs1, %rs2};"
    assert shuffles_of(*LOOP, *two, product(0, A, C), AGAIN) == 4
    vector = "\tld.shared.v2.b16 {%rs1, %rs2}, [%rd1];", "\tmov.b32 %r12, {%rs1, %rs2};"
    assert shuffles_of(*LOOP, *vector, product(0, A, C), AGAIN) == 4
    # Another distance needs other addresses, and a barrier does not end the loop's first block.
    assert shuffles_of(*LOOP, ROW.format(8), product(0, A, C), "\tbar.sync 0;", *two, product(0, A, C), AGAIN) == 8


@pytest.mark.parametrize(
    "before, between",
    [
        (["$L1:", LOOP[0]], ""),  # the address changes in the loop
        ([LOOP[0], LOOP[0], "$L1:"], ""),  # or the compiler sets it in two places
        (["\t@%p1 add.s64 %rd1, %rd2, %rd3;", "$L1:"], ""),
        ([LOOP[0]], ""),  # there is no loop
        ([LOOP[0], "\t@%p1 bra $L1;", "\tmov.u32 %r50, 0;", "$L1:"], ""),  # lanes come from elsewhere
        ([LOOP[0], "\tbra.uni $L2;", "$L1:"], ""),
        ([*LOOP, "\t@%p3 bra $L2;"], ""),  # not all that enter the loop come to the product
        ([*LOOP, "$L3:"], ""),
        (LOOP, "\tst.shared.u32 [%rd4], %r50;"),
        (LOOP, "\tatom.shared.add.u32 %r50, [%rd4], 1;"),
        (LOOP, "\tbar.sync 0;"),
        (LOOP, "\tmov.b32 %r12, %r51;"),
    ],
)
def test_rows_that_are_transposed_as_before(before, between):
    lines = *before, ROW.format(8), between, product(0, A, C), AGAIN, "$L2:"
    assert shuffles_of(*lines) == 2
    assert "%my0" not in joined_of(function(*lines)).replace(".reg .b64 %my<1>", "")


def test_elements_of_different_rows_are_transposed_as_before():
    other = "\tadd.s64 %rd5, %rd2, %rd3;"
    two = "\tld.shared.u16 %rs1, [%rd1+4];", "\tld.shared.u16 %rs2, [%rd5+4];", "\tmov.b32 %r12, {%rs1, %rs2};"
    assert shuffles_of(other, *LOOP, *two, product(0, A, C), AGAIN) == 2
    wide = "\tld.shared.u16 %rs1, [%rd1+4];", "\tst.shared.u32 [%rd4], %r50;", *two[1:]
    assert shuffles_of(*LOOP, *wide, product(0, A, C), AGAIN) == 2


# What may not be joined ----------------------------------------------------------------------------------------------


def product(sum, left, right, kind="%r0"):
    """A product of bfloats where `kind` is 0, as the headers write it; its sum is in two registers of floats."""
    first, second = f"%f{2 * sum}", f"%f{2 * sum + 1}"
    sums = f"{{{first}, {second}, lower0, lower1}}"
    return f"""\
	// begin inline asm
	// msl.product {first} {second} {left} {right} {left} {right} {kind}
	{{ .reg .b32 one, two, both; .reg .f32 lower<2>;
	shfl.sync.idx.b32 one, {right}, %r3, 31, -1;
	shfl.sync.idx.b32 two, {right}, %r4, 31, -1;
	prmt.b32 both, one, two, %r5;
	mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {sums}, {{{left}, {left}}}, {{both}}, {sums}; }}
	// end inline asm"""


BEGIN = """\
.visible .entry k()
{
	.reg .b32 %r<99>;
	.reg .f32 %f<99>;
	mov.u32 %r0, 0;
	mov.u32 %r1, %laneid;
	and.b32 %r2, %r1, 2;
	shl.b32 %r2, %r2, 3;
	shr.u32 %r3, %r1, 3;
	or.b32 %r3, %r2, %r3;
	and.b32 %r2, %r1, 1;
	shl.b32 %r2, %r2, 2;
	or.b32 %r3, %r2, %r3;
	add.s32 %r4, %r3, 8;
	and.b32 %r5, %r1, 4;
	setp.eq.s32 %p1, %r5, 0;
	selp.b32 %r5, 0x5410, 0x7632, %p1;"""


def function(*lines):
    """A function of these lines. %r0 is 0, and %r3, %r4 and %r5 say where a lane finds its column of a right matrix."""
    return "\n".join([BEGIN, *lines, "\tret;", "}", ""])


def counted(*lines):
    """How many products of which depth are left of these lines; the numbers stay the same."""
    ptx = function(*lines)
    joined = joined_of(ptx)
    assert_same_numbers(ptx, joined)
    return {depth: count for (depth, _), count in products(joined).items()}


A, B, C, D = (f"%r{i}" for i in (10, 11, 12, 13))
PAIR = product(0, A, C), product(1, B, C)  # two sums with the same right matrix
CHAIN = product(0, A, C), product(0, B, D)  # two products of one sum


def test_pairs_and_chains():
    assert counted(*PAIR) == {"m16n8k8": 1}
    assert counted(*CHAIN) == {"m16n8k16": 1}
    assert counted(*PAIR, product(0, B, D), product(1, A, D)) == {"m16n8k16": 1}


@pytest.mark.parametrize(
    "line",
    ["add.f32 %f8, %f1, %f0;", "mov.f32 %f1, %f9;", "st.global.f32 [%rd1], %f0;", "mov.b32 %r10, %r20;", "bar.sync 0;",
     "@%p1 bra $L2;", "$L1:", "call.uni (retval0), f, (param0);", "what is this", "{ add.f32 %f8, %f9, %f9; }"],
)  # fmt: skip
def test_products_that_something_stands_between(line):
    """It uses or changes the first product's sum or matrices, or the program may be elsewhere after it."""
    first, second = product(0, A, C), product(1, B, C)
    assert counted(first, f"\t{line}", second) == {"m16n8k8": 2}


@pytest.mark.parametrize(
    "line", ["add.f32 %f8, %f9, %f9;", "ld.shared.u32 %r20, [%rd1];", ".loc 1 2 3", "// a comment"]
)
def test_products_that_do_not_mind_what_stands_between(line):
    assert counted(PAIR[0], f"\t{line}", PAIR[1]) == {"m16n8k8": 1}


def test_a_sum_that_is_another_products_matrix():
    as_matrix = "\tmov.b32 %r11, %f0;"
    assert counted(product(0, A, C), as_matrix, product(1, B, C)) == {"m16n8k8": 2}


def test_sums_with_different_right_matrices():
    assert counted(product(0, A, C), product(1, B, D)) == {"m16n8k8": 2}
    assert counted(product(0, A, C), product(1, B, C), product(0, B, D)) == {"m16n8k16": 1, "m16n8k8": 1}


def test_the_same_right_matrix_in_other_registers():
    packed = [f"\tmov.b32 {register}, {{%rs1, %rs2}};" for register in (C, D)]
    assert counted(packed[0], product(0, A, C), packed[1], product(1, B, D)) == {"m16n8k8": 1}
    changed = "\tmov.u16 %rs1, %rs3;"
    assert counted(packed[0], product(0, A, C), changed, packed[1], product(1, B, D)) == {"m16n8k8": 2}


def test_a_type_that_is_not_known_stays():
    ptx = function(product(0, A, C, kind="%r30"), product(1, B, C, kind="%r30"))
    assert joined_of(ptx) == ptx
    twice = function("\tmov.u32 %r30, 0;", product(0, A, C, "%r30"), "\tmov.u32 %r30, 1;", product(1, B, C, "%r30"))
    assert joined_of(twice) == twice


def test_halves_that_were_floats_in_between():
    there = "\tcvt.f32.f16 %f20, %rs1;", "\tcvt.f32.f16 %f21, %rs2;"
    back = "\tcvt.rn.f16x2.f32 %r10, %f21, %f20;"
    joined = joined_of(function(*there, back, *PAIR))
    assert back not in joined and "\tmov.b32 %r10, {%rs1, %rs2};" in joined
    for changed in ("\tcvt.f32.f16 %f20, %rs3;\n\tadd.f32 %f20, %f20, %f21;", "\tmov.u16 %rs1, %rs3;"):
        assert back in joined_of(function(*there, changed, back, *PAIR))


def test_calls_keep_their_own_registers():
    call = "\t{ // callseq 0, 0\n\t.reg .b32 temp_param_reg;\n\tcall.uni f;\n\t} // callseq 0"
    joined = join_products(function(call, *PAIR).encode()).decode()
    assert call in joined and joined.index("%laneid") < joined.index(call)


def test_other_functions_stay():
    other = ".func f()\n{\n\tcvt.rn.f16x2.f32 %r10, %f21, %f20;\n\tret;\n}\n"
    assert joined_of(other) == other
    assert joined_of(other + function(*PAIR)).startswith(other)
