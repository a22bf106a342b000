"""eig, eigvals, schur, hessenberg and rsf2csf of hard matrices: LAPACK in float64, and their own equations."""

import pytest
import torch
from matrices import EPS, check_below
from rows import FAMILIES, tuned
from spectral import plan

import metalcore


def general(n):
    """n x n in float32: defective, ill-conditioned, non-normal, close pairs, graded, of extreme magnitude."""
    random, ones = torch.randn(n, n).double(), torch.ones(n, n).double()
    index = torch.arange(n).double()
    rows, columns = index[:, None], index
    down, up = (10.0 ** torch.linspace(side, -side, n).double() for side in (15, -15))
    above, below = ones.triu(1).tril(1), ones.tril(-1).triu(-1)
    basis = torch.linalg.qr(random).Q
    companion = below.clone()
    companion[:, -1] = -torch.randn(n)
    pairs = torch.diag(1 + index // 2 * 1e-4) + (above - below) * (torch.maximum(rows, columns) % 2)
    return {
        name: matrix.float()
        for name, matrix in {
            "random": random,
            "zero": 0 * ones,
            "identity": torch.eye(n),
            "diagonal": torch.diag(index - n / 2),
            "upper triangular": random.triu(),
            "lower triangular": random.tril(),
            "ones": ones,
            "Grcar": ones.triu().tril(3) - below,
            "Frank": (n - torch.maximum(rows, columns)).triu(-1),
            "Jordan block": 2 * torch.eye(n) + above,
            "Jordan block, transposed": 2 * torch.eye(n) + below,
            "nilpotent": above,
            "defective": basis @ (torch.diag(index // 3) + above * (columns % 3 > 0)) @ basis.mT,
            "companion": companion,
            "Clement": above * columns + below * (n - columns - 1),
            "cyclic": torch.eye(n).roll(1, 0),
            "orthogonal": basis,
            "skew-symmetric": random - random.mT,
            "symmetric": random + random.mT,
            "rank one": random[:, :1] @ random[:1],
            "close pairs": basis @ pairs @ basis.mT,
            "rows from 1e15 to 1e-15": random * down[:, None],
            "columns from 1e-15 to 1e15": random * up,
            "similar, from 1e15 to 1e-15": random * down[:, None] * up,
            "all about 1e30": random * 1e30,
            "all about 1e-30": random * 1e-30,
        }.items()
    }


def general_complex(n):
    """The matrices of general(), each times a number and similar to itself by a diagonal matrix, all of magnitude
    one."""
    phases = torch.polar(torch.ones(n + 1), 6.28 * torch.rand(n + 1))
    turn = phases[n] * phases[:n, None] * phases[:n].conj()
    return {"random, complex": torch.randn(n, n, dtype=torch.complex64)} | {
        name: A * turn for name, A in general(n).items()
    }


def check_eig(A, L, V, names):
    """A V = V L, and the columns of V have norm one. Those of pairs of conjugates, or of a complex A, have a real
    largest entry."""
    n = A.shape[-1]
    assert L.dtype == V.dtype == torch.complex64 and L.shape == A.shape[:-1] and V.shape == A.shape
    columns, turned = V.mT, torch.ones_like(L, dtype=torch.bool)
    if not A.is_complex():
        turned = first = L.imag > 0
        assert torch.equal(L[first].conj(), L[first.roll(1, -1)]) and not first[..., -1].any()
        assert torch.equal(first.roll(1, -1), L.imag < 0)
        assert torch.equal(columns[first].conj(), columns[first.roll(1, -1)])
        assert not columns[L.imag == 0].imag.any()
    magnitudes = columns[turned].abs()
    largest_entries = magnitudes >= (1 - 8 * EPS) * magnitudes.amax(-1, keepdim=True)  # rounding hides which
    assert ((columns[turned].imag == 0) & largest_entries).any(-1).all()
    check_residual(A, L.diag_embed(), V, names)
    norms = torch.linalg.vector_norm(V.to(torch.complex128), dim=-2)
    check_below((norms - 1).abs().amax(-1), n * EPS, "norms of one", names)


def check_residual(A, T, V, names):
    """A V = V T."""
    A, T, V = (x.to(torch.complex128) for x in (A, T, V))
    largest = A.abs().amax(dim=(-2, -1), keepdim=True).clamp(min=1e-300)
    A = A / largest
    residual = torch.linalg.matrix_norm(A @ V - V @ (T / largest))
    bound = 10 * max(A.shape[-1], 8) * EPS
    check_below(residual / torch.linalg.matrix_norm(A).clamp(min=1e-300), bound, "A V = V T", names)


def check_values(A, L, names):
    """For each eigenvalue w there is a matrix A + E, with a small E, that has it: A - w I has a tiny singular value."""
    n, A, L = A.shape[-1], A.to(torch.complex128), L.to(torch.complex128)
    largest = A.abs().amax(dim=(-2, -1), keepdim=True).clamp(min=1e-300)
    A, L = A / largest, L / largest[..., 0]
    norms = torch.linalg.matrix_norm(A).clamp(min=1e-300)
    least = torch.linalg.svdvals(A[..., None, :, :] - L[..., None, None] * torch.eye(n))[..., -1].amax(-1)
    check_below(least / norms, 10 * max(n, 8) * EPS, "eigenvalues", names)
    error = (L.sum(-1) - torch.diagonal(A, dim1=-2, dim2=-1).sum(-1)).abs()
    check_below(error / norms, 10 * max(n, 8) ** 1.5 * EPS, "the trace", names)


def isolated(n):
    """n x n matrices that are triangular in some order of rows and columns, and n x n ones of which a block is not."""
    triangle = torch.randn(n, n).tril()
    block = triangle.clone()
    block[n // 3 : n // 3 + 2, n // 3 : n // 3 + 2] = torch.tensor([[5.0, 1.0], [-2.0, 5.0]])
    order = torch.randperm(n)
    matrices = {"lower triangular": triangle, "Jordan block": torch.eye(n) + torch.ones(n, n).tril(-1).triu(-1)}
    matrices |= {"in another order": triangle[order][:, order], "with a block": block[order][:, order]}
    return matrices


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


WIDE = torch.complex128
VARIANTS = [("simd", 1), ("simd", 2), ("simd", 9), ("simd", 32), ("block", 33), ("device", 65)]


def hard_batch(n, is_complex):
    named = general_complex(n) if is_complex else general(n)
    named = named if n < 16 else {name: named[name] for name in list(named)[:: len(named) // 4]}
    return torch.stack(list(named.values())), list(named)


def check_form(A, T, Z, names, steps=1):
    """A = Z T Zᴴ and ZᴴZ = I, for matrices divided by their largest entry."""
    largest = A.abs().amax((-2, -1), keepdim=True).clamp(min=1e-37).to(WIDE)
    A, T, Z = A.to(WIDE) / largest, T.cpu().to(WIDE) / largest, Z.cpu().to(WIDE)
    norm = torch.linalg.matrix_norm
    n = A.shape[-1]
    bound = 10 * steps * max(n, 8) * EPS
    check_below(norm(Z.mH @ Z - torch.eye(n)), bound, "ZᴴZ = I", names)
    check_below(norm(A - Z @ T @ Z.mH) / norm(A).clamp(min=1e-30), bound, "A = Z T Zᴴ", names)


@pytest.mark.parametrize("variant, n", VARIANTS)
@pytest.mark.parametrize("is_complex", [False, True])
def test_schur(device, variant, n, is_complex):
    A, names = hard_batch(n, is_complex)
    assert metalcore.explain("schur", A.to(device)).variant == variant
    T, Z = metalcore.schur(A.to(device))
    check_form(A, T, Z, names)
    assert T.dtype == A.dtype and T.is_contiguous() and Z.is_contiguous() and not T.tril(-2).any()
    if is_complex:
        assert not T.tril(-1).any()
        return
    # A 2 x 2 block has equal diagonal entries and off-diagonal ones of unlike signs, and no two blocks overlap.
    t = T.cpu()
    below, above = t.diagonal(-1, -2, -1), t.diagonal(1, -2, -1)
    is_block = below != 0
    diagonal = t.diagonal(dim1=-2, dim2=-1)
    assert not (is_block[:, 1:] & is_block[:, :-1]).any() and not (below * above)[is_block].gt(0).any()
    assert torch.equal(diagonal[:, 1:][is_block], diagonal[:, :-1][is_block])
    complex_T, complex_Z = metalcore.linalg.rsf2csf(T, Z)
    assert not complex_T.tril(-1).any()
    check_form(A, complex_T, complex_Z, names, 2)
    if n == 9:
        check_form(A, *metalcore.schur(A.to(device), "complex"), names)


@pytest.mark.parametrize("n", [1, 3, 32, 33, 65])
@pytest.mark.parametrize("is_complex", [False, True])
def test_hessenberg(device, n, is_complex):
    A, names = hard_batch(n, is_complex)
    H, Q = metalcore.hessenberg(A.to(device), calc_q=True)
    check_form(A, H, Q, names)
    assert not H.tril(-2).any() and torch.equal(metalcore.hessenberg(A.to(device)), H)


def test_a_bad_matrix_spoils_its_own_schur_form_only(device):
    A = torch.randn(3, 12, 12)
    expected = metalcore.schur(A.to(device))
    A[1, 3, 4] = float("inf")
    for found, good in zip(metalcore.schur(A.to(device)), expected):
        assert torch.equal(found[::2], good[::2]) and found[1].isnan().all()


def test_strides_and_empty_batches(device):
    A = torch.randn(2, 3, 7, 7).to(device)
    T, Z = metalcore.schur(A)
    for found, expected in zip(metalcore.schur(A.mT.contiguous().mT[1]), (T, Z)):
        assert torch.equal(found, expected[1])
    assert metalcore.schur(A[:0]).T.shape == (0, 3, 7, 7) and metalcore.schur(A[..., :0, :0]).Z.shape == (2, 3, 0, 0)


def test_schur_errors_name_scipy(device):
    wide = torch.eye(3, dtype=torch.float64)
    for A in (torch.eye(3), wide.to(device) if device == "cuda" else wide):
        with pytest.raises(TypeError, match=r"metalcore.schur: A must .* scipy.linalg.schur"):
            metalcore.schur(A)
    A = torch.eye(3, device=device)
    with pytest.raises(ValueError, match="sort must be None"):
        metalcore.schur(A, sort="lhp")
    with pytest.raises(ValueError, match="output must be 'real'"):
        metalcore.schur(A, "imaginary")
    with pytest.raises(RuntimeError, match=r"metalcore.hessenberg: A must be \(\*, n, n\), not \(3, 2\)"):
        metalcore.hessenberg(A[:, :2])
    with pytest.raises(RuntimeError, match="up to 1024 rows, and has 1025"):
        metalcore.schur(torch.empty(1025, 1025, device=device))
