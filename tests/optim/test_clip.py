"""clip_grad_norm_ and clip_grad_value_ against float64 and against PyTorch's own."""

import pytest
import torch
from adamw_cases import random_values

import metalcore

SHAPES = ((300, 7), (), (0, 3), (2048,), (4097,), (5, 1, 3))
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INF = float("inf")


def parameters(device, dtype=torch.float32, shapes=SHAPES, seed=0, factor=1.0):
    found = [torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=device)) for shape in shapes]
    for param, value in zip(found, random_values(*shapes, seed=seed)):
        param.grad = (value * factor).to(device, dtype)
    return found


def norm_of(params, p):
    return torch.linalg.vector_norm(torch.cat([param.grad.cpu().double().flatten() for param in params]), p)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("p", (2.0, 1.0, INF, 3.0, 1.5))
@pytest.mark.parametrize("limit", (0.5, 1e9))
def test_norm(device, dtype, p, limit):
    params = parameters(device, dtype, factor=0.01)
    before, norm = [param.grad.cpu().double() for param in params], norm_of(params, p)
    found = metalcore.optim.clip_grad_norm_(params, limit, p)
    assert found.dtype is dtype and found.shape == () and found.device == params[0].device
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(found.cpu().double(), norm, rtol=1e-5 + eps, atol=0)
    factor = min(1.0, limit / (float(norm) + 1e-6))
    for param, value in zip(params, before):
        torch.testing.assert_close(param.grad.cpu().double(), value * factor, rtol=1e-5 + eps, atol=1e-7)


def test_the_same_bits_on_every_run(device):
    params = parameters(device)
    norms = {float(metalcore.optim.clip_grad_norm_(params, 1e9)) for _ in range(5)}
    assert len(norms) == 1


def test_kinds_that_are_mixed(device):
    """Two dtypes, other strides, a parameter without gradient, the same generator argument as in PyTorch."""
    params = parameters(device) + parameters(device, torch.bfloat16, seed=1)
    params[0].grad = params[0].grad.T.contiguous().T
    params.append(torch.nn.Parameter(torch.zeros(3, device=device)))
    norm, before = norm_of(params[:-1], 2), params[0].grad.cpu().double()
    found = metalcore.optim.clip_grad_norm_(iter(params), 1.0)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found.cpu().double(), norm, rtol=1e-5, atol=0)
    torch.testing.assert_close(params[0].grad.cpu().double(), before / float(norm), rtol=1e-5, atol=1e-8)
    assert params[-1].grad is None


