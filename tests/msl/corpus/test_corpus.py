"""Programs in the styles of other projects: each compiles for CUDA, passes the check, and computes what a reference of
another kind computes."""

from itertools import chain
from pathlib import Path

import pytest
import torch
from checking import needs_clang

import metalcore
from metalcore.msl.check import check
from metalcore.msl.language.translate import translate
from metalcore.msl.nvidia import nvrtc
from metalcore.msl.runtime import signatures
from tools import register_gate

FOLDER = Path(__file__).parent
TORCH = Path(torch.__file__).parent / "include"
GEMM = {10: False, 11: False, 50: False, 200: 32, 201: 32}
CONSTANTS = {"ccv": {0: 40, 1: 36, 2: 20, **GEMM}}
STYLES = sorted(path.stem for path in FOLDER.glob("*.metal"))


def source(style):
    return (FOLDER / f"{style}.metal").read_text()


def library(style, constants=None):
    return metalcore.compile_shader(source(style), constants=constants)


@needs_clang
@pytest.mark.parametrize("style", STYLES)
def test_nothing_is_found_in_it(style):
    findings = check(source(style), filename=f"{style}.metal", include_dirs=[TORCH], strict=False)
    assert not findings, "\n".join(map(str, findings))


@pytest.mark.parametrize("style", STYLES)
def test_it_compiles_for_cuda(style):
    translation = translate(source(style), include_dirs=[TORCH], constants=CONSTANTS.get(style))
    requests = [
        (kernel.name, signatures.probable([vars(a) for a in kernel.arguments if a.kind in ("buffer", "threadgroup")]))
        for kernel in translation.kernels
    ]
    flags = (*nvrtc.FLAGS, *register_gate.fast())
    nvrtc.find().compile(translation.cuda_source(requests)[0], 90, flags=flags, msl=source(style))


# tinygrad


def test_sums_of_rows_through_threadgroup_memory(device):
    x = torch.randn(24, 256)
    out = torch.zeros(24, device=device)
    library("tinygrad").r_24_16_4_4(out, x.to(device), threads=(24 * 16, 1, 1), group_size=(16, 1, 1))
    torch.testing.assert_close(out.cpu().double(), x.double().sum(1), rtol=1e-5, atol=1e-5)


def test_products_of_fragments_filled_by_hand(device):
    a, b = torch.randn(16, 8), torch.randn(8, 24)
    out = torch.zeros(16, 24, device=device)
    library("tinygrad").r_2_3_32_8(out, a.to(device), b.to(device), threads=(3 * 32, 2, 1), group_size=(32, 1, 1))
    torch.testing.assert_close(out.cpu().double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)


def test_quantized_blocks(device):
    x = torch.randn(8, 32).half()
    scales = torch.zeros(8, dtype=torch.float16, device=device)
    codes = torch.zeros(8, 32, dtype=torch.int8, device=device)
    library("tinygrad").E_8_32(scales, codes, x.to(device), threads=(8 * 32, 1, 1), group_size=(32, 1, 1))
    largest = x.float().abs().amax(1)
    torch.testing.assert_close(scales.cpu(), (largest / 127).half(), rtol=1e-3, atol=0)
    assert torch.equal(codes.cpu().int().abs().amax(1), torch.full((8,), 127, dtype=torch.int32))
    error = (codes.cpu().float() * largest[:, None] / 127 - x.float()).abs()
    assert (error <= largest[:, None] / 127 * 0.501).all()


# ccv


@pytest.mark.parametrize("transposed", [(False, False), (True, True)])
@pytest.mark.parametrize("biased", [False, True])
def test_products_with_sizes_as_function_constants(device, transposed, biased):
    m, n, k = 40, 36, 20
    a, b, bias = torch.randn(m, k), torch.randn(k, n), torch.randn(n)
    constants = {0: m, 1: n, 2: k, **GEMM, 10: transposed[0], 11: transposed[1], 50: biased}
    out = torch.zeros(m, n, device=device)
    stored = [x.T.contiguous() if t else x for x, t in zip((a, b), transposed)]
    library("ccv", constants).gemm(
        *(x.to(device) for x in stored), out, bias.to(device) if biased else None,
        threads=(2 * 128, 2, 1), group_size=(128, 1, 1), threadgroup_memory=2048,
    )  # fmt: skip
    expected = a.double() @ b.double() + (bias.double() if biased else 0)
    torch.testing.assert_close(out.cpu().double(), expected, rtol=1e-5, atol=1e-5)


# zkmopro: the field of BN254, y² = x³ + 3, in Python's integers

P = 0x30644E72E131A029B85045B68181585D97816A916871CA8D3C208C16D87CFD47
R = 1 << 256


def limbs(numbers):
    return [(number >> shift) & 0xFFFF for number in numbers for shift in range(0, 256, 16)]


def numbers(tensor):
    rows = tensor.cpu().reshape(-1, 16).tolist()
    return [sum(limb << (16 * i) for i, limb in enumerate(row)) for row in rows]


def add(p, q):
    """The sum of two points (x, y) of the curve; None is the point at infinity."""
    if p is None or q is None:
        return p or q
    if p[0] == q[0] and (p[1] + q[1]) % P == 0:
        return None
    slope = 3 * p[0] ** 2 * pow(2 * p[1], -1, P) if p == q else (q[1] - p[1]) * pow(q[0] - p[0], -1, P)
    x = (slope**2 - p[0] - q[0]) % P
    return x, (slope * (p[0] - x) - p[1]) % P


def affine(x, y, z):
    x, y, z = (value * pow(R, -1, P) % P for value in (x, y, z))
    inverse = pow(z, -1, P) if z else 0
    return (x * inverse**2 % P, y * inverse**3 % P) if z else None


