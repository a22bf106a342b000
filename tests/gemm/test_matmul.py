"""matmul and linear, against float64 products."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from references import DTYPES, check_operator, tensor, wide
from rows import tuned

import metalcore
from metalcore import _C
from metalcore._core.registry import OPS
from metalcore.recording import record

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
ACTIVATIONS = {
    None: lambda x: x,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


def assert_near(actual, a, b, *, function=lambda x: x, added=0.0):
    """Within the rounding of the dtype and n eps, relative to the sum of the absolute terms. No activation multiplies
    an error by more than 1.2."""
    a, b = wide(a), wide(b)
    if not isinstance(added, float):
        added = wide(added)
    magnitude = a.abs() @ b.abs() + (abs(added) if isinstance(added, float) else added.abs())
    terms = a.shape[-1] + 4
    bound = 1.2 * magnitude * (terms * torch.finfo(torch.float32).eps + torch.finfo(actual.dtype).eps)
    expected = function(a @ b + added)
    assert actual.shape == expected.shape
    assert ((wide(actual) - expected).abs() <= bound + torch.finfo(actual.dtype).tiny).all()


def matrix(rows, columns, layout, dtype, device):
    """Rows or columns that are next to each other, one of them not aligned, or neither."""
    if layout == "rows":
        return tensor(rows, columns, dtype=dtype, device=device)
    if layout == "columns":
        return tensor(columns, rows, dtype=dtype, device=device).T
    if layout == "offset":
        return tensor(rows * columns + 1, dtype=dtype, device=device)[1:].view(rows, columns)
    return tensor(2 * rows, 3 * columns, dtype=dtype, device=device)[::2, ::3]


@each_dtype
@pytest.mark.parametrize("left", ["rows", "columns", "offset", "strided"])
@pytest.mark.parametrize("right", ["rows", "columns", "offset", "strided"])
def test_layouts(device, dtype, left, right):
    """Nothing is copied: the recording has one dispatch. Sizes lie at and beside those of tiles, packs and steps."""
    for rows, columns, terms in ((64, 64, 32), (72, 80, 48), (67, 65, 33), (9, 9, 9), (2, 40, 264), (40, 1, 37)):
        a, b = matrix(rows, terms, left, dtype, device), matrix(terms, columns, right, dtype, device)
        assert_near(metalcore.matmul(a, b), a, b)


def test_strides_are_passed_on(device):
    for left, right in itertools.product(("rows", "columns", "strided"), repeat=2):
        a, b = matrix(67, 40, left, torch.float32, device), matrix(40, 65, right, torch.float32, device)
        _, recording = record(metalcore.matmul, a, b)
        assert recording.kernels == ("gemm_float",) and not recording.torch_steps


@each_dtype
@pytest.mark.parametrize("transposed", [False, True])
def test_few_rows(device, dtype, transposed):
    """One row, as many as share what is read of b, one more, and both sides of the boundary to tiles."""
    b = matrix(520, 70, "columns" if transposed else "rows", dtype, device)
    for rows in (1, 2, 4, 5, 8, 9):
        a = tensor(rows, 520, dtype=dtype, device=device)
        y, recording = record(metalcore.matmul, a, b)
        assert_near(y, a, b)
        assert_near(metalcore.matmul(b.T, a.T), b.T, a.T)
        family = "gemv_terms" if transposed else "gemv_columns"
        variant = recording.plans[0].variant
        assert variant == family + ("1" if rows == 1 else "4") if rows <= 8 else variant.startswith("gemm")


@pytest.mark.parametrize("terms", [0, 1, 3, 8, 31, 32, 33, 255, 257, 2049])
def test_numbers_of_terms(device, terms):
    for rows in (1, 3, 20):
        a, b = tensor(rows, terms, device=device), tensor(terms, 20, device=device)
        assert_near(metalcore.matmul(a, b), a, b)
        assert_near(metalcore.linear(a, b.T.contiguous()), a, b)


@pytest.mark.parametrize(
    "a, b",
    [
        ((3, 20, 24), (24, 16)),
        ((2, 3, 20, 24), (3, 24, 16)),
        ((2, 1, 20, 24), (1, 3, 24, 16)),
        ((20, 24), (3, 24, 16)),
        ((3, 1, 24), (24, 16)),
        ((24,), (24,)),
        ((24,), (3, 24, 16)),
        ((3, 20, 24), (24,)),
        ((2, 1, 2, 1, 2, 3, 4), (2, 1, 2, 1, 4, 5)),
        ((1, 2, 1, 2, 1, 9, 4), (2, 1, 2, 1, 2, 4, 9)),
    ],
)
def test_broadcasting(device, a, b):
    a, b = tensor(*a, device=device), tensor(*b, device=device)
    y = metalcore.matmul(a, b)
    assert y.is_contiguous() and y.shape == (a.cpu() @ b.cpu()).shape
    torch.testing.assert_close(y.cpu(), (a.cpu().double() @ b.cpu().double()).float(), rtol=1e-4, atol=1e-5)


def test_batches_with_one_b_become_rows(device):
    plan = metalcore.explain("matmul", tensor(4, 2, 1, 24, device=device), tensor(24, 16, device=device))
    assert plan.variant == "gemv_columns4"
    expanded = tensor(5, 1, 24, device=device).expand(5, 30, 24)
    b = tensor(24, 16, device=device)
    assert_near(metalcore.matmul(expanded, b), expanded, b)


@each_dtype
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_epilogue(device, dtype, activation):
    for rows, columns in ((3, 40), (70, 65), (70, 2)):
        a, b = tensor(rows, 40, dtype=dtype, device=device), tensor(40, columns, dtype=dtype, device=device)
        bias, row = tensor(columns, dtype=dtype, device=device), tensor(rows, 1, dtype=dtype, device=device)
        y = metalcore.matmul(a, b, bias=bias, activation=activation, residual=row, alpha=0.5, beta=-2.0)
        added = wide(bias) - 2 * wide(row)
        assert_near(y, 0.5 * a, b, function=ACTIVATIONS[activation], added=added)


def test_residuals_of_vectors(device):
    a, b = tensor(24, device=device), tensor(3, 24, 16, device=device)
    residual = tensor(3, 16, device=device)
    assert_near(metalcore.matmul(a, b, residual=residual)[:, None], a[None], b, added=residual[:, None])
    a = tensor(3, 5, 24, device=device)
    y = metalcore.matmul(a, tensor(24, device=device) * 0, residual=tensor(1, device=device) * 0 + 2.0)
    assert y.shape == (3, 5) and (y == 2).all()


@each_dtype
def test_linear(device, dtype):
    x, weight = tensor(2, 9, 40, dtype=dtype, device=device), tensor(24, 40, dtype=dtype, device=device)
    bias = tensor(24, dtype=dtype, device=device)
    assert_near(metalcore.linear(x, weight, bias), x, weight.T, added=bias)
    assert_near(metalcore.linear(x, weight, activation="relu"), x, weight.T, function=F.relu)
    assert metalcore.linear(x, weight[0]).shape == (2, 9)


def test_the_same_bits_on_every_run(device):
    a, b = tensor(70, 300, device=device), tensor(300, 70, device=device)
    assert torch.equal(metalcore.matmul(a, b), metalcore.matmul(a, b))


def test_special_values_stay_in_their_rows(device):
    a, b = tensor(70, 64, device=device), tensor(64, 70, device=device)
    a[3, 5], a[66, 0] = torch.nan, torch.inf
    y = metalcore.matmul(a, b)
    assert y[3].isnan().all() and not y[66].isfinite().any()
    rest = [row for row in range(70) if row not in (3, 66)]
    assert y[rest].isfinite().all()


@pytest.mark.parametrize("shapes", [((0, 4), (4, 5)), ((3, 4), (4, 0)), ((0, 3, 4), (4, 5)), ((3, 0), (0, 5))])
def test_empty(device, shapes):
    a, b = (tensor(*shape, device=device).requires_grad_() for shape in shapes)
    y = metalcore.matmul(a, b)
    assert y.shape == torch.matmul(a.cpu(), b.cpu()).shape and (y == 0).all()
    y.sum().backward()
    assert (a.grad == 0).all() and (b.grad == 0).all()
    bias = tensor(5, device=device)
    if shapes == ((3, 0), (0, 5)):
        assert torch.equal(metalcore.matmul(a, b, bias=bias), bias.expand(3, 5))


@pytest.mark.parametrize(
    "a, b", [((3, 4), (4, 5)), ((2, 3, 4), (4, 5)), ((2, 1, 3, 4), (3, 4, 2)), ((4,), (2, 4, 3)), ((2, 3, 4), (4,))]
)
def test_gradients(device, a, b):
    """Of both orders, with everything that follows the product, against those of PyTorch's ops."""
    a, b = (tensor(*shape, device=device).requires_grad_() for shape in (a, b))
    whole = torch.matmul(a.cpu(), b.cpu())
    residual = tensor(*whole.shape[-1:], device=device).requires_grad_()
    bias = tensor(b.shape[-1], device=device).requires_grad_() if b.dim() > 1 else None
    inputs = [x for x in (a, b, bias, residual) if x is not None]

    def both(function, tensors):
        given = dict(zip(("a", "b", "bias", "residual") if bias is not None else ("a", "b", "residual"), tensors))
        y = function(**given, activation="silu", alpha=0.5, beta=3.0)
        first = torch.autograd.grad(y.square().sum(), tensors, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), tensors)
        return [*first, *second]

    ours = both(metalcore.matmul, inputs)
    theirs = both(OPS["matmul"].reference, [x.detach().cpu().double().requires_grad_() for x in inputs])
    for found, expected in zip(ours, theirs):
        torch.testing.assert_close(found.cpu().double(), expected, rtol=2e-4, atol=2e-4 * expected.abs().max().item())


