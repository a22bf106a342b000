"""What the tests of recurrences share: results and gradients beside those of a definition in float64."""

import torch
from references import assert_near, tensor, wide

# Sizes of linear attention's heads on both sides of those that kernels are made for.
HEADS = {
    "one": {"keys": 1, "values": 1},
    "64": {"keys": 64, "values": 33, "repeats": 3},
    "65": {"keys": 65, "values": 64, "heads": 2},
    "128": {"keys": 128, "values": 65},
    "129": {"keys": 129, "values": 129, "repeats": 2},
    "256": {"keys": 256, "values": 256},
}
# Terms that assert_near() gets for linear attention by chunks. Products of bfloats round the state or a score to one,
# and the results of the two kinds add up: 2 * 2 ** -9 of the largest number is 8 * 4096 * eps of float32.
TERMS_OF_CHUNKS = {torch.float32: 256, torch.float16: 256, torch.bfloat16: 4096}


def check(ours, reference, tensors, terms):
    """Compares results and gradients of functions of tensors, of which some may be None, and returns ours."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in tensors]
    wide_leaves = [None if t is None else wide(t).requires_grad_() for t in tensors]
    found, expected = ours(*leaves), reference(*wide_leaves)
    assert found[0].dtype == tensors[0].dtype and found[1].dtype == torch.float32
    for actual, value in zip(found, expected):
        assert_near(actual.detach(), value.detach(), terms=terms)
    grads = [tensor(*t.shape, dtype=t.dtype, device=t.device) for t in found]
    given = [[t for t in each if t is not None] for each in (leaves, wide_leaves)]
    gradients = torch.autograd.grad(found, given[0], grads, allow_unused=True)
    wanted = torch.autograd.grad(expected, given[1], [wide(t) for t in grads])
    for actual, value in zip(gradients, wanted, strict=True):
        assert_near(actual, value, terms=terms)
    return found, gradients
