"""The symmetric rank-k update."""

import itertools

import pytest
import torch
from matrices import EPS
from references import check_operator
from rows import tuned

import metalcore

syrk = metalcore.linalg.syrk
SHAPES = [(1, 1), (3, 5), (5, 3), (63, 16), (64, 17), (65, 33), (130, 40), (2, 3, 20, 10), (5, 70, 1)]
TRIANGLES = {"full": lambda x: x, "lower": torch.tril, "upper": torch.triu}


@pytest.fixture(autouse=True)
def _kernel_everywhere():
    """The tests take the kernel on every GPU, except the test of calls that go to PyTorch."""
    with tuned("baseline"):
        yield


def reference(A, C=None, alpha=1.0, beta=1.0, transpose=False, triangle="full"):
    A = A.double()
    product = alpha * (A.mT @ A if transpose else A @ A.mT)
    return TRIANGLES[triangle](product if C is None else product + beta * C.double())


def assert_near(actual, expected, A, transpose=False):
    """The error is within 10 k eps of the largest possible sum; its terms are all about 1."""
    terms = A.shape[-2 if transpose else -1]
    size = max(1.0, A.abs().max().item() ** 2) if A.numel() else 1.0
    assert actual.shape == expected.shape
    torch.testing.assert_close(actual.cpu().double(), expected, rtol=0, atol=10 * (terms + 2) * EPS * size)


@pytest.mark.parametrize("triangle", TRIANGLES)
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_product(device, shape, transpose, triangle):
    A = torch.randn(shape)
    result = syrk(A.to(device), transpose=transpose, triangle=triangle)
    assert_near(result, reference(A, transpose=transpose, triangle=triangle), A, transpose)
    if triangle == "full":
        assert torch.equal(result, result.mT)


@pytest.mark.parametrize("triangle", TRIANGLES)
@pytest.mark.parametrize("alpha, beta", [(2.0, -0.5), (-1.0, 1.0), (1.0, 0.0), (0.0, 1.0)])
@pytest.mark.parametrize("shape", [(4, 6), (3, 70, 20)])
def test_scaled_and_added(device, shape, alpha, beta, triangle):
    A = torch.randn(shape)
    C = torch.randn(*shape[:-1], shape[-2])
    if beta == 0.0:
        C.fill_(float("nan"))
    if alpha == 0.0:
        A.fill_(float("nan"))
    result = syrk(A.to(device), C.to(device), alpha=alpha, beta=beta, triangle=triangle)
    expected = reference(A.nan_to_num(), C.nan_to_num(), alpha, beta, triangle=triangle)
    assert_near(result, expected, A.nan_to_num())


def test_strides_and_broadcasting(device):
    A = torch.randn(4, 3, 9, 20)[::2, :, :, 1::3].transpose(0, 1)
    C = torch.randn(2, 9, 9).mT
    assert_near(syrk(A.to(device), C.to(device)), reference(A, C), A)
    assert_near(syrk(A[0, 0].to(device), torch.ones((), device=device)), reference(A[0, 0], torch.ones(())), A)
    expanded = torch.randn(1, 6, 3).expand(5, 6, 3)
    assert_near(syrk(expanded.to(device), transpose=True), reference(expanded, transpose=True), expanded, True)


@pytest.mark.parametrize("shape", [(0, 0), (3, 0), (0, 3), (0, 3, 2), (2, 0, 3), (2, 3, 0)])
def test_empty(device, shape):
    for transpose, triangle in itertools.product((False, True), TRIANGLES):
        A = torch.randn(shape)
        C = torch.randn(reference(A, transpose=transpose).shape)
        options = {"transpose": transpose, "triangle": triangle}
        assert_near(syrk(A.to(device), C.to(device), beta=2.0, **options), reference(A, C, beta=2.0, **options), A)
        assert_near(syrk(A.to(device), **options), reference(A, **options), A)


def test_other_input_goes_to_torch():
    A = torch.randn(4, 3, dtype=torch.float64)
    torch.testing.assert_close(syrk(A, triangle="lower"), (A @ A.mT).tril())


