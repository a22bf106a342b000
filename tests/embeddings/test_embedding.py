"""embedding against float64, with its gradients."""

import pytest
import torch
import torch.nn.functional as F
from opinfo import compare, evaluate, placed, samples
from references import DTYPES, assert_near, check_operator, tensor, wide

import metalcore

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def both(function, table, indices, grad, **options):
    table = table.detach().requires_grad_()
    out = function(indices, table, **options)
    return out.detach(), torch.autograd.grad(out, table, grad.to(out))[0]


def check(device, table, indices, **options):
    grad = torch.randn(*indices.shape, table.shape[1]).to(table.dtype)
    found = both(metalcore.embedding, table, indices.to(device), grad, **options)
    for value, expected in zip(found, both(F.embedding, wide(table), indices, grad, **options), strict=True):
        assert value.dtype == table.dtype
        assert_near(value, expected, terms=indices.numel())


@each_dtype
@pytest.mark.parametrize("integer", [torch.int32, torch.int64])
@pytest.mark.parametrize("depth", [1, 3, 8, 17, 64, 1030])
def test_rows(device, dtype, integer, depth):
    check(device, tensor(20, depth, dtype=dtype, device=device), torch.randint(20, (4, 5), dtype=integer))


@each_dtype
@pytest.mark.parametrize("options", [{"padding_idx": 3}, {"padding_idx": -1}, {"scale_grad_by_freq": True}], ids=str)
def test_options(device, dtype, options):
    check(device, tensor(6, 12, dtype=dtype, device=device), torch.randint(6, (40,)), **options)


FEW = 2048  # more indices are sorted for the gradient


@each_dtype
@pytest.mark.parametrize("depth", [4, 6])
@pytest.mark.parametrize("more", [0, FEW])
def test_runs_of_equal_indices(device, dtype, depth, more):
    """Runs end before, at and behind the ends of the blocks that threads walk, and run through whole blocks."""
    for runs in ([8, 8], [7, 9, 1], [1, 30, 2], [100], [3, 5, 8, 16, 24, 1], [31, 1, 32, 33], [1] * 17):
        runs = runs if not more else [*runs, more]
        indices = torch.arange(len(runs)).repeat_interleave(torch.tensor(runs))
        indices = indices[torch.randperm(len(indices))]
        check(device, tensor(len(runs) + 1, depth, dtype=dtype, device=device), indices)
        check(device, tensor(len(runs) + 1, depth, dtype=dtype, device=device), indices, scale_grad_by_freq=True)


def test_long_blocks(device):
    """Where there is much work each thread has more of it."""
    plans = set()
    for count in (2500, 8192):
        recording = metalcore.explain("embedding", (count,), (50, 4096), backward=True).recording
        plans |= {plan.why for plan in recording.plans if plan.variant == "runs"}
    assert len(plans) == 2
    check(device, tensor(5, 4096, device=device), torch.randint(5, (8192,)))


@each_dtype
@pytest.mark.parametrize("depth", [3, 124, 132])
def test_few_and_many_indices(device, dtype, depth):
    for count, variant in ((1, "few"), (31, "few"), (33, "few"), (FEW, "few"), (FEW + 1, "runs")):
        recording = metalcore.explain("embedding", (count,), (50, depth), backward=True).recording
        assert [plan.variant for plan in recording.plans if plan.op == "embedding_backward"] == [variant]
        check(device, tensor(50, depth, dtype=dtype, device=device), torch.randint(50, (count,)), padding_idx=3)


@each_dtype
@pytest.mark.parametrize("uses", [32, 33, 700])
def test_many_uses(device, dtype, uses):
    """Above 32 uses of an index, simdgroups share the positions; some of them have none of the uses."""
    indices = torch.cat([torch.randint(50, (70,)), torch.tensor([50, 51] * uses)])
    for order in (torch.arange(len(indices)), torch.randperm(len(indices))):
        for options in ({"padding_idx": 51}, {"scale_grad_by_freq": True}):
            check(device, tensor(52, 132, dtype=dtype, device=device), indices[order], **options)


@each_dtype
def test_layouts(device, dtype):
    for table in (
        tensor(12, 20, dtype=dtype, device=device).t(),
        tensor(20, 24, dtype=dtype, device=device)[:, 3:15],
        tensor(241, dtype=dtype, device=device)[1:].view(20, 12),
    ):
        check(device, table, torch.randint(20, (3, 4)).t())


@pytest.mark.parametrize("shape", [(), (0,), (3, 0)])
def test_small_shapes(device, shape):
    check(device, tensor(5, 4, device=device), torch.randint(5, shape))
    check(device, tensor(5, 0, device=device), torch.randint(5, (3,)))


@each_dtype
def test_indices_beyond_the_table(device, dtype):
    """Their rows are NaN, nothing else is read, and no gradient comes from them."""
    for integer, far in ((torch.int32, 2**31 - 1), (torch.int64, 2**40)):
        indices = torch.tensor([0, 5, -1, 2, far, -far], dtype=integer, device=device)
        for depth in (8, 3):
            table = tensor(5, depth, dtype=dtype, device=device)
            out, gradient = both(metalcore.embedding, table, indices, torch.ones(6, depth))
            assert out.isnan().all(1).tolist() == [False, True, True, False, True, True]
            assert gradient.sum(1).tolist() == [depth, 0, depth, 0, 0]


