"""geqrf, householder_product, ormqr, larft, larfb as functions: arguments, layouts, dtypes, out=, errors, explain."""

import pytest
import torch
from matrices import EPS, norm
from opinfo import check_errors
from references import assert_same_error
from rows import tuned

import metalcore


def reflectors(*shape, device="cpu"):
    return tuple(x.to(device) for x in torch.geqrf(torch.randn(*shape)))


def test_are_the_namesakes(device):
    A = torch.randn(5, 3, device=device)
    result = metalcore.linalg.geqrf(A)
    assert isinstance(result, torch.return_types.geqrf) and metalcore.geqrf is metalcore.linalg.geqrf
    a, tau = result.a, result.tau
    C = torch.randn(2, 5, device=device)
    for ours, theirs in [
        (metalcore.householder_product(A=a, tau=tau), torch.linalg.householder_product(a.cpu(), tau.cpu())),
        (
            metalcore.ormqr(input=a, tau=tau, other=C, left=False, transpose=True),
            torch.ormqr(a.cpu(), tau.cpu(), C.cpu(), left=False, transpose=True),
        ),
    ]:
        torch.testing.assert_close(ours.cpu(), theirs, rtol=0, atol=50 * EPS * C.abs().max().item())


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0), (2, 0, 3), (0, 4, 3), (2, 0, 0), (0, 200, 150)])
def test_empty(device, shape):
    for ours, theirs in zip(metalcore.geqrf(torch.empty(shape, device=device)), torch.geqrf(torch.empty(shape))):
        assert ours.shape == theirs.shape
    m, n = shape[-2:]
    if m >= n:
        A, tau = torch.randn(shape), torch.randn(*shape[:-2], n)
        C = torch.randn(*shape[:-2], m, 2)
        Q = metalcore.householder_product(A.to(device), tau.to(device))
        assert Q.shape == torch.linalg.householder_product(A, tau).shape
        product = metalcore.ormqr(A.to(device), tau.to(device), C.to(device))
        assert product.shape == C.shape and (n > 0 or torch.equal(product.cpu(), C))


def test_no_reflectors_give_the_identity(device):
    for m, n in ((4, 3), (200, 140)):
        Q = metalcore.householder_product(torch.randn(2, m, n, device=device), torch.empty(2, 0, device=device))
        assert torch.equal(Q.cpu(), torch.eye(m, n).expand(2, m, n))


