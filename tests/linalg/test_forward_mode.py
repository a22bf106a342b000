"""Forward-mode derivatives, which PyTorch's own functions take."""

import pytest
import torch
from references import wide
from torch.autograd import forward_ad

import metalcore


def dominant(A):
    return A + 6 * torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)


FUNCTIONS = {
    "svdvals": lambda of, A: of.svdvals(A),
    "eigvalsh": lambda of, A: of.eigvalsh(A + A.mT),
    "cholesky": lambda of, A: of.cholesky(dominant(A @ A.mT)),
    "qr": lambda of, A: of.qr(dominant(A)).R,
    "lu": lambda of, A: of.lu(dominant(A)).U,
    "lu_factor_ex": lambda of, A: of.lu_factor_ex(dominant(A)).LU,
    "solve": lambda of, A: of.solve(dominant(A), A),
    "inv": lambda of, A: of.inv(dominant(A)),
    "det": lambda of, A: of.det(A),
    "slogdet": lambda of, A: of.slogdet(A).logabsdet,
    "solve_triangular": lambda of, A: of.solve_triangular(dominant(A), A, upper=True),
    "lstsq": lambda of, A: of.lstsq(dominant(A), A).solution,
    "pinv": lambda of, A: of.pinv(dominant(A)),
    "cond": lambda of, A: of.cond(dominant(A)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_tangents(device, name):
    A, direction = torch.randn(2, 3, 4, 4, device=device)

    def tangent(of, A, direction):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(FUNCTIONS[name](of, forward_ad.make_dual(A, direction))).tangent

    found, expected = tangent(metalcore, A, direction), tangent(torch.linalg, wide(A), wide(direction))
    torch.testing.assert_close(wide(found), expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item())