@pytest.mark.parametrize("rows", [1, 3, 70])
def test_a_residual_times_zero_is_not_read(device, rows):
    a, b = (tensor(*shape, device=device).requires_grad_() for shape in ((rows, 8), (8, 5)))
    residual = torch.full((rows, 5), float("nan"), device=device, requires_grad=True)
    found = metalcore.matmul(a, b, residual=residual, beta=0)
    expected = torch.addmm(residual.cpu(), a.cpu(), b.cpu(), beta=0)
    torch.testing.assert_close(found.cpu(), expected)
    torch.testing.assert_close(metalcore.matmul(a.cpu(), b.cpu(), residual=residual.cpu(), beta=0), expected)
    gradients = torch.autograd.grad(found.sum(), [a, b, residual])
    assert all(g.isfinite().all() for g in gradients) and not gradients[2].any()


def test_the_weights_gradient_is_one_product(device):
    """The batch's rows become terms, and no gradients of the batch's members are summed."""
    x, weight = tensor(2, 30, 40, device=device), tensor(24, 40, device=device)
    plan = metalcore.explain("linear", x, weight, backward=True)
    assert len(plan.steps) == 2 and "aten::sum" not in " ".join(plan.by_torch)


def test_operators(device):
    a, b = tensor(2, 5, 4, device=device).requires_grad_(), tensor(4, 3, device=device).requires_grad_()
    bias, residual = (tensor(*shape, device=device).requires_grad_() for shape in ((3,), (2, 5, 3)))
    check_operator(torch.ops.metalcore.matmul, a, b, bias, residual, "none", 0.5, 2.0)
    check_operator(torch.ops.metalcore.matmul, a, b, None, None, "none", 1.0, 1.0)


