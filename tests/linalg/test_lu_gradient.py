"""The derivatives of the LU family against PyTorch's, and its operators under PyTorch's tracing tools."""

import pytest
import torch
from matrices import EPS
from opinfo import check_samples
from references import check_operator, derivatives

import metalcore

ops = torch.ops.metalcore
NAMES = ["det", "inv", "inv_ex", "lu", "lu_factor", "lu_factor_ex", "lu_solve", "slogdet", "solve", "solve_ex"]


def floating(output):
    """The results that have derivatives, without the integers."""
    results = [output] if isinstance(output, torch.Tensor) else list(output)
    return [result for result in results if result.is_floating_point()]


def comparable(input, args, kwargs):
    """LU without pivoting is not on the CPU."""
    return kwargs.get("pivot", True)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "lu_solve"])
def test_opinfo_samples(device, name):
    check_samples(
        getattr(metalcore, name), f"linalg.{name}", device, torch.float32, orders=2, select=comparable, results=floating
    )


def test_lu_solve_samples(device):
    check_samples(metalcore.lu_solve, "linalg.lu_solve", device, torch.float32, orders=2)


def matrices(*shape):
    """Matrices with small condition numbers."""
    n = shape[-1]
    return torch.linalg.qr(torch.randn(shape))[0] + torch.randn(shape) / (4 * n**0.5) if n else torch.randn(shape)


