"""embedding_bag against float64, with its gradients."""

import pytest
import torch
import torch.nn.functional as F
from opinfo import compare, evaluate, placed, samples
from references import DTYPES, assert_near, check_operator, tensor, wide

import metalcore

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_mode = pytest.mark.parametrize("mode", ["sum", "mean", "max"])


def both(function, table, indices, offsets, grad, factors=None, **options):
    table = table.detach().requires_grad_()
    factors = factors if factors is None else factors.detach().requires_grad_()
    out = function(indices, table, offsets, per_sample_weights=factors, **options)
    leaves = [leaf for leaf in (table, factors) if leaf is not None]
    return out.detach(), *torch.autograd.grad(out, leaves, grad.to(out)[: len(out)])


def check(device, table, indices, offsets=None, factors=None, terms=64, **options):
    grad = torch.randn(100, table.shape[1]).to(table.dtype)
    placed = [value if value is None else value.to(device) for value in (indices, offsets, factors)]
    found = both(metalcore.embedding_bag, table, *placed[:2], grad, placed[2], **options)
    expected = both(
        F.embedding_bag, wide(table), indices, offsets, grad, factors if factors is None else wide(factors), **options
    )
    for value, wanted in zip(found, expected, strict=True):
        assert value.dtype == table.dtype
        assert_near(value, wanted, terms=terms)


@each_dtype
@each_mode
@pytest.mark.parametrize("depth", [1, 6, 8, 130])
def test_bags(device, dtype, mode, depth):
    table = tensor(12, depth, dtype=dtype, device=device)
    for integer in (torch.int32, torch.int64):
        indices = torch.randint(12, (31,), dtype=integer)
        for options in ({}, {"padding_idx": 3}, {"include_last_offset": True}):
            offsets = torch.tensor([0, 0, 4, 5, 9, 9, 20, 31], dtype=integer)  # some bags are empty
            check(device, table, indices, offsets, mode=mode, **options)
        check(device, table, indices[:30].view(6, 5), mode=mode)


@each_dtype
def test_factors(device, dtype):
    table, factors = tensor(12, 10, dtype=dtype, device=device), torch.randn(20).to(dtype)
    indices = torch.randint(12, (20,))
    check(device, table, indices, torch.tensor([0, 3, 3, 11]), factors, mode="sum", padding_idx=2)
    check(device, table, indices.view(4, 5), None, factors.view(4, 5), mode="sum")


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_by_count(device, mode):
    """PyTorch's CPU kernel divides by the counts of other indices (2.13)."""
    table, indices, offsets = tensor(4, 8, device=device), torch.randint(4, (60,)), torch.tensor([0, 20, 45])
    grad = torch.randn(3, 8)
    placed = indices.to(device), offsets.to(device)
    found = both(metalcore.embedding_bag, table, *placed, grad, mode=mode, scale_grad_by_freq=True)[1]
    expected = both(F.embedding_bag, wide(table), indices, offsets, grad, mode=mode)[1]
    assert_near(found, expected / indices.bincount(minlength=4)[:, None], terms=64)


@each_mode
@pytest.mark.parametrize("count", [500, 2048, 2049])  # more than 2048 indices are sorted for the gradient
def test_long_bags(device, mode, count):
    for depth in (8, 33):
        table, indices, offsets = tensor(9, depth, device=device), torch.randint(9, (count,)), torch.tensor([0, 3, 400])
        check(device, table, indices, offsets, mode=mode, terms=count)
        check(device, table, indices, offsets, mode=mode, terms=count, padding_idx=2)
        if mode == "sum":
            check(device, table, indices, offsets, torch.randn(count), mode=mode, terms=count)


@each_mode
def test_layouts(device, mode):
    table = tensor(8, 12, device=device).t()[:, 1:7]
    check(device, table, torch.randint(12, (8, 10))[::2, ::2], mode=mode)


@each_mode
def test_indices_beyond_the_table(device, mode):
    table = tensor(5, 8, device=device)
    indices = torch.tensor([0, 5, 1, 2, -7, 2**40, 3, 4], device=device)
    found = both(
        metalcore.embedding_bag, table, indices, torch.tensor([0, 2, 4, 6], device=device), torch.ones(4, 8), mode=mode
    )
    assert found[0].isnan().all(1).tolist() == [True, False, True, False]
    assert found[1].isfinite().all()


