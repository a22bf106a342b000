"""The code that NVRTC makes of programs: it has the instructions that matter for speed, and MSL keeps its meaning.
These tests need no GPU."""

import re
from pathlib import Path

import pytest

from metalcore.msl.errors import MSLError
from metalcore.msl.language.translate import translate
from metalcore.msl.nvidia import nvrtc
from metalcore.msl.nvidia.joined_products import join_products

pytestmark = pytest.mark.only_on("simulator", "cuda")  # Linux, where NVRTC is
HEADER = "#include <metal_stdlib>\nusing namespace metal;\n"
CONVERGENT = "-DMSL_CONVERGENT=1"


@pytest.fixture
def ptx(monkeypatch):
    """ptx(MSL, signature, *flags, capability=90): the PTX of its only kernel."""
    compiler = nvrtc.find()
    monkeypatch.setattr(compiler, "target", lambda capability: f"compute_{capability}")

    def compiled(source, signature, *flags, capability=90):
        translation = translate(HEADER + source)
        (name,) = (kernel.name for kernel in translation.kernels)
        text, (entry,) = translation.cuda_source([(name, signature)])
        output = compiler.compile(text, capability, flags=(*nvrtc.FLAGS, *flags), msl=source).decode()
        return re.search(rf"\.entry {entry}\(.*?\n}}", output, re.DOTALL)[0]

    return compiled


def count(pattern, text):
    return len(re.findall(pattern, text))


@pytest.mark.parametrize(
    "element, load",
    [("float4", r"ld\.global\.v4\.[fbu]32"), ("half4", r"ld\.global\.(v4\.[bu]16|v2\.[bu]32)"),
     ("bfloat4", r"ld\.global\.(v4\.[bu]16|v2\.[bu]32)"), ("uint2", r"ld\.global\.v2\.[bu]32"),
     ("uchar4", r"ld\.global\.(v4\.[bu]8|[bu]32)"), ("float2", r"ld\.global\.v2\.[fbu]32")],
)  # fmt: skip
@pytest.mark.parametrize("use", ["x[i]", "x[i] + x[i]", "{element}(float{n}(x[i]))", "max(x[i], {element}(1))"])
def test_a_vector_is_one_load_and_one_store(ptx, element, load, use):
    use = use.format(element=element, n=element[-1])
    kernel = f"""kernel void k(device const {element}* x, device {element}* y, uint i [[thread_position_in_grid]]) {{
        y[i] = {use};
    }}"""
    text = ptx(kernel, "b0,b1")
    assert count(load, text) == count(r"ld\.global", text) == 1
    assert count(r"st\.global", text) == 1


def test_bytes_are_read_from_the_parameter_block(ptx):
    kernel = """struct Params { float scale; uint rows[5]; };
        kernel void k(device float* x, constant Params& p, constant uint* table, uint i [[thread_position_in_grid]]) {
          x[i] = p.scale + p.rows[3] + table[1];
        }"""
    text = ptx(kernel, "b0,i1:32,i2:16")
    assert not re.search(r"ld\.global|ld\.local|cvta\.param|\bld\.[fu]", text)
    bound = ptx(kernel, "b0,b1,b2")
    assert count(r"ld\.global", bound) == 3


def test_reductions_of_whole_simdgroups(ptx):
    kernel = "kernel void k(device {T}* x, uint i [[thread_position_in_grid]]) {{ x[i] = simd_{name}(x[i]); }}"
    text = ptx(kernel.format(T="float", name="sum"), "b0", CONVERGENT)
    assert count("shfl.sync.bfly", text) == count(r"shfl|activemask|vote", text) == 5
    assert count(r"shfl", ptx(kernel.format(T="float4", name="max"), "b0", CONVERGENT)) == 20
    assert count(r"redux\.sync\.add", ptx(kernel.format(T="int", name="sum"), "b0", CONVERGENT)) == 1
    assert "activemask" in ptx(kernel.format(T="float", name="sum"), "b0")


@pytest.mark.parametrize("call, instruction", [
    ("simd_shuffle(x[i], ushort(i % 7))", "idx"), ("simd_shuffle_down(x[i], 4)", "down"),
    ("quad_shuffle_up(x[i], 1)", "up"), ("simd_shuffle_xor(x[i], 3)", "bfly"),
])  # fmt: skip
def test_only_programs_without_the_promise_ask_who_is_active(ptx, call, instruction):
    """In other programs a shuffle is one instruction."""
    kernel = f"kernel void k(device float* x, uint i [[thread_position_in_grid]]) {{ x[i] = {call}; }}"
    promised, asking = ptx(kernel, "b0", CONVERGENT), ptx(kernel, "b0")
    assert count(rf"shfl\.sync\.{instruction}", promised) == count(r"shfl|activemask|vote", promised) == 1
    assert count("shfl", asking) == count("activemask", asking) == 1


