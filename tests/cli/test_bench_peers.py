"""python -m benchmarks.peers, with small kernels and functions in place of peers': what it runs, checks and refuses."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.usefixtures("as_before")

MLX_KERNELS = "mlx/backend/metal/kernels"
PRODUCT = """
#include <metal_stdlib>
using namespace metal;
constant bool unused_10 [[function_constant(10)]];
constant bool unused_100 [[function_constant(100)]];
constant bool unused_110 [[function_constant(110)]];
constant bool whole_rows [[function_constant(200)]];
constant bool unused_201 [[function_constant(201)]];
constant bool unused_202 [[function_constant(202)]];
struct Shape { int m, n, k, row_a, row_b, row_d, columns, rows; long batch[3]; int swizzle, steps, batches; };

// A threadgroup has a tile of 64 x 64.
template <typename T, bool transposed>
kernel void product(const device T* a [[buffer(0)]], const device T* b [[buffer(1)]], device T* d [[buffer(3)]],
                    const constant Shape& s [[buffer(4)]], uint3 group [[threadgroup_position_in_grid]],
                    uint lane [[thread_index_in_threadgroup]]) {
  for (int at = lane; at < 64 * 64; at += 128) {
    int i = 64 * (int)group.y + at / 64, j = 64 * (int)group.x + at % 64;
    if (i >= s.m || j >= s.n || s.swizzle != 0 || whole_rows != (s.m % 64 == 0)) continue;
    float sum = 0;
    for (int k = 0; k < s.k; k++) sum += a[i * s.row_a + k] * b[transposed ? j * s.row_b + k : k * s.row_b + j];
    d[i * s.row_d + j] = FACTOR * sum;
  }
}
#define NAMED(layout, transposed)                                                                           \\
  template [[host_name("steel_gemm_fused_" #layout "_float32_float32_bm64_bn64_bk16_wm2_wn2")]] kernel void \\
  product<float, transposed>(const device float*, const device float*, device float*, const constant Shape&, uint3, \\
                             uint);
NAMED(nn, false)
NAMED(nt, true)
"""
UTILS = """
#include <metal_stdlib>
using namespace metal;
typedef half float16_t;
typedef bfloat bfloat16_t;
#define instantiate_kernel(name, function, ...) \\
  template [[host_name(name)]] kernel decltype(function<__VA_ARGS__>) function<__VA_ARGS__>;
"""
# A threadgroup of two simdgroups has 8 rows, and each of 8 threads a row.
AFFINE = """
constant bool unused_200 [[function_constant(200)]];
constant bool unused_201 [[function_constant(201)]];
constant bool unused_202 [[function_constant(202)]];
template <typename T, int group, int bits, bool batched>
kernel void affine_qmv_fast(const device uint* w [[buffer(0)]], const device T* scales [[buffer(1)]],
                            const device T* offsets [[buffer(2)]], const device T* x [[buffer(3)]],
                            device T* y [[buffer(4)]], const constant int& length [[buffer(5)]],
                            const constant int& rows [[buffer(6)]], const constant int& unused_7 [[buffer(7)]],
                            const constant int* unused_8 [[buffer(8)]], const constant long* unused_9 [[buffer(9)]],
                            const constant int& unused_10 [[buffer(10)]], const constant int* unused_11 [[buffer(11)]],
                            const constant long* unused_12 [[buffer(12)]],
                            const constant long* unused_13 [[buffer(13)]],
                            const constant long* unused_14 [[buffer(14)]], uint3 at [[thread_position_in_grid]]) {
  int row = at.y / 2 * 8 + at.x;
  if (at.x >= 8 || at.y % 2 != 0 || row >= rows) return;
  float sum = 0;
  for (int k = 0; k < length; k++) {
    ulong from = ((ulong)row * length + k) * bits;
    ulong two = w[from / 32] | (from % 32 + bits > 32 ? (ulong)w[from / 32 + 1] << 32 : 0);
    int in_group = (row * length + k) / group;
    float q = (two >> from % 32) & ((1 << bits) - 1);
    sum += (scales[in_group] * q + offsets[in_group]) * x[k];
  }
  y[row] = (T)sum;
}
"""
ROWS_OF_Q8_0 = """
#include "ggml-common.h"
#include "ggml-metal-impl.h"
using namespace metal;
constant short simdgroups [[function_constant(600)]];
CONSTANTS
#ifdef GGML_METAL_HAS_BF16
[[host_name("kernel_mul_mv_q8_0_f32")]]
#endif
// A threadgroup has two rows.
kernel void rows(constant Sizes& sizes [[buffer(0)]], const device block_q8_0* w [[buffer(1)]],
                 const device float* x [[buffer(2)]], device float* out [[buffer(3)]],
                 threadgroup float* unused [[threadgroup(0)]], uint3 group [[threadgroup_position_in_grid]],
                 ushort lane [[thread_index_in_simdgroup]], ushort simdgroup [[simdgroup_index_in_threadgroup]]) {
  int blocks = sizes.length / 32, row = 2 * (int)group.x + simdgroup;
  if (simdgroups != 4 || simdgroup >= 2 || row >= sizes.rows) return;
  float sum = 0;
  for (int b = 0; b < blocks; b++) sum += (float)w[row * blocks + b].d * w[row * blocks + b].q[lane] * x[32 * b + lane];
  sum = simd_sum(sum);
  if (lane == 0) out[row] = sum;
}
"""
HEADERS = {
    "ggml-common.h": "#include <metal_stdlib>\nstruct block_q8_0 { half d; char q[32]; };",
    "ggml-metal/ggml-metal-impl.h": "#include <metal_stdlib>\nstruct Sizes { int length, rows; };",
}


def write(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(folder)


@pytest.fixture
def mlx(tmp_path):
    """A folder with the files that are read of MLX's checkout. Its product is our own, times a factor."""

    def make(factor):
        kernels = {
            "steel/gemm/kernels/steel_gemm_fused": f'#include "{MLX_KERNELS}/product.h"',
            "steel/attn/kernels/steel_attention": "",
            "scaled_dot_product_attention": "",
        }
        files = {f"{MLX_KERNELS}/{name}.metal": text for name, text in kernels.items()}
        files[f"{MLX_KERNELS}/product.h"] = f"#define FACTOR {factor}\n{PRODUCT}"
        empty = dict.fromkeys(("steel/gemm/gemm", "quantized_utils"), "")
        for name, text in {"utils": UTILS, "quantized": AFFINE, **empty}.items():
            files[f"{MLX_KERNELS}/{name}.h"] = text
        return write(tmp_path / "mlx", files)

    return make


@pytest.fixture
def ggml(tmp_path):
    unused = "".join(
        f"constant {'bool' if index in (700, 701) else 'short'} unused_{index} [[function_constant({index})]];\n"
        for index in (601, 602, 603, 604, *range(700, 706))
    )
    files = {**HEADERS, "ggml-metal/ggml-metal.metal": ROWS_OF_Q8_0.replace("CONSTANTS", unused)}
    return write(tmp_path / "ggml", {f"src/{name}": text for name, text in files.items()})


@pytest.fixture
def peers(capsys, device, tmp_path):
    """peers(*arguments) -> exit status, stdout, stderr and the data of the JSON file, on the tests' device."""
    from benchmarks.peers.__main__ import main

    name = "simulator" if "metalcore.simulator" in sys.modules else device
    out = tmp_path / "out"

    def call(*arguments):
        status = main([*arguments, "--device", name, "--quick", "--out", str(out)])
        captured = capsys.readouterr()
        files = list(out.glob("*.json"))
        return status, captured.out, captured.err, json.loads(files[0].read_text()) if files else None

    return call


def test_a_published_product(peers, mlx):
    status, out, err, data = peers("gemm", "--mlx", mlx("1.0f"), "--size", "80", "--filter", "float32")
    assert status == 0, err
    names = [f"matmul {layout}, MLX with swizzle {swizzle}" for layout in ("nn", "nt") for swizzle in (2, 1)]
    assert [result["name"] for result in data["results"]] == names
    assert all(result["theirs"]["median"] > 0 and result["shape"] == "80x80x80" for result in data["results"])
    assert "metalcore  peer" in out and data["settings"]["against"] == "peer"


def test_published_products_of_few_bits(peers, mlx):
    status, _, err, data = peers("affine", "--mlx", mlx("1.0f"), "--filter", "3 bits bfloat16")
    assert status == 0, err
    assert [result["name"] for result in data["results"]] == ["affine 3 bits, MLX"]


def test_a_result_that_is_wrong_is_shown_and_fails(peers, mlx):
    options = "--size", "16", "--filter", "nn swizzle 2 float32"
    status, _, _, data = peers("gemm", "--mlx", mlx("1.5f"), *options)
    assert status == 1 and "ours" not in data["results"][0]
    assert data["results"][0]["error"].startswith("ArithmeticError: the peer's result is wrong: the error is 5.0e-01")


def test_a_kernel_that_is_missing_is_shown_and_fails(peers, mlx):
    options = "--size", "16", "--filter", "nn swizzle 2 float16"
    status, _, _, data = peers("gemm", "--mlx", mlx("1.0f"), *options)
    assert [status, len(data["results"])] == [1, 2]  # float16 is in bfloat16, too
    assert all("KernelNotFoundError" in result["error"] for result in data["results"])


def test_a_kernel_that_is_missing_does_not_compile(peers, mlx):
    options = "--size", "16", "--filter", "nn swizzle 2 float16", "--compile"
    status, out, err, _ = peers("gemm", "--mlx", mlx("1.0f"), *options)
    assert status == 1
    for dtype in ("float16", "bfloat16"):
        assert f"for: steel_gemm_fused_nn_{dtype}_{dtype}_" in out + err


def test_published_packed_products(peers, ggml):
    """The macros of the project's build are defined, and its headers are found."""
    status, _, err, data = peers("quant", "--ggml", ggml, "--type", "Q8_0")
    assert status == 0, err
    assert [result["name"] for result in data["results"]] == [
        "Q8_0, x in f32, ggml",
        "Q8_0, x in f16, ggml",
        "Q8_0, x in f16, PyTorch with float16 weights",
    ]


def rotated(q, k, cos, sin):
    def one(x):
        first, second = x.chunk(2, -1)
        return x * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]

    return one(q), one(k)


def test_functions_of_liger(peers, monkeypatch):
    functions = SimpleNamespace(
        liger_swiglu=lambda a, b: F.silu(a) * b,
        liger_geglu=lambda a, b: F.gelu(a, approximate="tanh") * b,
        liger_rope=rotated,
        liger_layer_norm=lambda x, weight, bias, eps: F.layer_norm(x, weight.shape, weight, bias, eps),
        liger_rms_norm=lambda x, weight, eps: F.rms_norm(x, weight.shape, weight, eps),
        liger_cross_entropy=F.cross_entropy,
        liger_fused_linear_cross_entropy=lambda x, weight, target: F.cross_entropy(F.linear(x, weight), target),
    )
    patched = []
    transformers = SimpleNamespace(_apply_liger_kernel_to_instance=lambda model: patched.append(model))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", transformers)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.functional", functions)
    status, _, err, data = peers("liger")
    assert status == 0, err
    assert len(data["results"]) == 5 * 2 * 2 + 2 + 2 and len(patched) == 1
    assert {result["name"] for result in data["results"]} >= {
        "rope backward, Liger",
        "fused_linear_cross_entropy, Liger",
        "training step, Liger's patch",
        "training step, without a patch",
    }


@pytest.mark.parametrize(
    "arguments, message",
    (
        (("gemm", "--mlx", "nowhere"), "--mlx nowhere: there is no mlx/backend/metal/kernels/steel/gemm/"),
        (("quant", "--ggml", "."), "--ggml .: there is no ggml/src/ggml-metal/ggml-metal.metal or src/ggml-metal/"),
        (("attention", "--flash-sdpa", "nowhere"), "--flash-sdpa nowhere: there is no sdpa-metal/"),
        (("attention",), "there is no peer to compare with: name a checkout with --mlx, --ggml or --flash-sdpa"),
        (("liger",), "Liger-Kernel (pip install liger-kernel) and Triton have to be installed"),
    ),
)
def test_peers_that_are_not_there_are_refused(peers, monkeypatch, arguments, message):
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.functional", None)
    status, out, err, _ = peers(*arguments)
    assert status == 2 and out == "" and message in err


def test_structs_are_bound_as_in_c():
    from benchmarks.peers.published import struct_argument

    assert struct_argument("iqh", 1, 2, 3) == [1, 2, 3]  # padding before the long and at the end
    assert struct_argument("2i", 1, 2) == [1 + (2 << 32)]