def test_errors(device):
    A = torch.randn(3, 4, device=device)
    with pytest.raises(RuntimeError, match="triangle must be 'full', 'lower' or 'upper', not 'L'"):
        syrk(A, triangle="L")
    with pytest.raises(RuntimeError, match="at least 2 dimensions"):
        syrk(A[0])
    with pytest.raises(RuntimeError):
        syrk(A, A)


def test_a_bad_matrix_spoils_its_own_batch_entry_only(device):
    A = torch.randn(3, 70, 9)
    A[1, 5, 2] = float("nan")
    result = syrk(A.to(device)).cpu()
    assert result[[0, 2]].isfinite().all() and result[1, 5].isnan().all() and result[1, :5, :5].isfinite().all()


@pytest.mark.parametrize("triangle", TRIANGLES)
@pytest.mark.parametrize("transpose", [False, True])
def test_derivatives(device, transpose, triangle):
    options = {"alpha": 0.5, "beta": 2.0, "transpose": transpose, "triangle": triangle}
    A = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    n = A.shape[-1 if transpose else -2]
    C = torch.randn(n, n, dtype=torch.float64, requires_grad=True)
    operator = torch.ops.metalcore.syrk
    direct = lambda A, C: operator(A, C.expand(2, n, n), triangle, transpose, 0.5, 2.0)  # noqa: E731
    assert torch.autograd.gradcheck(direct, (A, C))
    assert torch.autograd.gradgradcheck(direct, (A, C))
    on_device = [x.detach().float().to(device).requires_grad_() for x in (A, C)]
    direction = torch.randn(2, n, n)
    ours = torch.autograd.grad(syrk(*on_device, **options), on_device, direction.to(device))
    theirs = torch.autograd.grad(reference(A, C, **options), (A, C), direction.double())
    for actual, expected in zip(ours, theirs):
        assert_near(actual, expected, A.detach())


def test_without_c_there_is_no_gradient_of_it(device):
    A = torch.randn(4, 3, device=device, requires_grad=True)
    syrk(A).sum().backward()
    assert_near(A.grad, 2 * A.detach().cpu().double().sum(0).expand(4, 3), A.detach())


def test_operator(device):
    A, C = torch.randn(2, 4, 3, device=device), torch.randn(2, 4, 4, device=device)
    check_operator(torch.ops.metalcore.syrk, A.requires_grad_(), C.requires_grad_(), "full", False, 1.0, 1.0)
    check_operator(torch.ops.metalcore.syrk, A, None, "lower", True, 2.0, 1.0)
    compiled = torch.compile(syrk, backend="aot_eager", fullgraph=True)
    assert_near(compiled(A, C), reference(A.detach().cpu(), C.detach().cpu()), A.detach())


@pytest.mark.only_on("cuda")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nvidia_gpus_take_torchs_product(device, dtype):
    A, C = torch.randn(3, 20, 5).to(dtype), torch.randn(20, 20).to(dtype)
    with tuned("hopper"):
        assert metalcore.explain("syrk", A.to(device)).variant == "torch"
        for options in ({}, {"transpose": True}, {"C": C, "alpha": 2.0, "triangle": "lower"}):
            on_device = {name: x.to(device) if name == "C" else x for name, x in options.items()}
            result, expected = syrk(A.to(device), **on_device), reference(A, **options)
            torch.testing.assert_close(result.cpu().double(), expected, rtol=torch.finfo(dtype).eps, atol=70 * EPS)


def test_explain():
    with tuned("baseline"):
        plan = metalcore.explain("syrk", (2, 65, 10))
        assert plan.kernels == ("syrk",) and plan.steps[0].grid[0] == 6
        assert metalcore.explain("syrk", (2, 65, 10), transpose=True).steps[0].grid[0] == 2
        assert metalcore.explain("syrk", (0, 65, 10)).kernels == ()


@pytest.mark.only_on("simulator")
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_are_clean_in_checking_mode(device, shape):
    A = torch.randn(shape)
    for transpose, triangle in itertools.product((False, True), TRIANGLES):
        options = {"transpose": transpose, "triangle": triangle}
        C = torch.randn(reference(A, transpose=transpose).shape)
        with metalcore.simulator.checking():
            result = syrk(A.to(device), C.to(device), **options)
        assert_near(result, reference(A, C, **options), A, transpose)
