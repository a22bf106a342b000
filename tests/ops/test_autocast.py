"""Under torch.autocast, ops give results of the dtype that their PyTorch namesakes give."""

import pytest
import torch
import torch.nn.functional as F
from references import assert_near, tensor, wide

import metalcore
import metalcore.nn
from metalcore.quant import dequantize, quantize, quantized_linear, quantized_linear_experts

OPS = {
    "silu": (metalcore.silu, F.silu),
    "gelu": (metalcore.gelu, F.gelu),
    "softmax": (lambda x: metalcore.softmax(x, -1), lambda x: torch.softmax(x, -1)),
    "softmax to a dtype": (lambda x: metalcore.softmax(x, -1, x.dtype), lambda x: torch.softmax(x, -1, x.dtype)),
    "log_softmax": (lambda x: metalcore.log_softmax(x, 0), lambda x: torch.log_softmax(x, 0)),
    "rms_norm": (lambda x: metalcore.rms_norm(x, (8,), eps=1e-5), lambda x: F.rms_norm(x, (8,), eps=1e-5)),
    "rms_norm of a sum": (
        lambda x: metalcore.add_rms_norm(x, x, eps=1e-5)[0],
        lambda x: F.rms_norm(x + x, (8,), eps=1e-5),
    ),
    "the sum": (lambda x: metalcore.add_rms_norm(x, x)[1], lambda x: x + x),
}


PACKED, EXPERTS = quantize(torch.linspace(-1, 1, 96).view(3, 32), "Q8_0"), torch.zeros(4, 1, dtype=torch.int64)
WEIGHT = dequantize(PACKED, "Q8_0", dtype=torch.float32)
PRODUCTS = {
    "matmul": (lambda x: metalcore.matmul(x, x.mT), lambda x: x @ x.mT),
    "linear": (lambda x: metalcore.linear(x, x, x[:, 0]), lambda x: F.linear(x, x, x[:, 0])),
    "conv2d": (
        lambda x: metalcore.conv2d(x[:, None, :, None], x[:, :1, None, None]),
        lambda x: F.conv2d(x[:, None, :, None], x[:, :1, None, None]),
    ),
    "joined_linear": (
        lambda x: metalcore.joined_linear(x[:1], x, x),
        lambda x: torch.cat([F.linear(x[:1], x)] * 2, -1),
    ),
    "quantized_linear": (
        lambda x: quantized_linear(F.pad(x, (0, 24)), PACKED.to(x.device), "Q8_0"),
        lambda x: F.linear(F.pad(x, (0, 24)), WEIGHT.to(x)),
    ),
    "quantized_linear_experts": (
        lambda x: quantized_linear_experts(F.pad(x, (0, 24)), PACKED.to(x.device)[None], EXPERTS.to(x.device), "Q8_0"),
        lambda x: F.linear(F.pad(x, (0, 24)), WEIGHT.to(x))[:, None],
    ),
}


@pytest.mark.parametrize("autocast", (torch.float16, torch.bfloat16), ids=str)
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16), ids=str)
@pytest.mark.parametrize("name", OPS)
def test_dtypes(device, name, dtype, autocast):
    ours, theirs = OPS[name]
    x = tensor(4, 8, dtype=dtype, device=device).requires_grad_()
    with torch.autocast(device, dtype=autocast):
        y, expected = ours(x), theirs(x)
    assert y.dtype == expected.dtype
    assert_near(y, theirs(wide(x)) if name != "softmax to a dtype" else torch.softmax(wide(x), -1), terms=4)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert gradient.dtype == dtype


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16), ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
def test_products(device, name, dtype):
    """Their operands are converted to autocast's dtype."""
    ours, theirs = PRODUCTS[name]
    x = tensor(4, 8, dtype=dtype, device=device).requires_grad_()
    with torch.autocast(device, dtype=torch.bfloat16):
        y, expected = ours(x), theirs(x)
    assert y.dtype == expected.dtype == torch.bfloat16
    assert_near(y, theirs(wide(x.bfloat16())), terms=8)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert gradient.dtype == dtype


def test_a_mixed_block(device):
    """An op takes a linear layer's 16-bit output, and another layer takes the op's, as in a model under autocast."""
    first, second = torch.nn.Linear(16, 16, device=device), torch.nn.Linear(16, 4, device=device)
    norm, reference = metalcore.nn.RMSNorm(16, device=device), torch.nn.RMSNorm(16, device=device)
    x = torch.randn(3, 16, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        found = second(norm(metalcore.silu(first(x))))
        expected = second(reference(F.silu(first(x))))
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=4 * torch.finfo(torch.bfloat16).eps, atol=1e-2)
    found.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for module in (first, second, norm) for p in module.parameters())


@pytest.mark.only_on("simulator", "mps", "cuda")  # on the CPU PyTorch's qr runs, which differs
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16), ids=str)
def test_qr(device, dtype):
    A = tensor(2, 6, 4, dtype=dtype, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        Q, R = metalcore.qr(A)
    assert Q.dtype == R.dtype == dtype


def test_compiled(device):
    x = tensor(4, 8, dtype=torch.bfloat16, device=device)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def function(x):
        with torch.autocast(device, dtype=torch.bfloat16):
            return metalcore.softmax(x, -1), metalcore.rms_norm(x, (8,))

    with torch.autocast(device, dtype=torch.bfloat16):
        expected = metalcore.softmax(x, -1), metalcore.rms_norm(x, (8,))
    for found, wanted in zip(function(x), expected):
        assert found.dtype == wanted.dtype and torch.equal(found, wanted)
