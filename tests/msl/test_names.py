"""Kernels and globals with names that metal_stdlib has too."""

import pytest
import torch

import metalcore

pytestmark = pytest.mark.usefixtures("compiles_for_cuda")
HEADER = "#include <metal_stdlib>\nusing namespace metal;\n"
KERNELS = """transpose dot clamp min max exp select fma abs length normalize mix step sin floor round pow sqrt any all
    cross distance popcount rotate fmod reflect sign saturate log2 rsqrt max3 ctz ceil trunc fract array vec move swap
    decay rank simd_sum simd msl std""".split()


def test_kernels_named_as_functions_of_metal(device):
    body = "".join(
        f"kernel void {name}(device float* out, device const float* x) {{\n"
        "out[0] += exp(x[0]) + dot(float2(x[0]), 1); }\n"
        for name in KERNELS[:4]
    )
    library = metalcore.compile_shader(HEADER + body)
    out, x = torch.zeros(1, device=device), torch.zeros(1, device=device)
    for name in KERNELS[:4]:
        getattr(library, name)(out, x, threads=1)
    assert out.tolist() == [4]


def test_every_such_name_compiles():
    """All names are in one source, in which the compilers see each kernel's address."""
    from metalcore.msl.language.translate import translate
    from metalcore.msl.runtime import host

    source = HEADER + "".join(
        f"kernel void {name}(device float* out) {{ out[0] = metal::exp(out[1]); }}\n" for name in KERNELS
    )
    translation = translate(source)
    host.check_source(translation.source(), msl=source)


def test_a_kernel_named_as_a_namespace(device):
    body = "#include <simd/simd.h>\nkernel void simd(device float* out, constant simd::float2& x) { out[0] = x.y; }"
    out = torch.zeros(1, device=device)
    metalcore.compile_shader(HEADER + body).simd(out, [1.0, 2.0], threads=1)
    assert out.item() == 2


def test_templates_of_kernels_and_namespaces(device):
    body = """
        namespace a { namespace b {
          kernel void dot(device float* out) { out[0] += metal::dot(float2(1), float2(2)); }
        } }
        template <typename T> kernel void exp(device T* out) { out[0] += 1; }
        template [[host_name("made")]] kernel void exp<float>(device float*);"""
    library = metalcore.compile_shader(HEADER + body)
    out = torch.zeros(1, device=device)
    getattr(library, "a::b::dot")(out, threads=1)
    library.made(out, threads=1)
    assert out.tolist() == [5]


def test_globals_named_as_type_traits(device):
    body = """
        constant float decay = 0.5f;
        constant int rank = 3;
        constant uint extent [[function_constant(0)]];
        constant constexpr int negation = 5;
        struct P { float decay; int rank; };
        float conditional(float x) { return x; }
        kernel void k(device float* out, device const float* more [[buffer(1), function_constant(extent)]]) {
          P p = {1, 2};
          out[0] = decay * p.decay + rank * p.rank + extent + ::negation + conditional(100);
          out[1] = is_same_v<metal::decay_t<float&>, float> + metal::rank<float[3]>::value;
          for (int extent = 0; extent < 3; ++extent) out[1] += extent;
          out[2] = more[0];
        }"""
    library = metalcore.compile_shader(HEADER + body, constants={"extent": 1000})
    out, more = torch.zeros(3, device=device), torch.ones(1, device=device)
    library.k(out, more, threads=1)
    assert out.tolist() == [1111.5, 5, 1]