LAYOUTS = {
    "transposed": lambda m, n: torch.randn(2, n, m).mT,
    "every other": lambda m, n: torch.randn(4, 2 * m, 3 * n)[::2, 1::2, ::3],
    "expanded": lambda m, n: torch.randn(1, m, n).expand(2, m, n),
    "with an offset": lambda m, n: torch.randn(3, m + 5, n + 3)[1:, 5:, 3:],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("m, n", [(12, 9), (70, 40), (150, 140)])
def test_strides(device, layout, m, n):
    A = LAYOUTS[layout](m, n)
    elements = torch.empty(0).set_(A.untyped_storage()).to(device)
    a, tau = metalcore.geqrf(elements.as_strided(A.shape, A.stride(), A.storage_offset()))
    expected = metalcore.geqrf(A.contiguous().to(device))
    assert torch.equal(a, expected.a) and torch.equal(tau, expected.tau) and a.is_contiguous()
    strided_a = torch.stack([a, a], dim=-1).mT.reshape(2, m, 2, n)[:, :, 1]
    strided_tau = torch.stack([tau, tau], dim=-1)[..., 0]
    assert torch.equal(metalcore.householder_product(strided_a, strided_tau), metalcore.householder_product(a, tau))
    C = torch.randn(2, 7, m, device=device)
    assert torch.equal(metalcore.ormqr(strided_a, strided_tau, C.mT), metalcore.ormqr(a, tau, C.mT.contiguous()))
    assert metalcore.ormqr(a, tau, C, left=False).is_contiguous()


def test_out(device):
    a, tau = reflectors(3, 6, 4, device=device)
    Q, C = torch.empty(0, device=device), torch.randn(3, 6, 2, device=device)
    assert metalcore.householder_product(a, tau, out=Q) is Q
    assert torch.equal(Q, metalcore.householder_product(a, tau))
    expected = metalcore.ormqr(a, tau, C)
    assert metalcore.ormqr(a, tau, C, out=C) is C and torch.equal(C, expected)
    packed = metalcore.geqrf(Q, out=(Q, tau))
    assert packed.a is Q and packed.tau is tau
    with pytest.raises(RuntimeError, match="don't support automatic differentiation"):
        metalcore.ormqr(a.requires_grad_(), tau, C, out=C)


def test_out_is_cast(device):
    """Results are cast as PyTorch casts them."""
    A, new = torch.randn(6, 4, device=device), lambda dtype: torch.empty(0, dtype=dtype, device=device)
    a, tau = metalcore.geqrf(A)
    packed = metalcore.geqrf(A, out=(new(torch.float16), new(torch.bfloat16)))
    assert torch.equal(packed.a, a.half()) and torch.equal(packed.tau, tau.bfloat16())
    Q = new(torch.float16)
    assert metalcore.householder_product(a, tau, out=Q) is Q
    assert torch.equal(Q, metalcore.householder_product(a, tau).half())
    with pytest.raises(RuntimeError, match="householder_product: Expected result to be safely castable from Float"):
        metalcore.householder_product(a, tau, out=new(torch.int32))
    with pytest.raises(RuntimeError, match="geqrf: Expected tau to be safely castable from Float"):
        metalcore.geqrf(A, out=(new(torch.float32), new(torch.int32)))


def test_opinfo_errors(device):
    check_errors(metalcore.ormqr, "ormqr", device, messages=True)  # there are none of the others


@pytest.mark.parametrize(
    "name, shapes",
    [
        ("geqrf", [(3,)]),
        ("geqrf", [()]),
        ("householder_product", [(3,), (3,)]),
        ("householder_product", [(2, 3), (2,)]),
        ("householder_product", [(3, 3), (4,)]),
        ("householder_product", [(2, 3, 3), (3,)]),
        ("householder_product", [(2, 3, 3), (1, 3)]),
        ("ormqr", [(3,), (3,), (3, 3)]),
        ("ormqr", [(4, 3), (3,), (3, 3)]),
        ("ormqr", [(4, 3), (4,), (4, 3)]),
        ("ormqr", [(4, 3), (2,), (4, 3)]),
        ("ormqr", [(4, 3), (3,), (4,)]),
        ("ormqr", [(4, 3), (3,), ()]),
        ("ormqr", [(2, 4, 3), (2, 3), (1, 4, 3)]),
        ("ormqr", [(4, 3), (1, 3), (4, 3)]),
    ],
)
def test_errors_are_torchs(device, name, shapes):
    theirs_function = torch.linalg.householder_product if name == "householder_product" else getattr(torch, name)
    assert_same_error(
        lambda: getattr(metalcore, name)(*[torch.randn(shape, device=device) for shape in shapes]),
        lambda: theirs_function(*[torch.randn(shape) for shape in shapes]),
    )


def test_block_reflectors_refuse_what_does_not_fit(device):
    V, tau, C = (torch.randn(shape, device=device) for shape in ((5, 3), (3,), (5, 2)))
    with pytest.raises(RuntimeError, match=r"larft: expected V \(\*, m, k\)"):
        metalcore.larft(V, tau[:2])
    with pytest.raises(RuntimeError, match=r"larft: expected V \(\*, m, k\)"):
        metalcore.larft(V.mT, torch.randn(5, device=device))
    with pytest.raises(RuntimeError, match=r"larfb: expected .* C \(\*, n, m\)"):
        metalcore.larfb(V, metalcore.larft(V, tau), C, left=False)


@pytest.mark.parametrize(
    "op, shapes, variant, kernels",
    [
        ("geqrf", [(3, 3)], "simd", ["qr_simd_8x8"]),
        ("geqrf", [(128, 64)], "block", ["qr_block_128"]),
        ("geqrf", [(2000, 16)], "blocked", ["qr_panel"]),
        ("geqrf", [(0, 3)], "empty", []),
        ("householder_product", [(100, 64, 32), (100, 32)], "simd", ["qr_simd_64x32"]),
        (
            "householder_product",
            [(300, 200), (200,)],
            "blocked",
            [
                "reflectors_products_64",
                "reflectors_factor_64",
                "qr_identity",
                "reflectors_apply_64",
            ],
        ),
        (
            "ormqr",
            [(30, 8), (8,), (30, 5)],
            "blocked",
            ["reflectors_products_16", "reflectors_factor_16", "reflectors_apply_16"],
        ),
    ],
)
def test_explain(op, shapes, variant, kernels):
    with tuned("baseline"):
        plan = metalcore.explain(op, *shapes)
    assert plan.variant == variant and list(plan.kernels) == kernels


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
    a, tau = reflectors(4, 60, 40, device=device)
    C = torch.randn(4, 60, 9, device=device)
    back = metalcore.ormqr(a, tau, metalcore.ormqr(a, tau, C), transpose=True)
    assert norm((back - C).cpu()).max() <= 10 * 60 * EPS * norm(C.cpu()).max()
