"""The LU family as replacements for torch.linalg's: arguments, results, layouts, dtypes, errors, explain."""

import pytest
import torch
from lu_cases import check_factors, check_solution
from matrices import EPS
from opinfo import error_inputs
from references import assert_same_error

import metalcore

NAMES = ["det", "inv", "inv_ex", "lu", "lu_factor", "lu_factor_ex", "lu_solve", "slogdet", "solve", "solve_ex"]
OF_ONE = ["det", "inv", "inv_ex", "lu", "lu_factor", "lu_factor_ex", "slogdet"]


def tensors(output):
    return [output] if isinstance(output, torch.Tensor) else list(output)


@pytest.mark.parametrize("name", NAMES)
def test_is_the_namesake(device, name):
    function, namesake = getattr(metalcore, name), getattr(torch.linalg, name)
    assert function is getattr(metalcore.linalg, name)
    A, B = torch.randn(2, 4, 4) + 4 * torch.eye(4), torch.randn(2, 4, 3)
    LU, pivots = torch.linalg.lu_factor(A)
    inputs = {"solve": (A, B), "solve_ex": (A, B), "lu_solve": (LU, pivots, B)}.get(name, (A,))
    ours, theirs = function(*[t.to(device) for t in inputs]), namesake(*inputs)
    assert type(ours) is type(theirs)
    for actual, expected in zip(tensors(ours), tensors(theirs)):
        assert actual.dtype == expected.dtype
        torch.testing.assert_close(actual.cpu(), expected, rtol=100 * EPS, atol=100 * EPS)


@pytest.mark.parametrize("name", OF_ONE)
@pytest.mark.parametrize("shape", [(0, 0), (3, 0, 0), (0, 3, 3), (2, 0, 5, 5), (0, 200, 200), (0, 0, 0)])
def test_empty(device, name, shape):
    ours = getattr(metalcore, name)(torch.empty(shape, device=device))
    theirs = getattr(torch.linalg, name)(torch.empty(shape))
    for actual, expected in zip(tensors(ours), tensors(theirs)):
        assert torch.equal(actual.cpu(), expected)


@pytest.mark.parametrize("name", ["lu", "lu_factor", "lu_factor_ex"])
@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (2, 3, 0), (2, 0, 3)])
def test_empty_rectangles(device, name, shape):
    ours = getattr(metalcore, name)(torch.empty(shape, device=device))
    theirs = getattr(torch.linalg, name)(torch.empty(shape))
    for actual, expected in zip(ours, theirs):
        assert torch.equal(actual.cpu(), expected)


LAYOUTS = {
    "transposed": lambda n: torch.randn(3, n, n).mT,
    "every other": lambda n: torch.randn(6, 2 * n + 1, 3 * n)[::2, 1::2, ::3],
    "with an offset": lambda n: torch.randn(4, n + 4, n + 9)[1:, 3 : 3 + n, 7 : 7 + n],
    "expanded batch": lambda n: torch.randn(1, n, n).expand(5, n, n),
    "permuted batches": lambda n: torch.randn(2, 3, 4, n, n).permute(2, 0, 1, 3, 4),
    "batches in the middle": lambda n: torch.randn(n, 3, 2, n).permute(1, 2, 0, 3),
}


def same_layout(A, device):
    """The same layout on the device: A.to(device) might pack the elements."""
    return torch.empty(0).set_(A.untyped_storage()).to(device).as_strided(A.shape, A.stride(), A.storage_offset())


@pytest.mark.parametrize("n", [3, 7, 20, 32, 40, 140])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(device, layout, n):
    A, B = LAYOUTS[layout](n), LAYOUTS[layout](n)
    on_device, right = same_layout(A, device), same_layout(B, device)
    names = [layout] * 24
    flat, of_B = A.reshape(-1, n, n), B.reshape(-1, n, n)
    results = metalcore.lu_factor_ex(on_device)
    LU, pivots, info = (r.cpu().reshape(flat.shape[0], *r.shape[A.ndim - 2 :]) for r in results)
    check_factors(flat, LU, pivots, info, names)
    X = metalcore.solve(on_device, right)
    assert X.is_contiguous()
    check_solution(flat, X.cpu().reshape(of_B.shape), of_B, names)
    X = metalcore.solve(on_device, right, left=False)
    assert X.is_contiguous()
    check_solution(flat, X.cpu().reshape(of_B.shape), of_B, names, left=False)