def test_montgomery_products(device):
    assert -pow(P, -1, 1 << 16) % (1 << 16) == 25481
    rng = torch.Generator().manual_seed(1)
    a = [
        sum(limb << (16 * j) for j, limb in enumerate(torch.randint(0, 1 << 16, (16,), generator=rng).tolist())) % P
        for _ in range(62)
    ] + [0, P - 1]
    b = [*a[1:-1], P - 1, P - 1]
    out = torch.zeros(len(a) * 16, dtype=torch.int32, device=device)
    x, y = (torch.tensor(limbs(values), dtype=torch.int32, device=device) for values in (a, b))
    library("zkmopro").mont_mul(out, x, y, threads=len(a))
    assert numbers(out) == [i * j * pow(R, -1, P) % P for i, j in zip(a, b)]


def test_sums_of_points_in_buckets(device):
    points = [(1, 2)]
    while len(points) < 24:
        points.append(add(points[-1], (1, 2)))
    points[5] = points[4][0], P - points[4][1]
    # The buckets are empty, or have a point twice, a point and its opposite, and the rest.
    buckets = [[], [3, 3], [4, 5], [*range(6, 24)], [0, 0, 1]]
    offsets = [sum(map(len, buckets[:i])) for i in range(len(buckets) + 1)]
    stored = [value * R % P for x, y in points for value in (x, y, 1)]
    out = torch.zeros(len(buckets) * 48, dtype=torch.int32, device=device)
    values = (limbs(stored), offsets, list(chain.from_iterable(buckets)))
    tensors = (torch.tensor(v, dtype=torch.int32, device=device) for v in values)
    library("zkmopro").sum_buckets(out, *tensors, threads=len(buckets))
    found = numbers(out)
    for i, bucket in enumerate(buckets):
        expected = None
        for j in bucket:
            expected = add(expected, points[j])
        assert affine(*found[3 * i : 3 * i + 3]) == expected


def test_a_constant_made_of_another(device):
    out = torch.zeros(1, dtype=torch.int32, device=device)
    library("zkmopro").top_limb(out)
    assert out.item() == P >> 240


# Inductor


@pytest.mark.parametrize("columns", [8, 32, 100])
def test_log_softmax_and_a_loss(device, columns):
    x, targets = torch.randn(5, columns), torch.randint(0, columns, (5,))
    logs, losses = torch.zeros(5, columns, device=device), torch.zeros(5, device=device)
    library("inductor").log_softmax_nll(
        logs, losses, x.to(device), targets.to(device), columns, threads=(5, columns), group_size=(1, columns)
    )
    expected = torch.log_softmax(x.double(), 1)
    torch.testing.assert_close(logs.cpu().double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(losses.cpu().double(), -expected[range(5), targets], rtol=1e-5, atol=1e-5)


def test_gelu_where(device):
    x, kept = torch.randn(100).half(), torch.rand(100) < 0.5
    out = torch.zeros(100, dtype=torch.float16, device=device)
    library("inductor").fused_gelu_dropout_where(out, x.to(device), kept.to(device), 1.25)
    gelu = torch.nn.functional.gelu(x.double()) * 1.25
    expected = torch.where(kept, gelu, 0).clamp(min=-0.125).half()
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-3, atol=1e-4)


def test_indices_and_remainders(device):
    x = torch.arange(-20, 20)
    out = torch.zeros(40, dtype=torch.int64, device=device)
    library("inductor").index_and_remainder(out, x.to(device), 7)
    assert out.tolist() == [(i + 7 if i < 0 else i) // 3 * 100 + i % 5 for i in range(-20, 20)]


# SPIRV-Cross


@pytest.fixture
def uniforms(device):
    """(the bytes of struct _31 as a tensor of the device, its matrix, offset, period and words)."""
    matrix, offset, period = torch.randn(4, 4), torch.tensor([0.5, -1.0, 2.0]), torch.tensor([1.5])
    words = torch.tensor([(7 * i + 3) << 2 for i in range(8)], dtype=torch.int32)
    content = torch.cat([matrix.T.reshape(-1), offset, period]).view(torch.int32)  # by columns
    return torch.cat([content, words]).to(device), matrix, offset, period, words


def test_prefix_sums_of_weighted_values(device, uniforms):
    x = torch.randn(128)
    out = torch.zeros(128, device=device)
    library("spirv").main0(out, x.to(device), uniforms[0], threads=(128, 1, 1), group_size=(64, 1, 1))
    weights = torch.tensor([0.5, 1.0, 2.0, 4.0])[(uniforms[4].long() >> 4) & 3]
    expected = (x.double() * weights.repeat(16)).reshape(2, 64).cumsum(1).reshape(-1)
    torch.testing.assert_close(out.cpu().double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("constants, size", [(None, 64), ({0: 6}, 6)])
def test_positions_transformed_and_wrapped(device, uniforms, constants, size):
    content, matrix, offset, period, _ = uniforms
    items = torch.randn(5, 4)
    header = torch.tensor([5, 0, 0, 0], dtype=torch.int32)
    block = torch.cat([header, items.reshape(-1).view(torch.int32)]).to(device)
    library("spirv", constants).main1(block, content, threads=(8, 1, 1))
    found = block.cpu()[4:].view(torch.float32).reshape(5, 4)
    positions = torch.cat([items[:, :3], torch.ones(5, 1)], 1).double() @ matrix.double().T
    wrapped = torch.remainder(positions[:, :3] + offset.double(), period.double())[:, [0, 2, 1]]
    torch.testing.assert_close(found[:, :3].double(), wrapped, rtol=1e-4, atol=1e-4)
    lowest = [((i + size // 2) & -(i + size // 2)).bit_length() - 1 for i in range(5)]
    assert found[:, 3].contiguous().view(torch.int32).tolist() == lowest
