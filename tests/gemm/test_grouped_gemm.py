"""grouped_gemm, against a product for each group in float64."""

import pytest
import torch
from references import DTYPES, check_operator, tensor
from rows import tuned

import metalcore

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
OFFSETS = [[5, 5, 75], [0, 64, 80], [64, 128, 128], [0, 0, 0], [1, 2, 3], [-4, 200, 7]]
LARGE = [2**32 + 5, -(2**32) + 9, 2**40]  # with low 32 bits that are places


def groups(offsets, size):
    """The begin and the end of each group."""
    begin, found = 0, []
    for end in offsets:
        end = min(max(end, begin), size)
        found.append((begin, end))
        begin = end
    return found


def by_rows(x, weight, offsets):
    y = x.new_zeros(len(x), weight.shape[-1])
    for matrix, (begin, end) in zip(weight, groups(offsets, len(x))):
        y[begin:end] = x[begin:end] @ matrix
    return y


def by_terms(x, weight, offsets):
    return torch.stack([x[:, begin:end] @ weight[begin:end] for begin, end in groups(offsets, len(weight))])


def assert_near(actual, expected, terms):
    eps = torch.finfo(actual.dtype).eps + terms * torch.finfo(torch.float32).eps
    torch.testing.assert_close(actual.cpu().double(), expected, rtol=0, atol=4 * terms**0.5 * eps)


@each_dtype
@pytest.mark.parametrize("offsets", OFFSETS, ids=str)
@pytest.mark.parametrize("family", ["baseline", "apple7"])
def test_groups_of_rows(device, dtype, offsets, family):
    """Also where an end lies before a group's begin, or outside: the begin or the last row counts."""
    ends = torch.tensor(offsets, device=device, dtype=torch.int32)
    for rows, terms, columns in ((80, 40, 72), (130, 33, 9)):
        x, weight = (
            tensor(rows, terms, dtype=dtype, device=device),
            tensor(3, terms, columns, dtype=dtype, device=device),
        )
        for w in (weight, weight.mT.contiguous().mT):
            with tuned(family):
                y = metalcore.grouped_gemm(x, w, ends)
            assert_near(y, by_rows(x.cpu().double(), w.cpu().double(), offsets), terms)


@each_dtype
@pytest.mark.parametrize("offsets", OFFSETS, ids=str)
def test_groups_of_terms(device, dtype, offsets):
    ends = torch.tensor(offsets, device=device)
    for rows, terms, columns in ((72, 80, 40), (9, 130, 33)):
        x, weight = (
            tensor(terms, rows, dtype=dtype, device=device).T,
            tensor(terms, columns, dtype=dtype, device=device),
        )
        for left in (x, x.contiguous()):
            y = metalcore.grouped_gemm(left, weight, ends)
            assert_near(y, by_terms(left.cpu().double(), weight.cpu().double(), offsets), terms)


def test_groups_of_columns(device):
    x, weight = tensor(3, 70, 24, device=device), tensor(24, 80, device=device)
    y = metalcore.grouped_gemm(x, weight, torch.tensor([5, 70, 80], device=device))
    expected = by_rows(weight.T.cpu().double(), x.mT.cpu().double(), [5, 70, 80]).T
    assert_near(y, expected, 24)


def test_offsets_that_int32_cannot_hold(device):
    x, weight = tensor(30, 24, device=device), tensor(3, 24, 9, device=device)
    y = metalcore.grouped_gemm(x, weight, torch.tensor(LARGE, device=device))
    assert_near(y, by_rows(x.cpu().double(), weight.cpu().double(), LARGE), 24)


@pytest.mark.parametrize("place", ["cpu", "device"])
def test_autocast(device, place):
    """As matmul's operands, those of all forms have autocast's dtype, also where they differ."""
    place = device if place == "device" else place
    offsets = torch.tensor([10, 30], device=place)
    for shapes in (((30, 24), (2, 24, 9)), ((9, 30), (30, 24)), ((2, 9, 24), (24, 30))):
        x, weight = (tensor(*shape, device=place).requires_grad_() for shape in shapes)
        with torch.autocast(place, dtype=torch.bfloat16):
            y = metalcore.grouped_gemm(x, weight, offsets)
            mixed = metalcore.grouped_gemm(x.bfloat16(), weight, offsets)
        expected = metalcore.grouped_gemm(x.bfloat16(), weight.bfloat16(), offsets)
        assert y.dtype == torch.bfloat16 and torch.equal(y, expected) and torch.equal(mixed, expected)
        assert [grad.dtype for grad in torch.autograd.grad(y.float().sum(), (x, weight))] == 2 * [torch.float32]