@pytest.mark.parametrize("name", NAMES)
def test_out(device, name):
    A, B = torch.randn(2, 5, 5, device=device), torch.randn(2, 5, 2, device=device)
    LU, pivots = metalcore.lu_factor(A)
    inputs = {"solve": (A, B), "solve_ex": (A, B), "lu_solve": (LU, pivots, B)}.get(name, (A,))
    function = getattr(metalcore, name)
    expected = function(*inputs)
    single = isinstance(expected, torch.Tensor)
    out = [torch.empty(0, dtype=e.dtype, device=device) for e in tensors(expected)]
    result = function(*inputs, out=out[0] if single else tuple(out))
    assert all(actual is target for actual, target in zip(tensors(result), out))
    assert all(torch.equal(target, e) for target, e in zip(out, tensors(expected)))
    with pytest.raises(RuntimeError, match="don't support automatic differentiation"):
        function(inputs[0].detach().requires_grad_(), *inputs[1:], out=out[0] if single else tuple(out))


def test_out_of_another_shape(device):
    """PyTorch warns where it resizes a tensor that has elements."""
    A, B = torch.randn(3, 3) + 4 * torch.eye(3), torch.randn(3, 2)
    messages = []
    for solve, place in ((metalcore.solve, device), (torch.linalg.solve, "cpu")):
        out = torch.empty(4, 5, device=place)
        with pytest.warns(UserWarning, match="was resized") as warned:
            solve(A.to(place), B.to(place), out=out)
        assert out.shape == (3, 2)
        messages.append(str(warned[0].message).split(" (Triggered")[0])
    assert messages[0] == messages[1]


@pytest.mark.parametrize("of_factors, of_columns", [((), (3,)), ((1,), (2, 3)), ((3,), (1,))], ids=str)
def test_lu_solve_in_vmap(device, of_factors, of_columns):
    """PyTorch's rule for vmap takes wrong pivots where the batches broadcast."""
    A, B = torch.randn(2, *of_factors, 4, 4, device=device), torch.randn(2, *of_columns, 4, 3, device=device)
    LU, pivots = metalcore.lu_factor(A)
    found = torch.func.vmap(metalcore.lu_solve)(LU, pivots, B)
    expected = torch.stack([metalcore.lu_solve(LU[i], pivots[i], B[i]) for i in range(2)])
    scale = expected.abs().max().item()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3 * scale)


CALLS = {
    "solve": [
        lambda f, t: f(t(3, 3), t(4)),
        lambda f, t: f(t(2, 3), t(3)),
        lambda f, t: f(t(3, 3), t(3), left=False),
        lambda f, t: f(t(2, 3, 3), t(3, 3, 1)),
        lambda f, t: f(t(3), t(3)),
        lambda f, t: f(t(3, 3), t(3).half()),
        lambda f, t: f(t(3, 3), t(3, 2), left=False),
        lambda f, t: f(t(3, 3), 1.0),
    ],
    "inv": [lambda f, t: f(t(2, 3)), lambda f, t: f(t(3)), lambda f, t: f(t(3, 3).int()), lambda f, t: f(None)],
    "det": [lambda f, t: f(t(2, 3)), lambda f, t: f(t(3)), lambda f, t: f(t(3, 3).int())],
    "slogdet": [lambda f, t: f(t(2, 3)), lambda f, t: f(t(3))],
    "lu": [lambda f, t: f(t(3)), lambda f, t: f(t(3, 3).int()), lambda f, t: f([1.0])],
    "lu_factor": [lambda f, t: f(t(3)), lambda f, t: f(t(3, 3).bool())],
    "lu_solve": [
        lambda f, t: f(t(2, 3), t(2).int(), t(2, 1)),
        lambda f, t: f(t(3, 3), t(3), t(3, 1)),
        lambda f, t: f(t(3, 3), t(2).int(), t(3, 1)),
        lambda f, t: f(t(3, 3), t(3).int(), t(3)),
        lambda f, t: f(t(3, 3), t(3).int(), t(4, 1)),
        lambda f, t: f(t(3, 3), t(1, 3).int(), t(3, 1)),
    ],
}


@pytest.mark.parametrize("name, call", [(name, call) for name, calls in CALLS.items() for call in calls])
def test_errors_are_torchs(device, name, call):
    has_torchs = device if torch.device(device).type == "cuda" else "cpu"
    assert_same_error(
        lambda: call(getattr(metalcore, name), lambda *shape: torch.ones(shape, device=device)),
        lambda: call(getattr(torch.linalg, name), lambda *shape: torch.ones(shape, device=has_torchs)),
    )


@pytest.mark.parametrize("name", ["inv", "inv_ex", "lu_factor", "lu_factor_ex", "solve", "solve_ex", "lu_solve"])
def test_error_inputs(device, name):
    for error in error_inputs(f"linalg.{name}", device):
        sample = error.sample_input
        with pytest.raises(error.error_type):
            getattr(metalcore, name)(sample.input, *sample.args, **sample.kwargs)


