"""Products with packed weights, against float64 products with gguf's numbers."""

import pytest
import torch
from formats import by_gguf, each_type, sample, unusual
from references import DTYPES, check_operator, flushes_subnormals, tensor, wide
from rows import tuned

import metalcore

pytest.importorskip("gguf")


def assert_near(actual, x, weights):
    """Within the rounding of x's dtype and n eps, relative to the sum of the absolute terms. Where subnormal numbers
    become zero, factors and results of this dtype may."""
    x = wide(x)
    terms = weights.shape[-1]
    bound = (x.abs() @ weights.abs().mT) * (torch.finfo(torch.float32).eps * terms + torch.finfo(actual.dtype).eps)
    if flushes_subnormals(actual.dtype):
        factors = x.abs().sum(-1, keepdim=True) + weights.abs().sum(-1)
        bound = bound + torch.finfo(actual.dtype).smallest_normal * (factors + 1)
    assert ((wide(actual) - x @ weights.mT).abs() <= bound).all()


@each_type
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family, rows", [("baseline", (1, 3, 8, 9)), ("apple7", (2, 3, 8))])
def test_types_and_rows(device, type, dtype, family, rows):
    """Threadgroups take 4 rows of x at once, and 2 on Apple GPUs."""
    packed, weights = sample(type, 21, 512, device)
    for count in rows:
        x = tensor(count, 512, dtype=dtype, device=device)
        with tuned(family):
            assert_near(metalcore.quantized_linear(x, packed, type), x, weights)


@pytest.mark.parametrize("type, unit", [("Q4_K", 256), ("Q6_K", 256), ("Q8_0", 32), ("Q4_0", 32), ("MXFP4", 32)])
def test_lengths(device, type, unit):
    """Rows of less than one simdgroup's weights, of more, and of more than one threadgroup holds."""
    for length in (unit, 1024 - unit, 1024, 1024 + unit, 9 * 1024, 33 * 1024):
        packed, weights = sample(type, 5, length, device)
        for rows in (1, 2):
            x = tensor(rows, length, device=device)
            assert_near(metalcore.quantized_linear(x, packed, type), x, weights)