def test_many_groups(device):
    ends = torch.arange(1, 41, device=device) * 2
    x, weight = tensor(80, 8, device=device), tensor(40, 8, 5, device=device)
    y = metalcore.grouped_gemm(x, weight, ends)
    assert_near(y, by_rows(x.cpu().double(), weight.cpu().double(), ends.tolist()), 8)


@pytest.mark.skipif(not hasattr(torch.nn.functional, "grouped_mm"), reason="this PyTorch has no grouped_mm")
def test_it_is_pytorchs_function():
    x, weight = torch.randn(16, 16).bfloat16(), torch.randn(2, 16, 16).bfloat16()
    offsets = torch.tensor([8, 16], dtype=torch.int32)
    theirs = torch.nn.functional.grouped_mm(x, weight, offs=offsets)
    torch.testing.assert_close(metalcore.grouped_gemm(x, weight, offsets), theirs, rtol=0.02, atol=0.05)


@pytest.mark.parametrize("shapes", [((80, 6), (3, 6, 5)), ((4, 80), (80, 5)), ((3, 4, 6), (6, 80))])
def test_gradients(device, shapes):
    """Of both orders."""
    ends = torch.tensor([5, 5, 75], device=device)
    x, weight = (tensor(*shape, device=device).requires_grad_() for shape in shapes)

    def both(x, weight, ends):
        y = metalcore.grouped_gemm(x, weight, ends)
        first = torch.autograd.grad(y.square().sum(), (x, weight), create_graph=True)
        return [*first, *torch.autograd.grad(sum(g.square().sum() for g in first), (x, weight))]

    wide = [tensor.detach().cpu().double().requires_grad_() for tensor in (x, weight)]
    for found, expected in zip(both(x, weight, ends), both(*wide, ends.cpu())):
        torch.testing.assert_close(found.cpu().double(), expected, rtol=2e-4, atol=1e-4 * expected.abs().max().item())


@pytest.mark.parametrize("shapes", [((0, 6), (3, 6, 5)), ((4, 0), (3, 0, 5)), ((4, 6), (3, 6, 0)), ((4, 0), (0, 5))])
def test_empty(device, shapes):
    x, weight = (tensor(*shape, device=device) for shape in shapes)
    y = metalcore.grouped_gemm(x, weight, torch.tensor([0, 2, 4], device=device))
    assert y.numel() == 0 or (y == 0).all()
    assert (
        metalcore.grouped_gemm(tensor(4, 6, device=device), tensor(0, 6, 5, device=device), y.new_zeros(0).long())
        .eq(0)
        .all()
    )


def test_operators(device):
    x, weight = tensor(9, 4, device=device).requires_grad_(), tensor(2, 4, 3, device=device).requires_grad_()
    ends = torch.tensor([3, 8], device=device, dtype=torch.int32)
    check_operator(torch.ops.metalcore.grouped_gemm, x, weight, ends)
    check_operator(
        torch.ops.metalcore.grouped_gemm, weight.detach()[0].requires_grad_(), tensor(3, 5, device=device), ends
    )


@pytest.mark.parametrize(
    "change, error, message",
    [
        (lambda x, w, o: (x, w, o.float()), TypeError, "offsets must be integers"),
        (lambda x, w, o: (x, w, o[:1]), RuntimeError, "offsets of shape"),
        (lambda x, w, o: (x[:, 1:], w, o), RuntimeError, "does not go with weight"),
        (lambda x, w, o: (x[0], w, o), RuntimeError, "does not go with weight"),
        (lambda x, w, o: (x, w, [2, 3]), TypeError, "offsets must be a tensor"),
    ],
)
def test_errors(device, change, error, message):
    given = tensor(6, 4, device=device), tensor(2, 4, 3, device=device), torch.tensor([2, 6], device=device)
    with pytest.raises(error, match=message):
        metalcore.grouped_gemm(*change(*given))
