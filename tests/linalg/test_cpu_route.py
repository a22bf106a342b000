"""PyTorch's op on the CPU where a tuning row says that it is faster: the same results as there, bit for bit, and
gradients, explanations and overrides as with the kernels."""

import pytest
import torch
from cases import CASES
from rows import tuned

import metalcore
from metalcore import _C
from metalcore._core.registry import OPS

pytestmark = pytest.mark.only_on("simulator", "mps")

EVERYWHERE = [0, 2**63 - 1, 1, 2**63 - 1]
WHY = "PyTorch's own op is faster on the CPU"
# These functions end in one call of LAPACK. The others add operations of their own to such calls.
SAME_BITS = {
    "cholesky", "cholesky_ex", "eigh", "eigvalsh", "geqrf", "householder_product", "inv", "inv_ex", "lu_factor",
    "ldl_factor", "ldl_factor_ex", "lu_factor_ex", "lu_solve", "ormqr", "qr", "solve", "solve_ex", "solve_triangular",
    "svd", "svdvals",
}  # fmt: skip
# PyTorch has no op for these operators, or multiplies matrices in their place.
WITHOUT_ROUTE = {"syrk", "schur", "eigh_tridiagonal", "matrix_exp", "ldl_solve"}
ROUTED = {
    name: case
    for name, case in CASES.items()
    if case.op.family == "linalg"
    and case.op.operators
    and not WITHOUT_ROUTE.intersection(case.op.operators)
    and name not in ("ormqr, complex", "matrix_power, fifth")
}


@pytest.fixture
def everywhere(device):
    """All sizes take the CPU."""
    regions = [(t["table"], t["field"], EVERYWHERE) for t in _C.tunables(device) if t["field"].endswith("cpu")]
    assert len(regions) >= 12
    _C.use_measured(device, _C.gpu_family(device), regions)
    yield
    _C.use_measured(device, _C.gpu_family(device), [])


@pytest.mark.parametrize("name", ROUTED)
def test_results_and_gradients_are_those_of_the_cpu(device, everywhere, name):
    case = ROUTED[name]
    leaves = case.leaves(device)
    before = _C.calls_on_cpu()
    torch.manual_seed(0)
    found = case.call(*leaves)
    assert _C.calls_on_cpu() > before
    on_cpu = [leaf.detach().cpu().requires_grad_(leaf.requires_grad) for leaf in leaves]
    torch.manual_seed(0)
    expected = case.op.compute(case.sample, on_cpu, case.op.reference)
    for ours, theirs in zip(found, expected):
        assert ours.device == leaves[0].device and ours.is_contiguous()
        if case.op.name in SAME_BITS:
            assert torch.equal(ours.cpu(), theirs)
        else:
            assert_near(ours.cpu(), theirs)
    if case.backward:
        found, expected = ([value for value in values if value.requires_grad] for values in (found, expected))
        directions = [torch.randn(theirs.shape) for theirs in expected]
        ours = torch.autograd.grad(found, leaves, [direction.to(device) for direction in directions])
        theirs = torch.autograd.grad(expected, on_cpu, directions)
        for gradient, its in zip(ours, theirs):
            assert gradient.device == leaves[0].device
            assert_near(gradient.cpu(), its)


def assert_near(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-3 * max(1.0, theirs.abs().max().item()))


@pytest.mark.parametrize("name", sorted({case.op.name for case in ROUTED.values()}))
def test_explain_names_the_cpu_and_what_is_copied(everywhere, name):
    sample = OPS[name].smallest_sample()
    options = {option: value for option, value in sample.options.items() if option != "rtol"}
    explained = metalcore.explain(name, *(tuple(t.shape) for t in arguments_of(sample)), **options)
    assert (
        "cpu" in explained.variant.split(", ") and WHY in explained.why and "measured on this machine" in explained.why
    )
    assert "aten::copy_" in explained.by_torch and len(explained.by_torch) > 2