def test_minimum_and_maximum_are_instructions(ptx):
    kernel = "kernel void k(device float* x) { x[0] = min(x[1], max(x[2], fmax(x[3], x[4]))); }"
    text = ptx(kernel, "b0")
    assert (count(r"min\.f32", text), count(r"max\.f32", text), count("setp.*f32", text)) == (1, 2, 0)


def test_fast_functions_are_instructions(ptx):
    kernel = "kernel void k(device float* x) {{ x[0] = {space}::exp2(x[1]) + {space}::divide(x[2], x[3]); }}"
    fast, precise = (ptx(kernel.format(space=space), "b0") for space in ("fast", "precise"))
    assert count(r"(ex2|rcp)\.approx\.ftz", fast) == 2 and not count(r"div|setp.*f32", fast)
    assert count(r"div\.rn", precise) == 1


def test_half_and_bfloat_convert_by_instructions(ptx):
    kernel = "kernel void k(device {T}* x) {{ x[0] = x[1] * x[2]; }}"
    half = ptx(kernel.format(T="half"), "b0")
    assert (count(r"cvt\.f32\.f16", half), count(r"cvt\.rn\.f16\.f32", half)) == (2, 1)
    assert count(r"cvt\.rn\.bf16\.f32", ptx(kernel.format(T="bfloat"), "b0")) == 1


def test_threadgroup_memory(ptx):
    kernel = """kernel void k(device float* x, threadgroup float* dynamic [[threadgroup(1)]],
                              uint t [[thread_index_in_threadgroup]]) {
        threadgroup float a[64], b = 3.0f;
        threadgroup uint flag;
        a[t] = x[t];
        dynamic[t] = 2 * a[t ^ 1];
        if (t == 0) flag = 1;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        x[t] = a[63 - t] + dynamic[t ^ 3] + b + flag;
      }"""
    text = ptx(kernel, "b0,t0,t1")
    assert count(r"bar\.sync|barrier\.sync", text) == 2  # the initial value's, and the kernel's
    assert count(r"ld\.shared", text) >= 4 and not re.search(r"\bld\.f32|\bst\.f32", text)


def test_launch_bounds(ptx):
    kernel = "[[kernel, max_total_threads_per_threadgroup(96)]] void k(device int* x) { x[0] = 1; }"
    assert ".maxntid 96" in ptx(kernel, "b0")
    assert ".maxntid" not in ptx("kernel void k(device int* x) { x[0] = 1; }", "b0")


@pytest.mark.parametrize("element", ["half", "bfloat", "float"])
def test_matrices_take_tensor_cores(ptx, element):
    """Metal's layout of a matrix is that of the tensor cores, so no element changes its lane but in transposing."""
    kernel = f"""kernel void k(device const {element}* x, device float* y) {{
        simdgroup_matrix<{element}, 8, 8> a, b;
        simdgroup_float8x8 c(1.0f);
        simdgroup_load(a, x, 8);
        simdgroup_load(b, x + 64, 8);
        simdgroup_multiply_accumulate(c, a, b, c);
        c.thread_elements()[0] += 1;
        simdgroup_store(c, y, 8);
      }}"""
    text = ptx(kernel, "b0,b1", CONVERGENT)
    assert not count("mma", ptx(kernel, "b0,b1", CONVERGENT, capability=75))  # Turing's cores have no bfloats
    if element != "float":
        text = join_products(text.encode()).decode()  # it leaves the type that is the right one
        assert count("mma.sync.aligned.m16n8k8", text) == 1 and count("shfl", text) == 2  # these transpose b