@pytest.mark.parametrize("family", ["baseline", "hopper", "apple7"])
@pytest.mark.parametrize("rows", [1, 2, 4, 5, 8])
def test_numbers_of_weights(device, family, rows):
    """A threadgroup has from a few rows of weights to as many as it can hold."""
    with tuned(family):
        for count in (1, 3, 4, 1030, 70000 // rows):
            packed, weights = sample("Q4_0", count, 32, device)
            x = tensor(rows, 32, device=device)
            assert_near(metalcore.quantized_linear(x, packed, "Q4_0"), x, weights)


@each_type
def test_unusual_blocks(device, type):
    """A row of weights that are not all finite has no finite product; the others are as usual."""
    packed = unusual(type)
    weights = by_gguf(packed, type).double()
    finite = weights.isfinite().all(-1)
    for rows in (1, 2):
        x = tensor(rows, 512, device=device) / 1024
        y = metalcore.quantized_linear(x, packed.to(device), type).cpu()
        reference = wide(x) @ weights.mT
        fits = finite & (reference.abs().amax(0) < torch.finfo(torch.float32).max / 1e4)
        assert_near(y[:, fits], x, weights[fits])
        if type != "MXFP4":  # a weight of 12 * 2^127 is infinite, and a product with a small x is not
            assert not y[:, ~finite].isfinite().any()


@pytest.mark.parametrize("rows", [0, 1, 9])
def test_no_terms(device, rows):
    packed = metalcore.quant.quantize(torch.empty(8, 0), "Q8_0").to(device)
    y = metalcore.quant.quantized_linear(torch.empty(rows, 0, device=device), packed, "Q8_0")
    assert y.shape == (rows, 8) and not y.any()
    experts = torch.zeros(rows, 2, dtype=torch.int32, device=device)
    y = metalcore.quant.quantized_linear_experts(torch.empty(rows, 0, device=device), packed[None], experts, "Q8_0")
    assert y.shape == (rows, 2, 8) and not y.any()


def test_shapes(device):
    packed, weights = sample("Q4_K", 21, 256, device)
    for shape in ((256,), (1, 256), (2, 2, 256), (3, 5, 256), (0, 256)):
        x = tensor(*shape, device=device)
        y = metalcore.quantized_linear(x, packed, "Q4_K")
        assert y.shape == (*shape[:-1], 21)
        assert_near(y, x, weights)
    x = tensor(256, 3, device=device).mT
    assert_near(metalcore.quantized_linear(x, packed, "Q4_K"), x, weights)
    x = tensor(257, device=device)[1:]
    assert_near(metalcore.quantized_linear(x, packed, "Q4_K"), x, weights)
    assert metalcore.quantized_linear(x, packed[:0], "Q4_K").shape == (0,)


@each_type
@pytest.mark.parametrize("rows", [2, 20])
def test_gradient(device, type, rows):
    packed, weights = sample(type, 21, 256, device)
    x = tensor(rows, 256, device=device).requires_grad_()
    bias = tensor(21, device=device).requires_grad_()
    grad = tensor(rows, 21, device=device)
    y = metalcore.quantized_linear(x, packed, type, bias)
    of_x, of_bias = torch.autograd.grad(y, (x, bias), grad)
    assert_near(of_x, grad, weights.mT)
    torch.testing.assert_close(of_bias, grad.sum(0))


@pytest.mark.parametrize("rows", [2, 20])
def test_second_derivative(device, rows):
    packed, weights = sample("Q8_0", 12, 32, device)
    x = tensor(rows, 32, device=device).requires_grad_()
    y = metalcore.quantized_linear(x, packed, "Q8_0")
    (first,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    reference = wide(x).requires_grad_()
    (expected,) = torch.autograd.grad((reference @ weights.mT).pow(3).sum(), reference, create_graph=True)
    (expected,) = torch.autograd.grad(expected.sum(), reference)
    torch.testing.assert_close(wide(second), expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [9, 31, 32, 33, 65])
def test_tiles(device, dtype, rows):
    """Numbers of rows and of weights below and above those of tiles, forward and backward."""
    with tuned("baseline"):
        for count, length in ((1, 32), (31, 64), (33, 96), (64, 32), (65, 160), (130, 32)):
            packed, weights = sample("Q5_1", count, length, device)
            x = tensor(rows, length, dtype=dtype, device=device).requires_grad_()
            y = metalcore.quantized_linear(x, packed, "Q5_1")
            assert_near(y, x, weights)
            grad = tensor(rows, count, dtype=dtype, device=device)
            assert_near(torch.autograd.grad(y, x, grad)[0], grad, weights.mT)


def check_experts(device, type, x, experts, dtype=torch.float32):
    packed, weights = sample(type, 3 * 10, 256, device)
    packed, weights = packed.view(3, 10, -1), weights.view(3, 10, 256)
    x = x.to(dtype).to(device).requires_grad_()
    y = metalcore.quantized_linear_experts(x, packed, experts.to(device), type)
    assert y.shape == (*experts.shape, 10)
    grad = tensor(*y.shape, dtype=dtype, device=device)
    (of_x,) = torch.autograd.grad(y, x, grad)
    for token, row in enumerate(experts.tolist()):
        own = torch.cat([weights[expert] for expert in row])
        if x.dim() == 2:
            assert_near(y[token].flatten(), x[token], own)
            assert_near(of_x[token], grad[token].flatten(), own.mT)
        for i, expert in enumerate(row if x.dim() == 3 else ()):
            assert_near(y[token, i], x[token, i], weights[expert])
            assert_near(of_x[token, i], grad[token, i], weights[expert].mT)


@each_type
@pytest.mark.parametrize("tokens", [4, 20])
def test_experts(device, type, tokens):
    experts = torch.randint(3, (tokens, 2))
    check_experts(device, type, tensor(tokens, 256), experts)
    check_experts(device, type, tensor(tokens, 2, 256), experts)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_expert_that_nobody_chose(device, dtype):
    experts = torch.tensor([0, 2]).repeat(50)[:, None]
    check_experts(device, "Q8_0", tensor(100, 256), experts, dtype)


@pytest.mark.parametrize("tokens", [1, 30])
def test_an_expert_that_does_not_exist(device, tokens):
    packed, weights = sample("Q4_0", 3 * 10, 32, device)
    # The low 32 bits of the larger ones are those of experts.
    experts = torch.tensor([[3, -1, 2**32, 2**32 + 1, -(2**32), 0]]).repeat(tokens, 1)
    x = tensor(tokens, 32, device=device)
    y = metalcore.quantized_linear_experts(x, packed.view(3, 10, -1), experts.to(device), "Q4_0")
    assert y[:, :5].isnan().all()
    assert_near(y[:, 5], x, weights[:10])


@pytest.mark.parametrize("tokens", [1, 30])
def test_no_experts(device, tokens):
    packed, _ = sample("Q4_0", 10, 32, device)
    x, experts = tensor(tokens, 32, device=device), torch.zeros(tokens, 2, dtype=torch.int64, device=device)
    with pytest.raises(RuntimeError, match="packed has no experts"):
        metalcore.quantized_linear_experts(x, packed[None][:0], experts, "Q4_0")
    assert metalcore.quantized_linear_experts(x, packed[None][:0], experts[:, :0], "Q4_0").shape == (tokens, 0, 10)


def test_explain(device):
    packed, _ = sample("Q4_K", 21, 256, device)
    kernels = {
        1: ("mul_mv1", ("quant_mv1_Q4_K",)),
        2: ("mul_mv4", ("quant_mv4_Q4_K",)),
        8: ("mul_mv4", ("quant_mv4_Q4_K",)),
        9: ("mul_mm", ("quant_mm_float",)),
    }
    with tuned("baseline"):
        for rows, expected in kernels.items():
            plan = metalcore.explain("quantized_linear", tensor(rows, 256, device=device), packed, type="Q4_K")
            assert (plan.variant, plan.kernels) == expected
    with tuned("hopper"):
        plan = metalcore.explain("quantized_linear", tensor(9, 256, device=device), packed, type="Q4_K")
        assert plan.variant == "torch" and plan.kernels == ("quant_rows_Q4_K",)


@pytest.mark.parametrize("rows", [9, 40])
def test_by_torch(device, rows):
    """The plan on GPUs whose PyTorch has the faster product."""
    with tuned("hopper"):
        packed, weights = sample("Q6_K", 21, 256, device)
        x = tensor(2, rows, 256, device=device).requires_grad_()
        y = metalcore.quantized_linear(x, packed, "Q6_K")
        assert_near(y, x, weights)
        assert_near(torch.autograd.grad(y.sum(), x)[0], torch.ones_like(y), weights.mT)


def test_errors(device):
    packed, _ = sample("Q4_K", 21, 256, device)
    with pytest.raises(RuntimeError, match=r"x of shape \[1, 128\] does not go with 21 rows of 256"):
        metalcore.quantized_linear(tensor(1, 128, device=device), packed, "Q4_K")
    with pytest.raises(RuntimeError, match="are not blocks of Q6_K"):
        metalcore.quantized_linear(tensor(1, 256, device=device), packed, "Q6_K")
    for where in ("cpu", device):
        x, rows = torch.ones(1, 256, device=where), packed.to(where)
        with pytest.raises(RuntimeError, match=r"bias has shape \[1\], not \[21\]"):
            metalcore.quantized_linear(x, rows, "Q4_K", torch.ones(1, device=where))
        with pytest.raises(RuntimeError, match="x must be floating-point numbers, not torch.int32"):
            metalcore.quantized_linear(x.int(), rows, "Q4_K")
        with pytest.raises(RuntimeError, match="packed must have 2 dimensions, not 3"):
            metalcore.quantized_linear(x, rows[None], "Q4_K")
        with pytest.raises(TypeError, match="experts must be integers, not torch.float32"):
            metalcore.quantized_linear_experts(x, rows[None], torch.zeros(1, 1, device=where), "Q4_K")
        with pytest.raises(RuntimeError, match=r"does not go with experts of shape \[2, 1\]"):
            metalcore.quantized_linear_experts(x, rows[None], torch.zeros(2, 1, device=where).int(), "Q4_K")
    with pytest.raises(IndexError):
        metalcore.quantized_linear_experts(torch.ones(1, 256), packed.cpu()[None], torch.tensor([[-1]]), "Q4_K")


def test_a_bias_of_another_dtype_changes_no_result(device):
    packed, _ = sample("Q4_K", 21, 256, device)
    x = tensor(2, 256, dtype=torch.bfloat16, device=device)
    assert metalcore.quantized_linear(x, packed, "Q4_K", torch.ones(21, device=device)).dtype == torch.bfloat16


def test_operators(device):
    packed, _ = sample("Q4_K", 6, 256, device)
    x = tensor(2, 256, device=device)
    for transposed in (False, True):
        check_operator(torch.ops.metalcore.quant_matmul, x.requires_grad_(), packed, 12, transposed)
        x = tensor(2, 6, device=device)
    experts = torch.tensor([[0, 1], [1, 1]], dtype=torch.int32, device=device)
    x = tensor(2, 256, device=device).requires_grad_()
    check_operator(torch.ops.metalcore.quant_matmul_experts, x, packed.view(2, 3, -1), experts, 12, False)
