"""The one rule of indices (docs/api.md): one that its table does not have gives NaN where it is used, no gradient comes
from it, and nothing is read outside of a tensor."""

import pytest
import torch
import torch.nn.functional as F

import metalcore
from metalcore._core.registry import OPS

WRONG = (-1, -7, 5, 2**31, 2**40, -(2**62))  # of a table of 5


def rows(result):
    """Which rows are all NaN. No other row has a NaN."""
    result = result.flatten(1) if result.dim() > 1 else result[:, None]
    assert torch.equal(result.isnan().any(1), result.isnan().all(1))
    return result.isnan().all(1)


def logits(function):
    return lambda x, index: function(x[: len(index)], index)


def positions(x, index):
    tables = (x[:, :2].cos(), x[:, :2].sin())
    q = torch.ones(1, 1, len(index), 4, device=x.device) * x.new_ones(1)
    return metalcore.rope(q, q.clone(), *tables, index, rotary_dim=4)[0][0, 0]


# A function of a table (or of logits) with 5 entries, and of indices; where it is the table that has no gradient from a
# wrong index.
OPS_WITH_INDICES = {
    "embedding": (lambda x, index: metalcore.embedding(index, x), True),
    "embedding_bag": (lambda x, index: metalcore.embedding_bag(index[:, None], x, mode="sum"), True),
    "embedding_bag, mean": (lambda x, index: metalcore.embedding_bag(index[:, None], x, mode="mean"), True),
    "embedding_bag, max": (lambda x, index: metalcore.embedding_bag(index[:, None], x, mode="max"), True),
    "cross_entropy": (logits(lambda x, index: metalcore.cross_entropy(x, index, reduction="none")), False),
    "selective_log_softmax": (logits(metalcore.selective_log_softmax), False),
    "fused_linear_cross_entropy": (
        lambda x, index: metalcore.fused_linear_cross_entropy(x[: len(index)], x, index, reduction="none"),
        False,
    ),
    "rope": (positions, False),
}


def test_every_op_with_indices_is_here():
    named = {name.partition(",")[0] for name in OPS_WITH_INDICES}
    # The integers of these families bound ranges, or are pivots, which have the rule of torch.linalg.
    others = ("linalg", "paged", "sequence")
    assert {name for name, op in OPS.items() if op.integers and op.family not in others} <= named


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("name", OPS_WITH_INDICES)
def test_wrong_indices(device, name, wrong):
    if name == "rope" and wrong == -1:
        return  # the last position
    function, from_table = OPS_WITH_INDICES[name]
    table = torch.randn(5, 5, device=device, requires_grad=from_table)
    index = torch.tensor([0, wrong, 4, wrong], device=device)
    result = function(table, index)
    assert rows(result.detach()).tolist() == [False, True, False, True]
    if from_table:
        (gradient,) = torch.autograd.grad(result.where(~result.isnan(), 0.0).sum(), table)
        assert gradient.isfinite().all() and not gradient[1:4].any() and gradient[0].any() and gradient[4].any()


@pytest.mark.parametrize("place", ["cpu", pytest.param("device", marks=pytest.mark.only_on("cuda"))])
@pytest.mark.parametrize("name", ["embedding", "embedding_bag"])
def test_sparse_gradients(device, place, name):
    """They have no entry for a wrong index, and are of the table's size."""
    place = "cpu" if place == "cpu" else device
    table = torch.randn(5, 3, device=place, requires_grad=True)
    right = torch.tensor([0, 2, 4], device=place)
    expected = torch.autograd.grad(F.embedding(right, table).sum(), table)[0]
    index = torch.tensor([0, -1, 2, 9, 4], device=place)
    if name == "embedding":
        result = torch.ops.metalcore.embedding(table, index, -1, False, True)
    else:
        offsets = torch.arange(5, device=place)
        result = torch.ops.metalcore.embedding_bag(table, index, offsets, 0, None, False, -1, False, True)[0]
    (gradient,) = torch.autograd.grad(result.sum(), table)
    assert gradient.is_sparse
    assert torch.equal(gradient.to_dense(), expected)
