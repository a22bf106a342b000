"""cholesky and cholesky_ex in place of torch.linalg's: arguments, results, layouts, dtypes, errors, derivatives."""

import pytest
import torch
from cholesky_cases import check_factor, random
from derivatives import derivatives
from matrices import EPS
from opinfo import check_samples
from references import assert_same_error, check_operator
from rows import tuned

import metalcore


def test_are_the_namesakes(device):
    assert metalcore.cholesky is metalcore.linalg.cholesky and metalcore.cholesky_ex is metalcore.linalg.cholesky_ex
    A = random(4, 4).to(device)
    result = metalcore.cholesky_ex(A)
    assert isinstance(result, torch.return_types.linalg_cholesky_ex)
    assert result[0] is result.L and result[1] is result.info
    assert result.info.shape == () and result.info.dtype == torch.int32
    assert torch.equal(metalcore.cholesky(A=A), result.L)
    assert metalcore.cholesky_ex(A.expand(2, 3, 4, 4), upper=True).info.shape == (2, 3)


@pytest.mark.parametrize("shape", [(0, 0), (3, 0, 0), (0, 3, 3), (0, 0, 0), (2, 0, 300, 300)])
def test_empty(device, shape):
    for upper in (False, True):
        ours, theirs = (
            torch_or_ours.cholesky_ex(torch.empty(shape, device=where), upper=upper)
            for torch_or_ours, where in ((metalcore, device), (torch.linalg, "cpu"))
        )
        assert ours.L.shape == theirs.L.shape and torch.equal(ours.info.cpu(), theirs.info)
        assert metalcore.cholesky(torch.empty(shape, device=device), upper=upper).shape == shape


LAYOUTS = {
    "transposed": lambda n: random(3, n, n).mT,
    "every other": lambda n: random(4, n, n).repeat_interleave(2, 1).repeat_interleave(3, 2)[::2, 1::2, ::3],
    "with an offset": lambda n: random(3, n + 5, n + 5)[1:, 4:-1, 4:-1],
    "expanded batch": lambda n: random(1, n, n).expand(4, n, n),
    "permuted batches": lambda n: random(2, 3, n, n).permute(1, 0, 2, 3),
    "batches last": lambda n: random(3, n, n).permute(1, 2, 0).contiguous().permute(2, 0, 1),
}


@pytest.mark.parametrize("n", [6, 20, 50, 90, 270])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(device, layout, n):
    A = LAYOUTS[layout](n)
    # The layout on the device is the same: A.to(device) might pack the elements.
    elements = torch.empty(0).set_(A.untyped_storage())
    on_device = elements.to(device).as_strided(A.shape, A.stride(), A.storage_offset())
    for upper in (False, True):
        L = metalcore.cholesky(on_device, upper=upper)
        assert L.is_contiguous()
        assert torch.equal(L, metalcore.cholesky(A.contiguous().to(device), upper=upper))
        check_factor(A.reshape(-1, n, n), L.cpu().view(-1, n, n), upper, [layout] * L.numel())


def test_out(device):
    A = random(3, 6, 6).to(device)
    expected = metalcore.cholesky_ex(A)
    L, info = torch.empty(3, 6, 12, device=device)[..., ::2], torch.empty(0, dtype=torch.int32, device=device)
    result = metalcore.cholesky_ex(A, out=(L, info))
    assert result.L is L and result.info is info
    assert torch.equal(L, expected.L) and torch.equal(info, expected.info)
    assert metalcore.cholesky(A, out=A) is A  # in place of the input
    assert torch.equal(A, expected.L)


def test_out_that_does_not_fit(device):
    A = random(3, 3).to(device)
    new = lambda **kwargs: torch.empty(0, **{"device": device, **kwargs})  # noqa: E731
    with pytest.raises(RuntimeError, match="Expected out tensor to have dtype"):
        metalcore.cholesky_ex(A, out=(new(), new()))
    with pytest.raises(RuntimeError, match="Expected out tensor to be on"):
        metalcore.cholesky(A, out=new(device="cpu"))
    with pytest.raises(TypeError, match="'out' must be tuple of Tensors, not Tensor"):
        metalcore.cholesky_ex(A, out=new())
    with pytest.raises(TypeError, match="'out' must be Tensor, not tuple"):
        metalcore.cholesky(A, out=(new(),))
    with pytest.raises(TypeError, match="expected tuple of 2 elements but got 1"):
        metalcore.cholesky_ex(A, out=(new(),))
    for wrong in (3, (new(), None)):
        with pytest.raises(TypeError, match="'out' must be of Tensors, not of (int|NoneType)"):
            metalcore.cholesky_ex(A, out=wrong)
        with pytest.raises(TypeError, match="'out' must be of Tensors, not of (int|NoneType)"):
            metalcore.cond(A, out=wrong)
    with pytest.raises(RuntimeError, match="don't support automatic differentiation"):
        metalcore.cholesky(A.requires_grad_(), out=new())


@pytest.mark.parametrize("name", ["cholesky", "cholesky_ex"])
@pytest.mark.parametrize(
    "argument",
    [
        lambda device: torch.randn(3, device=device),
        lambda device: torch.tensor(1.0, device=device),
        lambda device: torch.randn(2, 3, device=device),
        lambda device: torch.ones(3, 3, dtype=torch.int32, device=device),
        lambda device: [1.0],
        lambda device: None,
    ],
)
def test_errors_are_torchs(device, name, argument):
    assert_same_error(
        lambda: getattr(metalcore, name)(argument(device)), lambda: getattr(torch.linalg, name)(argument("cpu"))
    )