@pytest.mark.parametrize("left", ["half", "bfloat", "float"])
@pytest.mark.parametrize("right", ["half", "bfloat", "float"])
def test_matrices_of_floats_are_multiplied_by_what_they_were(ptx, left, right):
    """Floats that were converted from a smaller type are multiplied as that type; the others as sums of bfloats."""
    kernel = f"""template <typename T> void load(thread simdgroup_float8x8& m, device const T* x, uint lane) {{
        float2 v[2];
        for (short i = 0; i < 2; ++i) for (short j = 0; j < 2; ++j) v[i][j] = static_cast<float>(x[4 * lane + i + j]);
        m.thread_elements() = v[1];
      }}
      kernel void k(device const {left}* x, device const {right}* y, device float* z,
                    uint lane [[thread_index_in_simdgroup]]) {{
        simdgroup_float8x8 a, b, c(0.0f);
        load(a, x, lane);
        load(b, y, lane);
        simdgroup_multiply_accumulate(c, a, b, c);
        simdgroup_store(c, z, 8);
      }}"""
    text = join_products(ptx(kernel, "b0,b1,b2").encode()).decode()
    if left == right != "float":
        kind = "bf16" if left == "bfloat" else "f16"
        assert count(rf"mma\.sync.*k8\.row\.col\.f32\.{kind}\.{kind}", text) == count("mma", text) == 1
    else:
        assert count(r"mma\.sync.*k16", text) == (right != "bfloat")


def test_barriers_without_flags_do_not_part_products(ptx):
    kernel = """kernel void k(device float* x, threadgroup float* y [[threadgroup(0)]],
                              uint i [[thread_position_in_grid]]) {{
        {use}
        y[i] = x[i];
        simdgroup_barrier(mem_flags::{flags});
        x[i] = y[i ^ 1];
      }}"""
    fences = {}
    for use in ("", "simdgroup_float8x8 m(1.0f);"):
        for flags in ("mem_none", "mem_threadgroup"):
            fences[use != "", flags] = count(r"bar\.warp\.sync", ptx(kernel.format(use=use, flags=flags), "b0,t0"))
    assert [key for key, fence in fences.items() if not fence] == [(True, "mem_none")]


def test_tables_at_program_scope(ptx):
    kernel = """constant float table[4] = {1, 2, 4, 8};
        constant half2 pairs[2] = {half2(1, 2), half2(3, 4)};
        struct S { int a; float b[3]; };
        constant S structs[2] = {{1, {1, 2, 3}}, {2, {4, 5, 6}}};
        kernel void k(device float* x, uint i [[thread_position_in_grid]]) {
          constexpr ushort shorts[] = {5, 6, 7, 8};
          constexpr constant int ints[] = {5, 6, 7, 8};
          x[i] = table[i % 4] + pairs[i % 2].y + structs[i % 2].b[i % 3] + shorts[i & 3] * ints[i & 3];
        }"""
    assert not re.search(r"(ld|st)\.local", ptx(kernel, "b0"))


def test_names_that_cuda_has_too(ptx):
    """A program may use names that CUDA has too: float4, exp, dim3, warpSize …."""
    kernel = """struct dim3 { int x; };
        float erf(float x) { return x; }
        float expm1(float x) { return exp(x) - 1; }
        inline float rsqrtf(float x) { return ::rsqrt(x); }
        float min3(float a) { return ::metal::min(a, ::metal::min3(a, 1.0f, 2.0f)); }
        template <typename T>
        ::metal::enable_if_t<is_same_v<remove_cv_t<T>, float>, T> exp(T x) { return -::metal::exp(x); }
        constant int warpSize = 3;
        kernel void k(device float* x) {
          dim3 d = {2};
          x[0] = erf(x[1]) + expm1(x[2]) + rsqrtf(x[3]) + min3(x[4]) + d.x + warpSize;
        }"""
    ptx(kernel, "b0")


def test_aggregates_with_defaulted_constructors(ptx):
    kernel = """template <typename T> struct Pair {
          T first, second;
          constexpr Pair<T>() = default;
          constexpr Pair<T>() threadgroup = default;
        };
        kernel void k(device float* x) { Pair<float> p = {1, 2}; x[0] = p.first + Pair<int>{3, 4}.second; }"""
    ptx(kernel, "b0")


def test_specializations_of_the_library(ptx):
    kernel = """struct Complex { float re, im; };
        template <> struct is_floating_point<Complex> : true_type {};
        template <typename T> struct _numeric_limits_impl<vec<T, 7>> { static constexpr int digits = 3; };
        kernel void k(device int* x) {
          x[0] = is_floating_point<Complex>::value + numeric_limits<vec<int, 7>>::digits;
        }"""
    ptx(kernel, "b0")


# Signatures


def test_what_is_bound_is_checked(ptx):
    kernel = "kernel void k(device float* x, constant float4& p, constant float* q) { x[0] = p.x + q[0]; }"
    with pytest.raises(MSLError, match=r"kernel 'k': nothing is bound to argument 'q' \(\[\[buffer\(2\)\]\]\)"):
        ptx(kernel, "b0,i1:16")
    with pytest.raises(MSLError, match="fewer bytes are bound than the argument's type has"):
        ptx("struct P { float4 a[3]; }; kernel void k(device float* x, constant P& p) { x[0] = p.a[2].y; }", "b0,i1:32")
    with pytest.raises(MSLError, match="kernel 'k': malformed signature 'b0,x1' at 'x1'"):
        ptx(kernel, "b0,x1")