def test_compile(device):
    def function(x, weight, bias):
        return metalcore.linear(x, weight, bias, activation="gelu").square().sum()

    inputs = [tensor(*shape, device=device).requires_grad_() for shape in ((5, 8), (6, 8), (6,))]
    expected = torch.autograd.grad(function(*inputs), inputs)
    found = torch.autograd.grad(torch.compile(function, fullgraph=True, backend="aot_eager")(*inputs), inputs)
    for ours, theirs in zip(found, expected):
        torch.testing.assert_close(ours, theirs)


def test_tuning(device):
    """More rows than usual may count as few."""
    a, b = tensor(8, 24, device=device), tensor(24, 16, device=device)
    with tuned("hopper"):
        assert_near(metalcore.matmul(a, b), a, b)


@pytest.fixture
def all_large(device):
    """Every product that can have large tiles has them."""
    if device == "cpu":
        pytest.skip("the CPU has no tiles")
    numbers = [("gemm", "large_tiles", [1]), ("gemm", "units", [0])]
    _C.use_measured(device, _C.gpu_family(device), numbers)
    yield
    _C.use_measured(device, _C.gpu_family(device), [])


def variant(a, b):
    return metalcore.explain("matmul", a, b, dtype=torch.bfloat16).variant


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("left", ["rows", "columns"])
@pytest.mark.parametrize("right", ["rows", "columns"])
def test_large_tiles(device, all_large, dtype, left, right):
    """Sizes lie at and beside those of tiles and steps."""
    for rows, columns, terms in ((128, 128, 32), (120, 112, 8), (256, 384, 40), (248, 120, 104)):
        a, b = matrix(rows, terms, left, dtype, device), matrix(terms, columns, right, dtype, device)
        bias, residual = tensor(columns, dtype=dtype, device=device), tensor(rows, columns, dtype=dtype, device=device)
        result, recording = record(metalcore.matmul, a, b, bias=bias, residual=residual)
        assert set(recording.kernels) == {f"gemm_large_{'half' if dtype == torch.float16 else 'bfloat'}"}
        assert_near(result, a, b, added=wide(bias) + wide(residual))


