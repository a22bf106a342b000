"""geqrf, householder_product, ormqr, larft, larfb: float64, LAPACK and products of reflectors; derivatives."""

import pytest
import torch
from matrices import EPS, ORDERS, check_below, matrices, norm, unit
from opinfo import check_errors, check_samples, tensors
from references import assert_same_error, check_operator
from rows import tuned

import metalcore

# Below, at and above every boundary of the plans: (m, n).
SHAPES = {
    "simd": [(1, 1), (2, 3), (8, 8), (8, 9), (17, 16), (16, 17), (32, 32), (33, 32), (64, 32), (64, 1)],
    "block": [(65, 1), (64, 33), (20, 128), (128, 128), (129, 64), (257, 32), (513, 16), (1024, 16)],
    "blocked": [(1025, 3), (129, 65), (20, 129), (130, 260), (257, 65), (300, 200), (2048, 20), (2049, 17)],
}
CASES = [(variant, m, n) for variant, shapes in SHAPES.items() for m, n in shapes]


def upper(a):
    return a.triu()[..., : min(a.shape[-2:]), :]


def dense(a, tau):
    """H_0 H_1 … of packed reflectors, in float64."""
    a, tau = a.double(), tau.double()
    m, count = a.shape[-2], tau.shape[-1]
    Q = torch.eye(m).double().expand(*a.shape[:-2], m, m)
    V = a[..., :count].tril(-1) + torch.eye(m, count).double()
    for i in range(count):
        v = V[..., i : i + 1]
        Q = Q - tau[..., i, None, None] * (Q @ v) @ v.mT
    return Q


def steps(family, m, n):
    with tuned(family):
        return metalcore.explain("geqrf", (m, n)).steps


# The simulator's plans, where they are not the baseline's.
FAMILIES = [("baseline", *case) for case in CASES]
FAMILIES += [("simulator", *case) for case in CASES if steps("simulator", *case[1:]) != steps("baseline", *case[1:])]


@pytest.mark.parametrize("family, variant, m, n", FAMILIES)
def test_geqrf(device, family, variant, m, n):
    """Orthogonal H_0 H_1 …, and H_0 H_1 … R = A, for all named matrices; entry by entry as LAPACK for a random one."""
    cases = matrices(m, n)
    A = torch.stack(list(cases.values()))
    with tuned(family):
        assert family != "baseline" or metalcore.explain("geqrf", (m, n)).variant == variant
        a, tau = (x.cpu() for x in metalcore.geqrf(A.to(device)))
    assert a.shape == A.shape and tau.shape == (len(cases), min(m, n))
    bound = 10 * max(m, n) * EPS
    A, largest = unit(A)
    Q = metalcore.householder_product(a[..., :m].double(), tau.double()) if m > 600 else dense(a, tau)
    check_below(norm(Q.mT @ Q - torch.eye(Q.shape[-1])), bound, "QᵀQ = I", cases)
    R = (upper(a) if m > 600 else a.triu()).double() / largest
    check_below(norm(A - Q @ R) / norm(A).clamp(min=1e-300), bound, "A = QR", cases)
    expected = torch.geqrf(A[0] * largest[0])
    assert norm(a[0] - expected.a) <= bound * max(m, n) * norm(expected.a)
    assert (tau[0] - expected.tau).abs().max() <= bound * max(m, n)


