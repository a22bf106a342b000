"""torch.jit.trace of functions that decide by sizes and tolerances: right for other matrices of the same shape."""

import warnings

import pytest
import torch

import metalcore

CALLS = {
    "pinv": lambda A: metalcore.pinv(A),
    "pinv rtol": lambda A: metalcore.pinv(A, rtol=0.3),
    "pinv atol": lambda A: metalcore.pinv(A, atol=0.5),
    "pinv rcond": lambda A: metalcore.pinv(A, 0.3),
    "pinv of tensors": lambda A: metalcore.pinv(A, rtol=torch.tensor([0.1, 0.5, 0.3], device=A.device)),
    "pinv hermitian": lambda A: metalcore.pinv(A @ A.mT, hermitian=True),
    "rank": lambda A: metalcore.matrix_rank(A),
    "rank rtol": lambda A: metalcore.matrix_rank(A, rtol=0.3),
    "rank atol": lambda A: metalcore.matrix_rank(A, atol=0.5),
    "rank of a tensor": lambda A: metalcore.matrix_rank(A, atol=torch.tensor(0.5, device=A.device)),
    "rank of tensors": lambda A: metalcore.matrix_rank(A, atol=torch.tensor([0.0, 0.5, 3.0], device=A.device)),
    "rank tol": lambda A: metalcore.matrix_rank(A, 0.5),
    "rank hermitian": lambda A: metalcore.matrix_rank(A @ A.mT, hermitian=True),
    "cond": lambda A: metalcore.cond(A),
    "lstsq": lambda A: metalcore.lstsq(A, A[..., :2]).solution,
}


def traced(call, A):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)  # sizes and options are part of the trace
        return torch.jit.trace(call, A, check_trace=False)


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_a_trace_is_right_for_other_matrices(device, name, gradient):
    call = CALLS[name]
    trace = traced(call, torch.randn(3, 5, 4, device=device).requires_grad_(gradient))
    low_rank = torch.randn(3, 5, 2) @ torch.randn(3, 2, 4)
    scaled = torch.randn(3, 5, 4) * torch.tensor([1.0, 0.01, 100.0])[:, None, None]
    for A in (low_rank, scaled, torch.zeros(3, 5, 4)) if "lstsq" not in name else (scaled,):
        A = A.to(device).requires_grad_(gradient)
        found, expected = trace(A), call(A)
        assert torch.equal(found.nan_to_num(-1), expected.nan_to_num(-1))
        if gradient and expected.requires_grad and "hermitian" not in name and A is not low_rank:
            ours, theirs = (torch.autograd.grad(value.sum(), A)[0] for value in (found, expected))
            torch.testing.assert_close(ours, theirs, equal_nan=True)