@pytest.mark.parametrize("name", ["inv_ex", "lu_factor_ex", "solve_ex"])
def test_check_errors(device, name):
    A = torch.ones(2, 3, 3)
    inputs = (A, A) if name == "solve_ex" else (A,)
    assert getattr(metalcore, name)(*[t.to(device) for t in inputs])[-1].tolist() == [2, 2]
    assert_same_error(
        lambda: getattr(metalcore, name)(*[t.to(device) for t in inputs], check_errors=True),
        lambda: getattr(torch.linalg, name)(*inputs, check_errors=True),
    )


@pytest.mark.parametrize("n", [1, 3, 8, 20, 50, 140])
def test_determinants(device, n):
    A = torch.randn(4, n, n) / n**0.5
    A[3, :, 0] = 0
    value, (sign, logarithm) = metalcore.det(A.to(device)).cpu().double(), metalcore.slogdet(A.to(device))
    expected, exact = torch.linalg.det(A.double()), torch.linalg.slogdet(A.double())
    condition = torch.linalg.cond(A[:3].double())
    # The factors are those of a matrix that differs by 10 n eps at most; a determinant's derivative is det(A) A⁻ᵀ.
    bound = 10 * n**2 * EPS * condition
    assert ((value - expected)[:3].abs() <= bound * expected[:3].abs()).all() and value[3] == 0
    assert torch.equal(sign.cpu().double(), exact.sign) and logarithm[3] == -torch.inf
    assert ((logarithm.cpu() - exact.logabsdet)[:3].abs() <= bound).all()


def test_determinants_do_not_overflow_on_the_way(device):
    A = torch.diag(torch.tensor([1e30, 1e30, 1e-30, 1e-30, 2.0])).to(device)
    torch.testing.assert_close(metalcore.det(A).item(), 2.0, rtol=8 * EPS, atol=0)
    assert metalcore.det(A[:2, :2]).item() == torch.inf and metalcore.det(A[2:4, 2:4]).item() == 0


@pytest.mark.parametrize(
    "op, shapes, variant, kernels",
    [
        ("inv", [(100000, 3, 3)], "thread", ["lu_thread_3"]),
        ("lu_factor", [(10, 12, 30)], "simd", ["lu_simd_32x0"]),
        ("solve", [(4096, 32, 32), (4096, 32)], "simd", ["lu_simd_32x4"]),
        ("solve", [(128, 128), (128, 128)], "block", ["lu_block_16", "lu_permute", "trsm_panel"]),
        ("det", [(5, 64, 64)], "block", ["lu_block_16", "lu_determinant"]),
        ("lu_factor_ex", [(3, 1500, 200)], "blocked", ["lu_looped_panel", "lu_rows", "lu_update"]),
        (
            "solve_ex",
            [(300, 300), (300,)],
            "blocked",
            ["lu_identity_permutation", "lu_block_8", "lu_rows", "lu_update", "lu_permute", "trsv_block_1x16"],
        ),
        ("lu_solve", [(7, 20, 20), (7, 20), (7, 20, 3)], "simd", ["lu_simd_32x4"]),
        ("lu", [(0, 5)], "empty", []),
    ],
)
def test_explain(op, shapes, variant, kernels):
    from rows import tuned

    with tuned("baseline"):
        plan = metalcore.explain(op, *shapes)
    waits = [] if op in ("lu", "lu_solve", "det") or op.endswith("_ex") else ["info_any"]
    assert plan.variant == variant and list(plan.kernels) == kernels + waits
    assert all(step.threadgroup[0] <= 1024 for step in plan.steps)


def test_explain_counts_the_broadcast_batch():
    steps = lambda *call: metalcore.explain(*call).steps[0].grid[0]  # noqa: E731
    assert steps("solve", (2, 1, 64, 64), (1, 3, 64, 2)) == 6
    assert steps("solve", (5, 64, 64), (64,)) == steps("solve", (64, 64), (5, 64, 1)) == 5
    assert steps("lu_solve", (20, 1, 20, 20), (20, 1, 20), (30, 20, 2)) == steps(
        "lu_solve", (600, 20, 20), (600, 20), (600, 20, 2)
    )
    assert metalcore.explain("solve", (0, 64, 64), (64, 2)).variant == "empty"
    with pytest.raises(ValueError, match="does not take these arguments: .*broadcast"):
        metalcore.explain("solve", (2, 4, 4), (3, 4, 2))


def test_explain_says_when_it_is_torchs(device):
    from rows import tuned

    with tuned("hopper"):
        plan = metalcore.explain("lu_factor", (2048, 2048))
    assert plan.variant == "torch" and "PyTorch" in plan.why and plan.kernels == ("info_any",)