@each_dtype
@pytest.mark.parametrize("left", ["rows", "columns", "offset", "strided"])
@pytest.mark.parametrize("right", ["rows", "columns", "offset", "strided"])
def test_short_steps(device, dtype, left, right):
    """Apple GPUs take them. Sizes lie at and beside those of tiles and steps, which are 8 terms of float32."""
    name = {torch.float32: "float", torch.float16: "half", torch.bfloat16: "bfloat"}[dtype]
    with tuned("apple7"):
        for rows, columns, terms in ((64, 64, 16), (72, 80, 8), (67, 65, 17), (9, 130, 33), (128, 64, 24)):
            a, b = matrix(rows, terms, left, dtype, device), matrix(terms, columns, right, dtype, device)
            bias, residual = (
                tensor(columns, dtype=dtype, device=device),
                tensor(rows, columns, dtype=dtype, device=device),
            )
            result, recording = record(metalcore.matmul, a, b, bias=bias, residual=residual)
            assert recording.kernels == (f"gemm_short_{name}",)
            assert_near(result, a, b, added=wide(bias) + wide(residual))


def test_batches_in_short_steps(device):
    with tuned("apple7"):
        a, b = tensor(3, 1, 66, 24, device=device), tensor(2, 24, 70, device=device)
        assert variant(a.shape, b.shape) == "gemm_short"
        assert_near(metalcore.matmul(a, b), a, b)


def test_batches_of_large_tiles(device, all_large):
    a, b = (tensor(*shape, dtype=torch.float16, device=device) for shape in ((3, 1, 128, 24), (2, 24, 120)))
    assert variant(a.shape, b.shape) == "gemm_large"
    assert_near(metalcore.matmul(a, b), a, b)


def test_which_products_have_large_tiles(device):
    if device == "cpu":
        pytest.skip("the CPU has no tiles")
    with tuned("simulator"):
        names = {shapes: variant(*shapes) for shapes in (
            ((8 * 128, 64), (64, 8 * 128)),
            ((8 * 128 - 15, 64), (64, 8 * 128)),
            ((7 * 128, 64), (64, 9 * 128)),  # too few
            ((8 * 128, 64), (64, 8 * 128 - 4)),  # not aligned
            ((200, 72, 64), (200, 64, 64)),  # one of the columns' small tiles would be empty
            ((200, 72, 64), (200, 64, 72)),
        )}  # fmt: skip
    assert list(names.values()) == ["gemm_large", "gemm_large", "gemm", "gemm", "gemm", "gemm_large"]


def test_other_input_goes_to_pytorch(device):
    a, b = torch.arange(6).view(2, 3), torch.arange(12).view(3, 4)
    assert torch.equal(metalcore.matmul(a, b, activation="relu"), (a @ b).relu())
    a = torch.randn(2, 3)
    assert torch.equal(metalcore.matmul(a, a.T, alpha=2.0, residual=a[:, :1]), 2 * (a @ a.T) + a[:, :1])
    x = tensor(3, 4, 5, device=device)
    vmapped = torch.func.vmap(metalcore.matmul, (0, None))(x, x[0].T)
    torch.testing.assert_close(vmapped.cpu(), x.cpu() @ x[0].cpu().T)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda a: metalcore.matmul(a, a), RuntimeError, "does not go with b"),
        (lambda a: metalcore.matmul(a, a.T, bias=a[0]), RuntimeError, r"bias of shape \[3\]"),
        (lambda a: metalcore.matmul(a, a.T, residual=a), RuntimeError, "expanded size"),
        (lambda a: metalcore.matmul(a, a.T, activation="tanh"), ValueError, "activation must be one of"),
        (lambda a: metalcore.matmul(a, [1.0]), TypeError, "matmul: b must be a tensor"),
        (lambda a: metalcore.linear(a, a[None]), RuntimeError, "1 or 2 dimensions"),
        (lambda a: torch.ops.metalcore.matmul(a, a.T, None, None, "tanh", 1.0, 1.0), RuntimeError, "activation"),
        (lambda a: torch.ops.metalcore.matmul(a, a.T, a[0], None, "none", 1.0, 1.0), RuntimeError, "bias must have"),
    ],
)
def test_errors(device, call, error, message):
    with pytest.raises(error, match=message):
        call(tensor(2, 3, device=device))