@each_mode
def test_no_padding_means_no_index(device, mode):
    """-1 is an index that the table does not have, also where PyTorch's operator says by it that nothing is padding."""
    table, indices = tensor(5, 8, device=device), torch.tensor([-1, 2, 0, 3], device=device)
    offsets = torch.tensor([0, 2], device=device)
    out, gradient = both(metalcore.embedding_bag, table, indices, offsets, torch.ones(2, 8), mode=mode)
    assert out.isnan().all(1).tolist() == [True, False] and gradient.isfinite().all()
    with metalcore.enable_pytorch_overrides("embedding_bag"):
        assert torch.equal(F.embedding_bag(indices, table, offsets, mode=mode).isnan(), out.isnan())


@pytest.mark.parametrize("place", ["cpu", "device"])
@each_mode
def test_wrong_offsets(device, place, mode):
    """Nothing is read outside of the indices, and no wrong bag has numbers."""
    place = "cpu" if place == "cpu" else device
    table, indices = tensor(5, 8, device=place), torch.tensor([0, 1, 2], device=place)
    number = ["sum", "mean", "max"].index(mode)
    for offsets, last, wrong in (
        ([0, 2, 2**40, -5, 3], False, [False, True, True, True, False]),
        ([1, 2], False, [True, False]),
        ([0, 3, 1], True, [False, True]),
        ([0, 2, 4], True, [False, True]),
        ([0, 1, 3], True, [False, False]),
    ):
        given = torch.tensor(offsets, device=place)
        out, sizes, _ = torch.ops.metalcore.embedding_bag(table, indices, given, number, None, last, -1, False, False)
        assert out.isnan().all(1).tolist() == out.isnan().any(1).tolist() == wrong
        bags = torch.ops.metalcore.embedding_bag_samples(given, 3, last).tolist()
        ends = [*offsets[1:], 3]
        for place_of_index, bag in enumerate(bags):
            assert bag == -1 or offsets[bag] <= place_of_index < ends[bag]
        assert sum(bag >= 0 and not wrong[bag] for bag in bags) == sizes.sum()


@pytest.mark.parametrize("place", ["cpu", pytest.param("device", marks=pytest.mark.only_on("cuda"))])
@pytest.mark.parametrize("mode", [0, 1])
def test_sparse_gradients(device, mode, place):
    """A simulated device has no sparse tensors."""
    place = "cpu" if place == "cpu" else device
    table, indices = tensor(6, 4, device=place).requires_grad_(), torch.tensor([1, 2, 5, 1, 0], device=place)
    offsets, grad = torch.tensor([0, 2], device=place), torch.randn(2, 4)
    options = (mode, None, False, 2, False, True)
    out = torch.ops.metalcore.embedding_bag(table, indices, offsets, *options)[0]
    (gradient,) = torch.autograd.grad(out, table, grad.to(place))
    assert gradient.is_sparse
    names = {"mode": ["sum", "mean"][mode], "padding_idx": 2}
    expected = both(F.embedding_bag, wide(table), indices.cpu(), offsets.cpu(), grad, **names)[1]
    assert_near(gradient.cpu().to_dense(), expected, terms=8)


@each_mode
def test_double_backward(device, mode):
    table, indices = tensor(5, 4, device=device), torch.tensor([1, 1, 3, 4, 0, 2])
    offsets, factors = torch.tensor([0, 2, 2, 5]), torch.randn(6) if mode == "sum" else None

    def second(function, table, indices, offsets, factors, grad):
        table, grad = table.detach().requires_grad_(), grad.detach().requires_grad_()
        factors = factors if factors is None else factors.to(table).requires_grad_()
        out = function(indices, table, offsets, mode=mode, padding_idx=3, per_sample_weights=factors)
        leaves = [leaf for leaf in (table, factors) if leaf is not None]
        first = torch.autograd.grad(out, leaves, grad, create_graph=True)
        wanted = [grad] if factors is None else [grad, factors, table]
        return torch.autograd.grad(sum(g.square().sum() for g in first), wanted)

    def plain(indices, table, offsets, mode, padding_idx, per_sample_weights):
        """In differentiable ops."""
        ends = [*offsets[1:].tolist(), len(indices)]
        out = []
        for begin, end in zip(offsets.tolist(), ends):
            places = [i for i in range(begin, end) if indices[i] != padding_idx]
            rows = table[indices[places]]
            rows = rows if per_sample_weights is None else rows * per_sample_weights[places, None]
            if not places:
                out.append(table.new_zeros(table.shape[1]))
            else:
                out.append(rows.amax(0) if mode == "max" else rows.sum(0) / (len(places) if mode == "mean" else 1))
        return torch.stack(out)

    grad = tensor(4, 4, device=device)
    found = second(metalcore.embedding_bag, table, indices.to(device), offsets.to(device), factors, grad)
    for value, expected in zip(found, second(plain, wide(table), indices, offsets, factors, wide(grad)), strict=True):
        assert_near(value, expected, terms=16)