def arguments_of(sample):
    made = sample.arguments(*[torch.zeros(shape) for shape in sample.shapes])
    return [value for value in made if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize("op", ["svd", "eigh"])
def test_the_crossover_of_gpus_that_nobody_has_measured(op):
    plan = lambda *shape: metalcore.explain(op, shape).variant  # noqa: E731
    large = "blocked" if op == "svd" else "tridiagonal"
    with tuned("apple7"):
        assert [plan(512, 512), plan(513, 513), plan(1, 513, 513), plan(2, 513, 513)] == [large, "cpu", "cpu", large]
        assert [plan(9, 1024, 1024), plan(9, 1025, 1025)] == [large, "cpu"]
        assert "an estimate" in metalcore.explain(op, (513, 513)).why
        if op == "svd":  # the smaller side counts
            assert [plan(5000, 512), plan(512, 5000), plan(513, 5000)] == ["blocked", "blocked", "cpu"]
    for family in ("hopper", "simulator", ""):
        with tuned(family):
            assert "cpu" not in {plan(n, n) for n in (513, 1025, 4096)} or family == "" and torch._C._has_mps


@pytest.mark.parametrize("values", [metalcore.svdvals, metalcore.eigvalsh])
def test_a_matrix_beyond_the_crossover(device, values):
    A = torch.randn(513, 513)
    reference = getattr(torch.linalg, values.__name__)
    with tuned("apple7"):
        assert torch.equal(values(A.to(device)).cpu(), reference(A))


LAYOUTS = {
    "columns first": lambda a: a.mT.contiguous().mT,
    "strided": lambda a: a.repeat_interleave(2, -1)[..., ::2],
    "expanded": lambda a: a[:1].expand(3, 8, 8),
    "batches": lambda a: a.reshape(3, 1, 8, 8).transpose(0, 1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["svd", "eigh", "qr", "inv", "solve"])
def test_layouts(device, everywhere, name, layout):
    make, matrices = LAYOUTS[layout], torch.randn(3, 8, 8) + 4 * torch.eye(8)
    more = (torch.randn(8, 3),) if name == "solve" else ()
    ours = getattr(metalcore, name)(make(matrices.to(device)), *(b.to(device) for b in more))
    theirs = getattr(torch.linalg, name)(make(matrices), *more)
    for found, expected in zip(*([x] if isinstance(x, torch.Tensor) else x for x in (ours, theirs))):
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_and_out(device, everywhere, dtype):
    A = torch.randn(2, 9, 7, device=device).to(dtype)
    out = tuple(torch.empty(0, dtype=dtype, device=device) for _ in range(3))
    metalcore.svd(A, full_matrices=False, out=out)
    for ours, theirs in zip(out, torch.linalg.svd(A.cpu().float(), full_matrices=False)):
        assert torch.equal(ours.cpu(), theirs.to(dtype))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_concern_their_own_matrix(device, everywhere, bad):
    A = torch.randn(3, 6, 6)
    A[1, 2, 4] = bad  # above the diagonal
    kept = A[::2]
    for found, expected in zip(metalcore.svd(A.to(device)), torch.linalg.svd(kept)):
        assert torch.equal(found[::2].cpu(), expected) and found[1].isnan().all()
    for found, expected in zip(metalcore.eigh(A.to(device), "U"), torch.linalg.eigh(kept, "U")):
        assert torch.equal(found[::2].cpu(), expected) and found[1].isnan().all()
    clean = A.nan_to_num(0, 0)
    for found, expected in zip(metalcore.eigh(A.to(device), "L"), torch.linalg.eigh(clean, "L")):
        assert torch.equal(found.cpu(), expected)


def test_lu_without_pivoting_stays_on_the_gpu(device, everywhere):
    A = (torch.randn(5, 5) + 5 * torch.eye(5)).to(device)
    _, L, U = metalcore.lu(A, pivot=False)
    torch.testing.assert_close(L @ U, A)
    assert metalcore.explain("lu", A, pivot=False).variant == "simd"


def test_a_compiled_graph(device, everywhere):
    A = torch.randn(2, 6, 5, device=device)
    compiled = torch.compile(lambda A: metalcore.svd(A, full_matrices=False), backend="aot_eager", fullgraph=True)
    for ours, theirs in zip(compiled(A), metalcore.svd(A, full_matrices=False)):
        assert torch.equal(ours, theirs) and ours.stride() == theirs.stride()


@pytest.mark.parametrize("name, function", [("svd", torch.linalg.svdvals), ("eigh", torch.linalg.eigvalsh),
                                            ("solve", lambda A: torch.linalg.solve(A, A.mT))])  # fmt: skip
def test_overrides_take_the_same_route_and_the_report_says_so(device, everywhere, name, function):
    A = torch.randn(2, 6, 6) + 6 * torch.eye(6)
    ours, theirs = A.to(device).requires_grad_(), A.clone().requires_grad_()
    with metalcore.enable_pytorch_overrides(name):
        found = function(ours)
        (row,) = [row for row in metalcore.report().rows if row.left]
        assert row.ran == 0 and sum(row.left.values()) == 1 and "op on the CPU is faster" in next(iter(row.left))
        found.sum().backward()
    expected = function(theirs)
    expected.sum().backward()
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.grad.cpu(), theirs.grad, rtol=1e-4, atol=1e-4)