@pytest.mark.parametrize("p", (2.0, INF))
@pytest.mark.parametrize("bad", (INF, float("nan")))
def test_norms_that_are_not_finite(device, p, bad):
    shapes = [shape for shape in SHAPES if 0 not in shape]  # of empty ones PyTorch refuses the largest element
    params, others = parameters(device, shapes=shapes), parameters("cpu", shapes=shapes)
    for some in (params, others):
        some[2].grad[7] = bad
    with pytest.raises(
        RuntimeError, match=f"The total norm of order {p} for gradients from `parameters` is non-finite"
    ):
        metalcore.optim.clip_grad_norm_(params, 1.0, p, error_if_nonfinite=True)
    assert torch.equal(params[0].grad.cpu(), others[0].grad)
    found = metalcore.optim.clip_grad_norm_(params, 1.0, p)
    torch.testing.assert_close(found.cpu(), torch.nn.utils.clip_grad_norm_(others, 1.0, p), equal_nan=True)
    for param, other in zip(params, others):
        torch.testing.assert_close(param.grad.cpu(), other.grad, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_value(device, dtype):
    params, others = parameters(device, dtype), parameters("cpu", dtype)
    for some in (params, others):
        some[3].grad[:3] = torch.tensor([float("nan"), INF, -INF])
    metalcore.optim.clip_grad_value_(params, 0.3)
    torch.nn.utils.clip_grad_value_(others, 0.3)
    for param, other in zip(params, others):
        assert torch.equal(param.grad.cpu().nan_to_num(9), other.grad.nan_to_num(9))


def test_what_pytorch_takes(device):
    """No parameters, none with gradient, other devices and dtypes, sums of no positive power."""
    assert float(metalcore.optim.clip_grad_norm_([], 1.0)) == 0
    assert float(metalcore.optim.clip_grad_norm_([torch.nn.Parameter(torch.zeros(3, device=device))], 1.0)) == 0
    (param,) = parameters("cpu", torch.float64, ((5,),))
    norm = norm_of([param], 2)
    torch.testing.assert_close(metalcore.optim.clip_grad_norm_(param, 0.1), norm)
    torch.testing.assert_close(norm_of([param], 2), torch.tensor(0.1, dtype=torch.float64), rtol=1e-4, atol=0)
    (param,) = parameters(device, shapes=((5,),))
    torch.testing.assert_close(metalcore.optim.clip_grad_norm_(param, 1e9, -INF).cpu(), param.grad.abs().min().cpu())


def test_autograd_notices(device):
    (param,) = parameters(device, shapes=((5,),))
    version = param.grad._version
    metalcore.optim.clip_grad_norm_(param, 1e-3)
    metalcore.optim.clip_grad_value_(param, 1e-4)
    assert param.grad._version > version + 1


def test_opcheck(device):
    for at in (device, "cpu"):
        grads = [value.to(at) for value in random_values((4, 3), (7,))]
        torch.library.opcheck(torch.ops.metalcore.grad_norm.default, (grads, 2.0))
        torch.library.opcheck(torch.ops.metalcore.grad_clip_norm_.default, (grads, torch.ones((), device=at), 0.1))
        torch.library.opcheck(torch.ops.metalcore.grad_clip_value_.default, (grads, 0.1))


def test_errors(device):
    grads = [torch.ones(3, device=device)]
    for call, text in (
        (lambda: torch.ops.metalcore.grad_norm(grads, 0.0), "norm_type must be positive"),
        (lambda: torch.ops.metalcore.grad_clip_norm_(grads, torch.ones(2, device=device), 1.0), "one element"),
        (lambda: torch.ops.metalcore.grad_clip_value_([grads[0].expand(2, 3)], 1.0), "expanded tensor"),
    ):
        with pytest.raises(RuntimeError, match=text):
            call()


def test_overrides(device):
    """PyTorch's functions use the kernels, whenever they were imported, and are PyTorch's again afterwards."""
    from torch.nn.utils import clip_grad_norm_

    originals = torch.nn.utils.clip_grad._get_total_norm, torch.nn.utils.clip_grad_value_
    params, others = parameters(device), parameters("cpu")
    with metalcore.enable_pytorch_overrides("clip_grad_norm_", "clip_grad_value_"):
        found = clip_grad_norm_(params, 0.5)
        torch.nn.utils.clip_grad_value_(params, 0.001)
        torch.testing.assert_close(found.cpu(), clip_grad_norm_(others, 0.5))
        torch.nn.utils.clip_grad_value_(others, 0.001)
        metalcore.optim.clip_grad_norm_(others, 1e9)  # goes to PyTorch's, which is ours now, and comes back
        counts = {row.what: (row.ran, sum(row.left.values())) for row in metalcore.report().rows}
    assert counts["torch.nn.utils.clip_grad._get_total_norm"] == (1, 2)
    assert counts["torch.nn.utils.clip_grad._clip_grads_with_norm_"] == (1, 2)
    assert counts["torch.nn.utils.clip_grad_value_"] == (1, 1)
    for param, other in zip(params, others):
        torch.testing.assert_close(param.grad.cpu(), other.grad)
    assert (torch.nn.utils.clip_grad._get_total_norm, torch.nn.utils.clip_grad_value_) == originals