@pytest.mark.parametrize("variant, m, n", [case for case in CASES if case[1] >= case[2]])
def test_householder_product(device, variant, m, n):
    a, tau = torch.geqrf(torch.randn(3, m, n))
    with tuned("baseline"):
        for count in sorted({n, max(n - 1, 0), n // 2, 1, 0}):
            assert metalcore.explain("householder_product", (m, n), (count,)).variant == variant
            Q = metalcore.householder_product(a.to(device), tau[:, :count].to(device)).cpu()
            expected = torch.linalg.householder_product(a.double(), tau[:, :count].double())
            check_below(norm(Q - expected), 10 * m * EPS * n**0.5, f"{count} reflectors", "abc")


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize(
    "m, count, columns",
    [(1, 1, 1), (7, 3, 5), (20, 16, 1), (20, 17, 64), (65, 65, 65), (300, 64, 70), (200, 130, 129), (2100, 20, 3)],
)
def test_ormqr(device, m, count, columns, left, transpose):
    a, tau = torch.geqrf(torch.randn(2, m, count))
    C = torch.randn(2, m, columns) if left else torch.randn(2, columns, m)
    expected = torch.ormqr(a.double(), tau.double(), C.double(), left, transpose)
    for family in ("baseline", ""):
        with tuned(family):
            actual = metalcore.ormqr(a.to(device), tau.to(device), C.to(device), left, transpose).cpu()
        check_below(norm(actual - expected), 10 * m * EPS * norm(C).max(), "Q C", "ab")


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("m, count", [(1, 1), (8, 3), (40, 40), (100, 70)])
def test_block_reflectors(device, m, count, left, transpose):
    """larft and larfb agree with the reflectors applied one by one, whatever lies on and above V's diagonal."""
    a, tau = torch.geqrf(torch.randn(3, m, count))
    tau[1] = 0  # H = I
    C = torch.randn(3, m, 5) if left else torch.randn(3, 5, m)
    T = metalcore.larft(a.to(device), tau.to(device))
    assert not T.cpu().tril(-1).any() and not T[1].cpu().any()
    Q = dense(a, tau)
    Q = Q.mT if transpose else Q
    actual = metalcore.larfb(a.to(device), T, C.to(device), left, transpose).cpu()
    check_below(norm(actual - (Q @ C.double() if left else C.double() @ Q)), 10 * m * EPS * norm(C).max(), "Q C", "abc")


def test_block_reflectors_broadcast_batches(device):
    a, tau = torch.geqrf(torch.randn(2, 1, 9, 4))
    T = metalcore.larft(a.to(device), tau.to(device))
    C = torch.randn(3, 9, 2)
    expected = dense(a, tau) @ C.double()
    assert norm(metalcore.larfb(a.to(device), T, C.to(device)).cpu() - expected).max() <= 90 * EPS * norm(C).max()


@pytest.mark.parametrize("m", ORDERS)
def test_all_sizes(device, m):
    """geqrf and the product of its reflectors give A's QR decomposition, square and with other widths."""
    for n in {m, (m + 1) // 2}:
        A = torch.randn(2, m, n)
        a, tau = metalcore.geqrf(A.to(device))
        Q = metalcore.householder_product(a, tau).cpu().double()
        bound = 10 * m * EPS
        assert norm(Q.mT @ Q - torch.eye(n)).max() <= bound
        assert (norm(A - Q @ upper(a.cpu()).double()) / norm(A)).max() <= bound
        R = metalcore.ormqr(a, tau, A.to(device), transpose=True).cpu()
        assert (norm(R - a.cpu().triu()) / norm(A)).max() <= bound


@pytest.mark.parametrize(
    "n",
    [
        256,
        512,
        pytest.param(1024, marks=pytest.mark.only_on("cuda")),
        pytest.param(2048, marks=pytest.mark.only_on("cuda")),
    ],
)
def test_large(device, n):
    A = torch.randn(n, n)
    a, tau = metalcore.geqrf(A.to(device))
    Q = metalcore.householder_product(a, tau)
    back = metalcore.ormqr(a, tau, upper(a)).cpu().double()
    Q = Q.cpu().double()
    assert norm(Q.mT @ Q - torch.eye(n)) <= 10 * n * EPS
    assert norm(back - A) <= 10 * n * EPS * norm(A)


@pytest.mark.parametrize("batch", [7, 4096])
@pytest.mark.parametrize("m, n", [(4, 4), (9, 5), (16, 16)])
def test_many_matrices(device, m, n, batch):
    A = torch.randn(batch, m, n)
    a, tau = metalcore.geqrf(A.to(device))
    Q = metalcore.householder_product(a, tau).cpu().double()
    assert (norm(A - Q @ upper(a.cpu()).double()) / norm(A)).max() <= 10 * m * EPS
    C = metalcore.ormqr(a, tau, A.to(device), transpose=True).cpu()
    assert (norm(C - a.cpu().triu()) / norm(A)).max() <= 10 * m * EPS


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("m, n", [(5, 4), (60, 30), (100, 50), (200, 150), (2100, 20)])
def test_a_bad_matrix_spoils_its_own_batch_entry_only(device, m, n, bad):
    A = torch.randn(3, m, n)
    expected = metalcore.geqrf(A.to(device))
    product = metalcore.householder_product(*expected)
    times = metalcore.ormqr(*expected, A.to(device))
    A[1, m - 1, 1] = bad
    a, tau = metalcore.geqrf(A.to(device))
    Q, C = metalcore.householder_product(a, tau), metalcore.ormqr(a, tau, A.to(device))
    assert not a[1].isfinite().all() and not Q[1].isfinite().all()
    for ours, theirs in zip((a, tau, Q, C), (*expected, product, times)):
        assert torch.equal(ours[::2], theirs[::2])


@pytest.mark.only_on("simulator")
@pytest.mark.parametrize("m, n", [(5, 4), (40, 20), (100, 40), (140, 70), (70, 140), (2060, 20)])
def test_kernels_are_clean_in_checking_mode(device, m, n):
    A = torch.randn(2, m, n)
    with metalcore.simulator.checking():
        a, tau = metalcore.geqrf(A.to(device))
        k = min(m, n)
        Q = metalcore.householder_product(a[..., :k], tau)
        C = metalcore.ormqr(a[..., :k], tau, Q)
    assert (norm(A - Q.cpu() @ upper(a.cpu())) / norm(A)).max() <= 10 * max(m, n) * EPS
    assert norm(C.cpu() - dense(a.cpu(), tau.cpu()) @ Q.cpu().double()).max() <= 10 * m * EPS * m**0.5


def test_no_reflectors_give_the_identity(device):
    for m, n in ((4, 3), (200, 140)):
        Q = metalcore.householder_product(torch.randn(2, m, n, device=device), torch.empty(2, 0, device=device))
        assert torch.equal(Q.cpu(), torch.eye(m, n).expand(2, m, n))


def test_opinfo_errors(device):
    check_errors(metalcore.ormqr, "ormqr", device, messages=True)  # there are none of the others


def test_block_reflectors_refuse_what_does_not_fit(device):
    V, tau, C = (torch.randn(shape, device=device) for shape in ((5, 3), (3,), (5, 2)))
    with pytest.raises(RuntimeError, match=r"larft: expected V \(\*, m, k\)"):
        metalcore.larft(V, tau[:2])
    with pytest.raises(RuntimeError, match=r"larft: expected V \(\*, m, k\)"):
        metalcore.larft(V.mT, torch.randn(5, device=device))
    with pytest.raises(RuntimeError, match=r"larfb: expected .* C \(\*, n, m\)"):
        metalcore.larfb(V, metalcore.larft(V, tau), C, left=False)


@pytest.mark.lenient
@pytest.mark.parametrize("m, n", [(150, 140), (30, 8), (2100, 70)])
def test_what_goes_to_torch(device, m, n):
    A, C = torch.randn(m, n), torch.randn(m, 3)
    with tuned("hopper"):
        plans = metalcore.explain("ormqr", (m, n), (n,), (m, 3)), metalcore.explain("geqrf", (m, n))
        assert "torch" in {plan.variant for plan in plans}
        a, tau = metalcore.geqrf(A.to(device))
        Q, product = metalcore.householder_product(a, tau), metalcore.ormqr(a, tau, C.to(device))
    expected = torch.geqrf(A.double())
    assert norm(Q.cpu() - torch.linalg.householder_product(*expected)) <= 10 * m * EPS * n
    assert norm(product.cpu() - torch.ormqr(*expected, C.double())) <= 10 * m * EPS * n * norm(C)


def test_ormqr_of_the_transpose_undoes_it(device):
    a, tau = metalcore.geqrf(torch.randn(4, 60, 40, device=device))
    C = torch.randn(4, 60, 9, device=device)
    back = metalcore.ormqr(a, tau, metalcore.ormqr(a, tau, C), transpose=True)
    assert norm((back - C).cpu()).max() <= 10 * 60 * EPS * norm(C.cpu()).max()


ops = torch.ops.metalcore
WITH_TAUS = [((4, 4), 4), ((5, 3), 3), ((6, 4), 2), ((2, 3, 4, 2), 2), ((3, 3), 1)]


def double(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("shape, count", WITH_TAUS)
def test_gradcheck_of_householder_product(shape, count):
    inputs = double(*shape), double(*shape[:-2], count)
    assert torch.autograd.gradcheck(ops.householder_product, inputs)
    assert torch.autograd.gradgradcheck(ops.householder_product, inputs)


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("shape", [(4, 4), (5, 3), (2, 3, 2)])
def test_gradcheck_of_ormqr(shape, left, transpose):
    other = (*shape[:-2], shape[-2], 3) if left else (*shape[:-2], 3, shape[-2])
    inputs = double(*shape), double(*shape[:-2], shape[-1]), double(*other)

    def ormqr(*inputs):
        return ops.ormqr(*inputs, left, transpose)

    assert torch.autograd.gradcheck(ormqr, inputs)
    assert torch.autograd.gradgradcheck(ormqr, inputs)


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("left", [True, False])
def test_gradcheck_of_block_reflectors(left, transpose):
    V, tau, C = double(5, 3), double(3), double(5, 2) if left else double(2, 5)

    def product(V, tau, C):
        return metalcore.larfb(V, metalcore.larft(V, tau), C, left, transpose)

    assert torch.autograd.gradcheck(product, (V, tau, C))
    assert torch.autograd.gradgradcheck(product, (V, tau, C))


@pytest.mark.parametrize("needed", [(True, False, False), (False, True, False), (False, False, True)])
def test_gradients_for_those_that_need_one(device, needed):
    inputs = [
        torch.randn(shape, device=device).requires_grad_(wanted)
        for shape, wanted in zip(((6, 4), (4,), (6, 3)), needed)
    ]
    metalcore.ormqr(*inputs).square().sum().backward()
    assert [tensor.grad is not None for tensor in inputs] == list(needed)


def test_opinfo_samples(device):
    # PyTorch's derivative of an empty matrix is None, ours is empty.
    for function, name in ((metalcore.householder_product, "linalg.householder_product"), (metalcore.ormqr, "ormqr")):
        check_samples(function, name, device, torch.float32, orders=0)
        check_samples(
            function,
            name,
            device,
            torch.float32,
            select=lambda *sample: all(given.numel() for given in tensors(sample)),
        )
    check_samples(metalcore.geqrf, "geqrf", device, torch.float32, orders=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_has_gradients(device, dtype):
    A, tau = (x.to(dtype) for x in torch.geqrf(torch.randn(6, 4)))
    inputs = [x.to(device).requires_grad_() for x in (A, tau)]
    wide = [x.double().requires_grad_() for x in (A, tau)]
    actual = torch.autograd.grad(metalcore.householder_product(*inputs).sum(), inputs)
    expected = torch.autograd.grad(torch.linalg.householder_product(*wide).sum(), wide)
    for ours, theirs in zip(actual, expected):
        assert ours.dtype == dtype
        bound = 10 * 6 * torch.finfo(dtype).eps * theirs.abs().max().item()
        torch.testing.assert_close(ours.cpu().double(), theirs, rtol=0, atol=bound)


def test_geqrf_has_no_derivative(device):
    assert_same_error(
        lambda: metalcore.geqrf(torch.randn(3, 3, device=device).requires_grad_()).a.sum().backward(),
        lambda: torch.geqrf(torch.randn(3, 3, requires_grad=True)).a.sum().backward(),
    )


@pytest.mark.parametrize("where, batch", [("cpu", (2,)), ("device", (2,)), ("device", (0,))])
def test_opcheck(device, where, batch):
    place = device if where == "device" else "cpu"
    A, tau, C = (torch.randn(*batch, *shape, device=place).requires_grad_() for shape in ((5, 3), (3,), (5, 2)))
    check_operator(ops.geqrf, A.detach())
    check_operator(ops.householder_product, A, tau)
    check_operator(ops.ormqr, A, tau, C, True, False)


def test_compile(device):
    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(A, tau, C):
        return metalcore.ormqr(A, tau, C) + metalcore.householder_product(A * 2, tau)

    inputs = [torch.randn(shape, device=device, requires_grad=True) for shape in ((6, 4), (4,), (6, 4))]
    result = compiled(*inputs)
    expected = metalcore.ormqr(*inputs) + metalcore.householder_product(inputs[0] * 2, inputs[1])
    assert torch.equal(result, expected)
    for ours, theirs in zip(torch.autograd.grad(result.sum(), inputs), torch.autograd.grad(expected.sum(), inputs)):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    "function",
    [
        lambda A: metalcore.larft(A, A[0]),
        lambda A: torch.autograd.grad(metalcore.householder_product(A, A[0]).sum(), A),
        lambda A: torch.autograd.grad(metalcore.qr(A).Q[0].sum(), A),
    ],
    ids=["larft", "the gradient of householder_product", "the gradient of qr"],
)
def test_triangular_systems_are_solved_by_our_kernel(device, function):
    """metalcore's operator gives the same bits on every run; LAPACK's on the simulated device does not."""
    A = torch.randn(5, 5, device=device, requires_grad=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function(A)
    ran = {event.key for event in profile.key_averages()}
    assert "metalcore::solve_triangular" in ran and "aten::linalg_solve_triangular" not in ran
