"""eig and eigvals against LAPACK in float64."""

import pytest
import torch
from eig_cases import check_eig, check_values, general, general_complex, isolated
from jacobi_cases import plan
from matrices import EPS
from rows import FAMILIES, tuned

import metalcore

SIZES = {"simd": [1, 2, 3, 5, 16, 17, 32], "block": [33, 64], "device": [65, 90]}


def check(device, A, names):
    with tuned("baseline"):
        L, V = metalcore.eig(A.to(device))
        values = metalcore.eigvals(A.to(device))
    check_eig(A, L.cpu(), V.cpu(), names)
    check_values(A, values.cpu(), names)


def hard(cases, n):
    """All of the matrices, or some of large ones."""
    names = list(cases) if n < 60 else ["random", "Frank", "close pairs", "nilpotent", "columns from 1e-15 to 1e15"]
    return torch.stack([cases[name] for name in names]), names


@pytest.mark.parametrize("variant, n", [(variant, n) for variant in SIZES for n in SIZES[variant]])
def test_hard_matrices(device, variant, n):
    with tuned("baseline"):
        assert plan("baseline", "eig", (n, n))[0] == plan("baseline", "eigvals", (n, n))[0] == variant
    check(device, *hard(general(n), n))


def test_what_is_faster_by_torch_on_hopper():
    shapes = [(127, 127), (128, 128), (2, 256, 256), (2, 257, 257), (3, 480, 480), (8, 481, 481), (9, 481, 481)]
    variants = ["device", "torch", "device", "torch", "device", "torch", "device"]
    assert [plan("hopper", "eig", shape)[0] for shape in shapes] == variants


@pytest.mark.parametrize("variant, n", [*(("simd", n) for n in (1, 2, 3, 16, 32)), ("block", 60), ("device", 61)])
def test_hard_complex_matrices(device, variant, n):
    A, names = hard(general_complex(n), n)
    with tuned("baseline"):
        assert metalcore.explain("eig", A.to(device)).variant == variant
    check(device, A, names)


@pytest.mark.parametrize("n", [5, 20, 40, 70])
def test_isolated_eigenvalues_are_exact(device, n):
    """Those of matrices that are triangular in some order of rows and columns are the diagonal."""
    cases = isolated(n)
    A = torch.stack(list(cases.values()))
    with tuned("baseline"):
        L, V = (x.cpu() for x in metalcore.eig(A.to(device)))
    check_eig(A, L, V, list(cases))
    assert not L[:-1].imag.any()
    assert torch.equal(L[:-1].real.sort(-1).values, torch.diagonal(A[:-1], dim1=-2, dim2=-1).sort(-1).values)
    of_block, pair = L[-1], torch.tensor([5 + 2**0.5 * 1j, 5 - 2**0.5 * 1j])
    assert set(of_block.real.tolist()) - {5.0} <= set(torch.diagonal(A[-1]).tolist())
    assert ((of_block[of_block.imag != 0] - pair).abs() <= 16 * EPS).all()


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"hopper"}))
def test_what_no_kernel_holds_goes_to_the_cpu(family):
    assert plan(family, "eig", (1025, 1025))[0] == "cpu"
    on_apple = family.startswith("apple")
    assert plan(family, "eig", (257, 257))[0] == ("cpu" if on_apple else "device")
    assert plan(family, "eig", (5, 257, 257))[0] == plan(family, "eig", (256, 256))[0] == "device"
    assert plan(family, "eig", (100, 513, 513))[0] == ("cpu" if on_apple else "device")


@pytest.mark.only_on("simulator")
def test_on_the_cpu(device):
    A = torch.eye(257).repeat(2, 1, 1)
    A[:, :6, :6] = torch.randn(2, 6, 6)
    A[1, 0, 3] = float("nan")
    with tuned("apple7"):
        L, V = (x.cpu() for x in metalcore.eig(A.to(device)))
        values = metalcore.eigvals(A.to(device)).cpu()
    assert L[1].isnan().all() and V[1].isnan().all() and values[1].isnan().all()
    check_eig(A[:1], L[:1], V[:1], ["padded"])
    assert (values[0] - L[0]).abs().max() <= 1e-4


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "n, dtype", [*((n, torch.float32) for n in (2, 16, 30, 50, 70)), *((n, torch.complex64) for n in (2, 40, 70))]
)
def test_a_bad_matrix_spoils_its_own_batch_entry_only(device, n, dtype, bad):
    A = torch.randn(3, n, n, dtype=dtype)
    A[1, n - 1, 0] = complex(1, bad) if dtype.is_complex else bad
    L, V = (x.cpu() for x in metalcore.eig(A.to(device)))
    assert L[1].isnan().all() and V[1].isnan().all()
    check_eig(A[::2], L[::2], V[::2], ["random"] * 2)
    L = metalcore.eigvals(A.to(device)).cpu()
    assert L[1].isnan().all() and not L[::2].isnan().any()


def test_many_matrices_have_the_same_bits_as_one(device):
    A = torch.randn(3, 7, 12, 12, device=device)
    L, V = metalcore.eig(A)
    check_eig(A.cpu().flatten(0, 1), L.cpu().flatten(0, 1), V.cpu().flatten(0, 1), ["random"] * 21)
    for one, other in zip(metalcore.eig(A[1, 4]), (L[1, 4], V[1, 4])):
        assert torch.equal(one, other)


def _loss(linalg, A):
    """Depends on no norm and no phase of an eigenvector."""
    L, V = linalg.eig(A)
    weights = torch.linspace(-1, 1, A.shape[-1]).to(A.device)
    magnitudes = V.real.square() + V.imag.square()
    return (L.real.sin() + L.imag.square()).sum() + (weights[:, None] * magnitudes * L.real.unsqueeze(-2)).sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize("shape", [(4, 4), (2, 9, 9)])
def test_gradient(device, shape, dtype):
    A = torch.randn(shape, dtype=torch.promote_types(dtype, torch.float64))
    exact = A.clone().requires_grad_()
    (expected,) = torch.autograd.grad(_loss(torch.linalg, exact), exact)
    ours = A.to(device, dtype).requires_grad_()
    (found,) = torch.autograd.grad(_loss(metalcore, ours), ours)
    condition = torch.linalg.cond(torch.linalg.eig(A)[1]).max().item() ** 2
    assert found.dtype == dtype
    bound = 100 * condition * shape[-1] * torch.finfo(torch.float32).eps
    assert (found.cpu() - expected).abs().max() <= bound * expected.abs().max()
    values = torch.autograd.grad(metalcore.eigvals(ours).real.sum(), ours)[0]  # the trace
    assert (values.cpu() - torch.eye(shape[-1])).abs().max() <= bound


@pytest.mark.only_on("simulator")
@pytest.mark.parametrize("n", [3, 20, 34])
def test_kernels_are_clean_in_checking_mode(device, n):
    A = torch.randn(2, n, n)
    with metalcore.simulator.checking():
        L, V = metalcore.eig(A.to(device))
        metalcore.eigvals(A.to(device))
    check_eig(A, L.cpu(), V.cpu(), ["random"] * 2)
