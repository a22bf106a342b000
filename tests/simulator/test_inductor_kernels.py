"""torch.compile with inductor's own Metal kernels: reductions and losses at sizes near those of a simdgroup and of a
threadgroup, so that the last simdgroups are short."""

import pytest
import torch
import torch.nn.functional as F
from torch._inductor import config


@pytest.fixture(autouse=True)
def compiled_here():
    """Compiles in this process, and anew in each run."""
    with config.patch(compile_threads=1, force_disable_caches=True):
        yield
    torch._dynamo.reset()


def compare(function, *inputs):
    """Compares the compiled function on the device with the function in double precision: results, and gradients of the
    sum of the floating-point results."""

    def run(function, tensors):
        leaves = [tensor.requires_grad_() for tensor in tensors if tensor.is_floating_point()]
        outputs = function(*tensors)
        smooth = [output.sum() for output in outputs if output.requires_grad]
        gradients = torch.autograd.grad(sum(smooth), leaves) if smooth else ()
        return [*outputs, *gradients]

    wide = [tensor.double() if tensor.is_floating_point() else tensor for tensor in inputs]
    found = run(torch.compile(function, dynamic=False), [tensor.to("mps") for tensor in inputs])
    for i, (got, wanted) in enumerate(zip(found, run(function, wide), strict=True)):
        torch.testing.assert_close(got.cpu().to(wanted.dtype), wanted, rtol=2e-5, atol=2e-5, msg=lambda m: f"{i}: {m}")


@pytest.mark.parametrize("size", [1, 8, 14, 31, 32, 33, 1024, 1025])
def test_reductions(size):
    def reductions(x):
        with torch.no_grad():
            below = -1 - x.abs()  # no maximum is 0, the value that inactive lanes give
            return (
                x.sum(-1), x.mean(-1), below.amax(-1), (-below).amin(-1), x.argmax(-1), below.argmax(-1),
                x.var(-1, correction=0), x.logsumexp(-1), (x > 2).any(-1), (x < 2).all(-1), below.sum(), below.amax(),
            )  # fmt: skip

    compare(reductions, torch.randn(3, size))


@pytest.mark.parametrize("size", [14, 33, 1024, 1025])
def test_normalized_rows(size):
    def normalized(x, weight):
        return x.softmax(-1) * weight, x.log_softmax(-1) * weight, F.layer_norm(x, x.shape[-1:], weight), x.cumsum(-1)

    compare(normalized, torch.randn(3, size), torch.randn(size))


@pytest.mark.parametrize("rows", [1, 14, 33, 1025])
def test_losses(rows):
    def losses(x, y, target):
        return F.cross_entropy(x, target), F.nll_loss(y, target, reduction="sum"), F.mse_loss(x, y), F.l1_loss(x, y)

    compare(losses, torch.randn(rows, 5), torch.randn(rows, 5), torch.randint(0, 5, (rows,)))