def test_the_same_bits(device):
    for count in (500, 2500):
        table, indices = tensor(3, 64, device=device), torch.randint(3, (count,), device=device)
        grad = torch.randn(count, 64)
        first = both(metalcore.embedding, table, indices, grad)[1]
        assert all(torch.equal(both(metalcore.embedding, table, indices, grad)[1], first) for _ in range(3))


@pytest.mark.parametrize("place", ["cpu", pytest.param("device", marks=pytest.mark.only_on("cuda"))])
@each_dtype
def test_sparse_gradients(device, dtype, place):
    """A simulated device has no sparse tensors."""
    place = "cpu" if place == "cpu" else device
    table, indices = tensor(6, 4, dtype=dtype, device=place).requires_grad_(), torch.tensor([[1, 2], [5, 1]])
    grad = torch.randn(2, 2, 4).to(device=place, dtype=dtype)
    out = torch.ops.metalcore.embedding(table, indices.to(place), 2, False, True)
    (gradient,) = torch.autograd.grad(out, table, grad)
    assert gradient.is_sparse
    expected = both(F.embedding, wide(table), indices, wide(grad), padding_idx=2)[1]
    assert_near(gradient.cpu().to_dense(), expected, terms=4)


def test_double_backward(device):
    table, indices = tensor(5, 4, device=device), torch.tensor([1, 1, 3, 4, 0])

    def second(function, table, indices, grad):
        table, grad = table.detach().requires_grad_(), grad.detach().requires_grad_()
        (first,) = torch.autograd.grad(function(indices, table, padding_idx=3), table, grad, create_graph=True)
        return torch.autograd.grad(first.square().sum(), grad)[0]

    grad = tensor(5, 4, device=device)
    found = second(metalcore.embedding, table, indices.to(device), grad)
    assert_near(found, second(F.embedding, wide(table), indices, wide(grad)), terms=8)


@each_dtype
def test_pytorch_samples(device, dtype):
    for sample in samples("nn.functional.embedding", dtype):
        if sample[2].get("max_norm") is None and not sample[2].get("sparse"):
            # OpInfo's function takes the table first.
            actual = evaluate(
                lambda w, i, **o: metalcore.embedding(i, w, **o), placed(sample, device, dtype, _same), 1, None
            )
            expected = evaluate(
                lambda w, i, **o: F.embedding(i, w, **o), placed(sample, "cpu", torch.float64, _same), 1, None
            )
            compare(actual, expected, sample, dtype, 1.0)


def _same(value):
    return value


def test_what_goes_to_pytorch(device):
    indices = torch.tensor([0, 2])
    for options in ({"max_norm": 1.0}, {"max_norm": 0.5, "norm_type": 1.0}):
        table = torch.randn(3, 4)
        expected = F.embedding(indices, table.clone(), **options)
        assert torch.equal(metalcore.embedding(indices, table, **options), expected)
    with pytest.raises(AssertionError, match="Padding_idx must be within num_embeddings"):
        metalcore.embedding(indices.to(device), torch.randn(3, 4, device=device), padding_idx=3)


@pytest.mark.parametrize("place", ["cpu", "device"])
def test_opcheck(device, place):
    place = "cpu" if place == "cpu" else device
    table, indices = tensor(5, 4, device=place).requires_grad_(), torch.tensor([[1, 1], [3, 4]], device=place)
    operators = torch.ops.metalcore
    check_operator(operators.embedding, table, indices, 3, False, False)
    grad = tensor(2, 2, 4, device=place).requires_grad_()
    check_operator(operators.embedding_backward, grad, indices, 5, 3, True)


def test_override(device):
    for integer, more in ((torch.int64, 0), (torch.int32, 0), (torch.int32, FEW)):
        table = tensor(5, 4, device=device).requires_grad_()
        indices = torch.tensor([1, 1, 3] + more * [4], device=device, dtype=integer)
        with metalcore.enable_pytorch_overrides("embedding"):
            out = F.embedding(indices, table, padding_idx=3)
            out.sum().backward()
        ran = {row.what: row.ran for row in metalcore.report().rows}
        assert ran[f"aten::embedding on {device}"] == ran[f"aten::embedding_dense_backward on {device}"] == 1
        assert torch.equal(out.detach(), table.detach()[indices])
        assert table.grad.sum(1).tolist() == [0, 8, 0, 0, 4 * more]


def test_bad_input(device):
    table, indices = tensor(5, 4, device=device), torch.tensor([1], device=device)
    with pytest.raises(RuntimeError, match="metalcore::embedding: indices must be int32 or int64"):
        torch.ops.metalcore.embedding(table, indices.float(), -1, False, False)
    with pytest.raises(RuntimeError, match="metalcore::embedding: weight must have 2 dimensions, not 1"):
        torch.ops.metalcore.embedding(table[0], indices, -1, False, False)
    with pytest.raises(
        RuntimeError, match=r"embedding_backward: grad must have the shape of indices, \[1\], and a dim"
    ):
        torch.ops.metalcore.embedding_backward(table, indices, 5, -1, False)