def test_arguments_that_depend_on_a_function_constant():
    kernel = """constant bool has_bias [[function_constant(0)]];
        kernel void k(device float* x, device const float* bias [[buffer(1), function_constant(has_bias)]]) {
          x[0] = has_bias ? bias[0] : 1.0f;
        }"""
    compiler = nvrtc.find()
    for value, signature in ((True, "b0,b1"), (False, "b0,b1"), (False, "b0")):
        text, _ = translate(HEADER + kernel, constants={0: value}).cuda_source([("k", signature)])
        compiler.compile(text, 90)
    text, _ = translate(HEADER + kernel, constants={0: True}).cuda_source([("k", "b0")])
    with pytest.raises(MSLError, match="nothing is bound to argument 'bias'"):
        compiler.compile(text, 90)


@pytest.mark.parametrize(
    "call", ["", "metalcore_await_earlier_kernels(0);", "metalcore_await_earlier_kernels(places, 0);"]
)
def test_a_kernel_computes_while_those_before_it_run(ptx, call):
    """A kernel waits once and before it reads memory; where it says so, after it has its addresses. It lets later
    kernels begin where it says so, or else at once."""
    header = (Path(__file__).parents[2] / "kernels/common/earlier.h").read_text().replace("#pragma once", "")
    source = """
    kernel void k(device float* out, device const float* in, constant uint& n, uint i [[thread_position_in_grid]]) {
      device const float* places[1] = {in + i / n};
      %s
      out[i] = *places[0];
      %s
    }"""
    found = ptx(header + source % (call, call and "metalcore_begin_later_kernels(0);"), "b0,b1,i2:16")
    order = re.findall(r"griddepcontrol\.\w+|div\.u32|ld\.global|st\.global", found)
    if not call:  # the compiler may divide before or after, since the wait does not depend on it
        order.remove("div.u32")
    begin, wait = "griddepcontrol.launch_dependents", "griddepcontrol.wait"
    accesses = ["ld.global", "st.global"]
    assert order == (["div.u32", wait, *accesses, begin] if call else [begin, wait, *accesses])


def test_a_program_asks_only_for_the_pipelines_of_its_products():
    """The largest of the pipelines that its code names is how much memory each threadgroup takes."""
    product = """using Matrix = tensor<device half, dextents<int, 2>, tensor_inline>;
          const dextents<int, 2> extents(64, 64);
          const array<int, 2> strides{1, 64};
          Matrix left(a, extents, strides), right(b, extents, strides), result(c, extents, strides);
          matmul2d<matmul2d_descriptor(64, 64, 64), execution_simdgroups<4>>().run(left, right, result);"""
    for body, kib in ((product, {"17"}), ("c[0] = a[0];", set())):
        source = f"""#include <metal_tensor>
            #include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
            using namespace metal;
            using namespace mpp::tensor_ops;
            kernel void k(device half* a, device half* b, device half* c) {{ {body} }}"""
        text, _ = translate(source).cuda_source([("k", "b0,b1,b2")])
        output = nvrtc.find().compile_with_ptx(text, 90, msl=source)[1].decode()
        assert set(re.findall(r"metalcore_pipeline_kibILi(\d+)E", output)) == kib


def test_copies_of_tiles_go_on(ptx):
    """A program that copies tiles has more memory than a kernel may declare, and its threads wait where it says so."""
    headers = (Path(__file__).parents[2] / "kernels/common" / name for name in ("pack.h", "copies.h"))
    text = "".join(re.sub(r'#pragma once|#include ".*"', "", header.read_text()) for header in headers)
    source = """
    kernel void k(device float* out, device const float* in, uint i [[thread_index_in_threadgroup]]) {
      threadgroup float declared[20000];
      threadgroup float* const tile = metalcore_memory_of_tile<80000>(declared, 0);
      metalcore_copy_pack(tile + 4 * i, in + 4 * i, 0);
      metalcore_await_copies(0);
      out[i] = tile[4 * i];
    }"""
    found = ptx(text + source, "b0,b1")
    assert re.findall(r"cp\.async\.\w+|st\.global", found) == ["cp.async.cg", "cp.async.wait_all", "st.global"]
    assert "metalcore_pipeline_kibILi79E" in found and ".shared .align 4 .b8" not in found