FUNCTIONS = {
    "solve": (lambda m, A, B: m.solve(A, B), True),
    "solve, right": (lambda m, A, B: m.solve(A, B.mT, left=False), True),
    "solve, vector": (lambda m, A, B: m.solve(A, B[..., 0]), True),
    "inv": (lambda m, A: m.inv(A), False),
    "det": (lambda m, A: m.det(A), False),
    "slogdet": (lambda m, A: m.slogdet(A)[1], False),
    "lu": (lambda m, A: m.lu(A)[1:], False),
    "lu, wide": (lambda m, A: m.lu(A[..., : A.shape[-2] // 2 + 1, :])[1:], False),
    "lu, tall": (lambda m, A: m.lu(A[..., : A.shape[-2] // 2 + 1])[1:], False),
    "lu_factor": (lambda m, A: m.lu_factor(A)[0], False),
    "lu_solve": (lambda m, A, B: m.lu_solve(*m.lu_factor(A), B), True),
    "lu_solve, adjoint, right": (lambda m, A, B: m.lu_solve(*m.lu_factor(A), B.mT, left=False, adjoint=True), True),
}


@pytest.mark.parametrize("n", [2, 4, 7, 20, 40, 140])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_derivatives(device, name, n):
    function, with_B = FUNCTIONS[name]
    tensors = [matrices(2, n, n)] + [torch.randn(2, n, 3)] * with_B
    orders = 2 if n < 100 else 1
    actual = derivatives(lambda *given: function(metalcore, *given), [t.to(device) for t in tensors], orders)
    expected = derivatives(lambda *given: function(torch.linalg, *given), [t.double() for t in tensors], orders)
    condition = torch.linalg.cond(tensors[0].double()).max().item()
    parts = torch.linalg.lu(tensors[0].double())[1:]
    growth = max(torch.linalg.cond(part).max().item() for part in parts) if "lu" in name else 1.0
    for order, (ours, theirs) in enumerate(zip(actual, expected), 1):
        scale = max(1.0, theirs.abs().max().item())
        tolerance = 10 * max(n, 8) * EPS * (condition * growth) ** order * scale
        torch.testing.assert_close(ours.cpu().double(), theirs, rtol=0, atol=tolerance)


@pytest.mark.parametrize("n, rank", [(2, 1), (3, 2), (5, 4), (5, 3), (20, 19), (3, 0)])
def test_gradient_of_singular_determinants_is_the_cofactors(device, n, rank):
    # Small integers, whose elimination is exact: the last pivots are zeros.
    A = torch.zeros(n, n)
    A[:rank] = torch.eye(n)[:rank] + torch.eye(n).roll(1, -1)[:rank]
    cofactors = torch.tensor(
        [[(-1.0) ** (i + j) * torch.linalg.det(_minor(A, i, j)) for j in range(n)] for i in range(n)]
    )
    for create_graph in (False, True):
        on_device = A.to(device).requires_grad_()
        value = metalcore.det(on_device)
        assert value == 0
        (gradient,) = torch.autograd.grad(value, on_device, create_graph=create_graph)
        torch.testing.assert_close(gradient.detach().cpu(), cofactors, rtol=0, atol=10 * n * EPS * max(1, n))


def _minor(A, i, j):
    rows = [k for k in range(len(A)) if k != i]
    columns = [k for k in range(len(A)) if k != j]
    return A[rows][:, columns]


def test_double_backward_of_singular_and_other_determinants_in_one_batch(device):
    A = torch.stack([torch.diag(torch.tensor([2.0, 3.0, 0.0])), matrices(3, 3)])
    actual = derivatives(lambda A: FUNCTIONS["det"][0](metalcore, A), [A.to(device)], 1)[0].cpu()
    expected = [torch.linalg.det(_minor(A[0], i, j)) * (-1.0) ** (i + j) for i in range(3) for j in range(3)]
    direction = torch.randn(2, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(actual[0], torch.tensor(expected).view(3, 3) * direction[0])
    leaf = A.to(device).requires_grad_()
    (gradient,) = torch.autograd.grad(metalcore.det(leaf).sum(), leaf, create_graph=True)
    assert gradient.shape == A.shape and torch.autograd.grad(gradient[1].sum(), leaf)[0][1].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_has_gradients(device, dtype):
    A = matrices(5, 5).to(dtype)
    for name in ("inv", "det", "lu"):
        gradient = derivatives(lambda A: FUNCTIONS[name][0](metalcore, A), [A.to(device)], 1)[0]
        expected = derivatives(lambda A: FUNCTIONS[name][0](torch.linalg, A), [A.double()], 1)[0]
        assert gradient.dtype == dtype
        scale = torch.linalg.cond(A.double()).item() ** 2 * max(1.0, expected.abs().max().item())
        torch.testing.assert_close(gradient.cpu().double(), expected, rtol=0, atol=50 * torch.finfo(dtype).eps * scale)


OPERATORS = {
    "lu_factor_ex": lambda A, B: ops.lu_factor_ex(A, True)[0],
    "lu_factor_ex, wide": lambda A, B: ops.lu_factor_ex(A[:2], True)[0],
    "lu_factor_ex, tall": lambda A, B: ops.lu_factor_ex(A[:, :2], True)[0],
    "lu": lambda A, B: ops.lu(A, True)[1:],
    "solve_ex": lambda A, B: ops.solve_ex(A, B, True, True)[0],
    "solve_ex, right": lambda A, B: ops.solve_ex(A, B.mT, False, False)[0],
    "lu_solve": lambda A, B: ops.lu_solve(*ops.lu_factor_ex(A, True)[:2], B, True, False),
    "lu_solve, adjoint": lambda A, B: ops.lu_solve(*ops.lu_factor_ex(A, True)[:2], B, True, True),
    "lu_solve, right": lambda A, B: ops.lu_solve(*ops.lu_factor_ex(A, True)[:2], B.mT, False, False),
    "lu_solve, right, adjoint": lambda A, B: ops.lu_solve(*ops.lu_factor_ex(A, True)[:2], B.mT, False, True),
    "inv_ex": lambda A, B: ops.inv_ex(A)[0],
    "det": lambda A, B: ops.det(A)[0],
    "slogdet": lambda A, B: ops.slogdet(A)[1],
}


@pytest.mark.parametrize("name", OPERATORS)
def test_gradcheck_of_the_formulas(name):
    # The operators on CPU tensors: the same derivatives, in float64.
    A = (torch.randn(4, 4, dtype=torch.float64) + 3 * torch.eye(4)).requires_grad_()
    B = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    inputs = (A, B) if "solve" in name else (A,)
    call = OPERATORS[name] if "solve" in name else lambda A: OPERATORS[name](A, None)
    assert torch.autograd.gradcheck(call, inputs)
    assert torch.autograd.gradgradcheck(call, inputs)


@pytest.mark.parametrize("where, shape", [("cpu", (2, 3, 3)), ("device", (2, 3, 3)), ("device", (0, 3, 3))])
def test_opcheck(device, where, shape):
    place = device if where == "device" else "cpu"
    A, B = matrices(*shape).to(place).requires_grad_(), torch.randn(*shape[:-1], 2, device=place, requires_grad=True)
    LU, pivots, _ = (result.detach() for result in ops.lu_factor_ex(A, True))
    check_operator(ops.lu_factor_ex, A, True)
    check_operator(ops.lu, A, True)
    check_operator(ops.solve_ex, A, B, True, True)
    check_operator(ops.solve_ex, A, B.mT, False, False)
    check_operator(ops.inv_ex, A)
    check_operator(ops.det, A)
    check_operator(ops.slogdet, A)
    check_operator(ops.lu_solve, LU.requires_grad_(), pivots, B, True, False)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_compile(device, name):
    function, with_B = FUNCTIONS[name]

    def call(*tensors):
        return [result * 2 for result in floating(function(metalcore, *[tensor + 0 for tensor in tensors]))]

    leaves = [matrices(2, 5, 5).to(device).requires_grad_()]
    leaves += [torch.randn(2, 5, 3, device=device).requires_grad_()] * with_B
    expected = call(*leaves)
    torch.compiler.reset()
    actual = torch.compile(call, backend="aot_eager", fullgraph=True)(*leaves)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(actual, expected))
    for ours, theirs in zip(
        torch.autograd.grad([a.sum() for a in actual], leaves), torch.autograd.grad([e.sum() for e in expected], leaves)
    ):
        torch.testing.assert_close(ours, theirs)