@pytest.mark.parametrize("shape", [(3, 3), (4, 3, 3), (2, 3, 40, 40)])
def test_the_error_of_a_matrix_without_a_factor_is_torchs(device, shape):
    A = random(*shape)
    A.view(-1, *shape[-2:])[-1, 2, 2] = -1
    for name, options in (("cholesky", {}), ("cholesky_ex", {"check_errors": True})):
        assert_same_error(
            lambda: getattr(metalcore, name)(A.to(device), **options), lambda: getattr(torch.linalg, name)(A, **options)
        )


@pytest.mark.parametrize("name", ["cholesky", "cholesky_ex"])
def test_opinfo(device, name):  # PyTorch defines no error inputs for either
    check_samples(
        getattr(metalcore, name),
        f"linalg.{name}",
        device,
        torch.float32,
        results=lambda output: output[0] if name == "cholesky_ex" else output,
    )


@pytest.mark.parametrize(
    "shape, variant, kernels",
    [
        ((3, 3), "simd", ["cholesky_simd_4"]),
        ((4096, 32, 32), "simd", ["cholesky_simd_32"]),
        ((33, 33), "block", ["cholesky_block_64"]),
        ((7, 128, 128), "block", ["cholesky_block_128"]),
        ((257, 257), "blocked", ["cholesky_triangle", "cholesky_panel", "syrk", "cholesky_diagonal"]),
        ((0, 0), "empty", []),
        ((0, 5, 5), "empty", []),
    ],
)
def test_explain(shape, variant, kernels):
    for op in ("cholesky", "cholesky_ex"):
        plan = metalcore.explain(op, shape, upper=True)
        assert plan.variant == variant
        waits = ["info_any"] * (op == "cholesky")
        assert list(plan.kernels) == kernels + waits
        assert "x".join(map(str, shape[-2:])) in plan.why
    with pytest.raises(ValueError, match="square"):
        metalcore.explain("cholesky", (*shape[:-1], shape[-1] + 1))


def test_large_single_matrices_go_to_torch_on_nvidia(device):
    with tuned("hopper"):
        plan = metalcore.explain("cholesky", (1, 1024, 1024))
        assert plan.variant == "torch" and plan.kernels == ("info_any",) and "PyTorch" in plan.why
        assert metalcore.explain("cholesky", (1024, 1024), upper=True).variant == "blocked"
        assert metalcore.explain("cholesky", (2, 1024, 1024)).variant == "blocked"
        A = random(1, 1024, 1024)
        L, info = metalcore.cholesky_ex(A.to(device))
    check_factor(A, L.cpu(), False, ["random"])
    assert info.tolist() == [0]


@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize("n", [1, 5, 20, 70, 260])
def test_derivatives(device, n, upper):
    A = random(2, n, n)
    actual = derivatives(lambda A: metalcore.cholesky(A, upper=upper), [A.to(device)], 2)
    expected = derivatives(lambda A: torch.linalg.cholesky(A, upper=upper), [A.double()], 2)
    condition = torch.linalg.cond(A.double()).max().item()
    for order, (ours, theirs) in enumerate(zip(actual, expected), 1):
        tolerance = 10 * max(8, n) * EPS * condition**order * theirs.abs().max().item()
        torch.testing.assert_close(ours.cpu().double(), theirs, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_has_gradients(device, dtype):
    A = random(6, 6).to(device=device, dtype=dtype).requires_grad_()
    metalcore.cholesky(A).sum().backward()
    B = A.detach().float().requires_grad_()
    metalcore.cholesky(B).to(dtype).sum().backward()
    assert A.grad.dtype == dtype and torch.equal(A.grad, B.grad.to(dtype))


def test_gradcheck_of_the_formula():
    # The operator on CPU tensors: the same derivative, in float64.
    A = random(2, 4, 4).double().requires_grad_()
    for upper in (False, True):
        factor = lambda A: torch.ops.metalcore.cholesky_ex((A + A.mT) / 2, upper)[0]  # noqa: E731
        assert torch.autograd.gradcheck(factor, (A,))
        assert torch.autograd.gradgradcheck(factor, (A,))


@pytest.mark.parametrize("where, shape", [("cpu", (2, 4, 4)), ("device", (2, 4, 4)), ("device", (0, 0))])
def test_opcheck(device, where, shape):
    A = random(*shape).to(device if where == "device" else "cpu")
    check_operator(torch.ops.metalcore.cholesky_ex, A.requires_grad_(), False)
    check_operator(torch.ops.metalcore.cholesky_ex, A.detach(), True)


def test_compile(device):
    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(A):
        L, info = metalcore.cholesky_ex(2 * A)
        return L + 1, info

    A = random(3, 5, 5).to(device).requires_grad_()
    L, info = compiled(A)
    assert torch.equal(L, metalcore.cholesky(2 * A.detach()) + 1) and not info.any()
    L.sum().backward()
    gradient, A.grad = A.grad, None
    metalcore.cholesky(2 * A).sum().backward()
    torch.testing.assert_close(gradient, A.grad)


def test_compile_with_the_check_of_errors(device):
    A = random(3, 5, 5).to(device)
    compiled = torch.compile(metalcore.cholesky, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(A), metalcore.cholesky(A))