@each_dtype
def test_pytorch_samples(device, dtype):
    for sample in samples("nn.functional.embedding_bag", dtype):
        options = sample[2]
        if options.get("max_norm") is not None or options.get("sparse"):
            continue
        actual = evaluate(
            lambda w, i, *a, **k: metalcore.embedding_bag(i, w, *a, **k),
            placed(sample, device, dtype, _same),
            1,
            None,
        )
        expected = evaluate(
            lambda w, i, *a, **k: F.embedding_bag(i, w, *a, **k),
            placed(sample, "cpu", torch.float64, _same),
            1,
            None,
        )
        compare(actual, expected, sample, dtype, 1.0)


def _same(value):
    return value


@each_mode
def test_override(device, mode):
    table, indices = tensor(5, 4, device=device).requires_grad_(), torch.tensor([1, 1, 3, 0], device=device)
    offsets = torch.tensor([0, 2], device=device)
    with metalcore.enable_pytorch_overrides("embedding_bag"):
        out = F.embedding_bag(indices, table, offsets, mode=mode)
        out.sum().backward()
        with torch.no_grad():
            F.embedding_bag(indices, table.detach(), offsets, mode=mode)
    ran = {row.what: row.ran for row in metalcore.report().rows}
    assert ran[f"aten::_embedding_bag on {device}"] == 1
    assert ran[f"aten::_embedding_bag_forward_only on {device}"] == 1
    assert ran[f"aten::_embedding_bag_backward on {device}"] == 1
    expected = both(F.embedding_bag, wide(table), indices.cpu(), offsets.cpu(), torch.ones(2, 4), mode=mode)
    for value, wanted in zip((out.detach(), table.grad), expected, strict=True):
        assert_near(value, wanted)


@pytest.mark.parametrize("place", ["cpu", "device"])
@each_mode
def test_opcheck(device, place, mode):
    place = "cpu" if place == "cpu" else device
    table, indices = tensor(5, 4, device=place).requires_grad_(), torch.tensor([1, 1, 3, 4], device=place)
    offsets, number = torch.tensor([0, 3], device=place), ["sum", "mean", "max"].index(mode)
    factors = tensor(4, device=place) if mode == "sum" else None
    operators = torch.ops.metalcore
    check_operator(operators.embedding_bag, table, indices, offsets, number, factors, False, 3, False, False)
    out, sizes, maxima = operators.embedding_bag(
        table.detach(), indices, offsets, number, factors, False, 3, False, False
    )
    check_operator(operators.embedding_bag_samples, offsets, 4, False)
    bags = operators.embedding_bag_samples(offsets, 4, False)
    grad = out.detach().requires_grad_()
    check_operator(operators.embedding_bag_backward, grad, indices, bags, sizes, maxima, factors, 5, 3, False, number)
    check_operator(operators.embedding_bag_factors, grad, table.detach(), indices, bags, 3)


def test_bad_input(device):
    table, indices = tensor(5, 4, device=device), torch.tensor([1, 2], device=device)
    offsets = torch.tensor([0], device=device)
    with pytest.raises(ValueError, match="offsets has to be a 1D Tensor"):
        metalcore.embedding_bag(indices, table)
    with pytest.raises(ValueError, match="mode has to be one of sum, mean or max"):
        metalcore.embedding_bag(indices, table, offsets, mode="median")
    with pytest.raises(NotImplementedError, match="per_sample_weights was not None"):
        metalcore.embedding_bag(indices, table, offsets, mode="mean", per_sample_weights=torch.ones(2, device=device))
    with pytest.raises(RuntimeError, match="metalcore::embedding_bag: mode must be 0, 1 or 2, not 3"):
        torch.ops.metalcore.embedding_bag(table, indices, offsets, 3, None, False, -1, False, False)
