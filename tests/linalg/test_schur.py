"""schur, hessenberg and rsf2csf of hard matrices: orthogonality, residuals and forms, on both sides of each plan."""

import pytest
import torch
from eig_cases import general, general_complex
from matrices import EPS, check_below

import metalcore

WIDE = torch.complex128
VARIANTS = [("simd", 1), ("simd", 2), ("simd", 9), ("simd", 32), ("block", 33), ("device", 65)]


def hard(n, is_complex):
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
    A, names = hard(n, is_complex)
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
    A, names = hard(n, is_complex)
    H, Q = metalcore.hessenberg(A.to(device), calc_q=True)
    check_form(A, H, Q, names)
    assert not H.tril(-2).any() and torch.equal(metalcore.hessenberg(A.to(device)), H)


def test_a_bad_matrix_spoils_its_own_batch_entry_only(device):
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


def test_errors_name_scipy(device):
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
