"""topk against torch.topk, and the functions that keep the largest of a row against a sort."""

import pytest
import torch
from references import DTYPES, check_operator, tensor, wide

import metalcore
from metalcore.recording import record
from metalcore.sampling._renorm import _by_torch

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def assert_topk(x, k, **options):
    """The values are PyTorch's, and the indices lead to them. Each is there once, the lower first of equal values."""
    values, indices = metalcore.topk(x, k, **options)
    expected = torch.topk(x.cpu(), k, **options)
    dim = options.get("dim", -1)
    assert torch.equal(values.cpu().nan_to_num(7e4), expected.values.nan_to_num(7e4)) and indices.dtype == torch.int64
    assert torch.equal(x.cpu().gather(dim, indices.cpu()).nan_to_num(7e4), values.cpu().nan_to_num(7e4))
    a, b = (values.movedim(dim, -1).cpu(), indices.movedim(dim, -1).cpu())
    equal = a[..., 1:] == a[..., :-1]
    assert (b[..., 1:] > b[..., :-1])[equal].all()


@each_dtype
@pytest.mark.parametrize("largest", [True, False])
def test_topk(device, dtype, largest):
    """Rows of one simdgroup, of several, and of more numbers than threads have; ties in 16 bits."""
    for length, k in ((1, 1), (7, 3), (32, 32), (127, 5), (129, 64), (1000, 1000), (1025, 1024), (5000, 50)):
        assert_topk(tensor(3, length, dtype=dtype, device=device), k, largest=largest)


@each_dtype
@pytest.mark.parametrize("largest", [True, False])
def test_many(device, dtype, largest):
    """Those that are sorted in device memory, on both sides of a power of two and of the most. 16 bits have ties."""
    for length, k in ((1025, 1025), (3000, 2048), (5000, 2049)):
        assert_topk(tensor(2, length, dtype=dtype, device=device), k, largest=largest)
    x = torch.zeros(2, 1500, dtype=dtype)
    x[0, 7::9], x[1, 100], x[1, 200:205] = 1.0, -torch.inf, torch.nan
    assert_topk(x.to(device), 1200, largest=largest)


def test_rows_whose_largest_numbers_lie_anywhere(device):
    """2,048 numbers have room in threadgroup memory: those that equal the k-th largest may be as many, or one more."""
    x = torch.zeros(6, 9000)
    x[0], x[1] = torch.arange(9000.0), -torch.arange(9000.0)
    x[2] = torch.arange(9000.0) % 256  # all of the largest are one thread's
    x[3, 4000 : 4000 + 2048], x[4, 4000 : 4000 + 2049] = 1.0, 1.0
    for k in (1, 40, 1023, 1024):
        assert_topk(x.to(device), k)
    drawn = metalcore.sample(x.to(device).expand(50, 6, 9000).reshape(300, 9000), top_k=40).view(50, 6).cpu()
    largest = x.topk(40).values[:, -1]
    assert (x.expand(50, 6, 9000).gather(-1, drawn[..., None])[..., 0] >= largest).all()
    assert all(len(set(drawn[:, row].tolist())) > 25 for row in (3, 4, 5))  # equal logits, of which all are kept


def test_the_most(device):
    x = tensor(1, 65600, device=device)
    assert_topk(x, 65536)
    if device != "cpu":
        for k, kernels in ((1024, ("top_k_float",)), (65536, ("top_k_long_float",)), (65537, ())):
            assert record(metalcore.topk, x, k)[1].kernels == kernels


@each_dtype
def test_ties_and_special_values(device, dtype):
    x = torch.zeros(2, 300, dtype=dtype)
    x[0, 7::9], x[1, 100], x[1, 200:205] = 1.0, -torch.inf, torch.nan
    x[1, 3], x[1, 5] = torch.inf, -torch.nan
    for k in (1, 5, 7, 40, 300):
        for largest in (True, False):
            assert_topk(x.to(device), k, largest=largest)


def test_dimensions_and_strides(device):
    x = tensor(6, 40, 5, device=device)
    assert_topk(x, 3, dim=1)
    assert_topk(x.mT[:, 1:, ::2], 3, dim=-1)
    assert_topk(x[2:, ::3], 2, dim=0)
    found = metalcore.topk(x, 2)
    assert found.values.shape == found.indices.shape == (6, 40, 2)
    assert metalcore.topk(x, 0).values.shape == (6, 40, 0)


def test_topk_gradients(device):
    x = tensor(4, 30, device=device).requires_grad_()
    y = metalcore.topk(x, 3).values.square().sum()
    (first,) = torch.autograd.grad(y, x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    chosen = torch.zeros(4, 30).scatter(-1, torch.topk(x.detach().cpu(), 3).indices, 1.0)
    torch.testing.assert_close(first.cpu(), 2 * x.detach().cpu() * chosen)
    torch.testing.assert_close(second.cpu(), 8 * x.detach().cpu() * chosen)


def test_operators(device):
    check_operator(torch.ops.metalcore.topk, tensor(3, 20, device=device).requires_grad_(), 4, True)
    check_operator(torch.ops.metalcore.renorm_rows, tensor(3, 20, device=device), tensor(3, device=device) + 5, 0)


def close(actual, expected):
    torch.testing.assert_close(
        wide(actual), expected, rtol=2 * torch.finfo(actual.dtype).eps + 1e-5, atol=torch.finfo(actual.dtype).tiny
    )


@each_dtype
def test_renorm(device, dtype):
    """Rows of any length, with limits that are numbers or tensors."""
    for length in (1, 31, 130, 1000, 4100):
        logits = tensor(2, 3, length, dtype=dtype, device=device)
        probs = logits.float().softmax(-1).to(dtype)
        for k in (1, 5, 5000):
            counts = torch.full((6,), float(k))
            expected = _by_torch(wide(logits).view(6, -1), counts, 0).view(logits.shape)
            assert torch.equal(wide(metalcore.top_k_mask_logits(logits, k)), expected)
            expected = _by_torch(wide(probs).view(6, -1), counts, 1).view(probs.shape)
            close(metalcore.top_k_renorm_probs(probs, k), expected)
        counts = torch.tensor([[1, 2, 3], [4, 5, 6]], device=device)
        y = metalcore.top_k_mask_logits(logits, counts)
        assert torch.equal(wide(y), _by_torch(wide(logits).view(6, -1), counts.cpu().view(-1).float(), 0).view(y.shape))


def test_top_p(device):
    """Sums are exact, so that no rounding decides what belongs to the set."""
    probs = torch.tensor([[0.125, 0.5, 0.25, 0.125], [0.25, 0.25, 0.25, 0.25], [1.0, 0.0, 0.0, 0.0]], device=device)
    for p, kept in ((0.0, [1, 4, 1]), (0.5, [1, 4, 1]), (0.625, [2, 4, 1]), (0.75, [2, 4, 1]), (0.8, [4, 4, 1])):
        y = metalcore.top_p_renorm_probs(probs, p)
        assert (y > 0).sum(-1).tolist() == kept and torch.allclose(y.sum(-1), y.new_ones(3))
    each = metalcore.top_p_renorm_probs(probs, torch.tensor([0.5, 1.0, 0.1], device=device))
    assert (each > 0).sum(-1).tolist() == [1, 4, 1]
    assert torch.equal(metalcore.top_p_renorm_probs(probs, 1.0), probs)


def test_numbers_that_are_no_probabilities(device):
    probs = torch.tensor([[-1.0, torch.nan, 3.0, 1.0], [0.0, 0.0, -1.0, torch.nan]], device=device)
    expected = torch.tensor([[0.0, 0.0, 0.75, 0.25], [0.0, 0.0, 0.0, 0.0]])
    assert torch.equal(metalcore.top_k_renorm_probs(probs, 2).cpu(), expected)
    assert metalcore.top_k_mask_logits(probs, 4).cpu()[0].tolist() == [-1.0, -torch.inf, 3.0, 1.0]


def test_empty_and_strides(device):
    assert metalcore.top_k_mask_logits(tensor(0, 5, device=device), 2).shape == (0, 5)
    x = tensor(9, 40, device=device)
    for y in (x.T, x[::2, 1:], x[:, 1::3]):
        expected = metalcore.top_k_mask_logits(y.contiguous(), 3)
        for place in (y, y.cpu()):
            found = metalcore.top_k_mask_logits(place, 3)
            assert torch.equal(found.cpu(), expected.cpu()) and found.is_contiguous()


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda x: metalcore.top_k_mask_logits(x, 0), ValueError, "top_k must be positive"),
        (lambda x: metalcore.top_k_mask_logits(x, 2.0), TypeError, "top_k must be a number or a tensor"),
        (lambda x: metalcore.top_k_mask_logits(x, x[:, 0]), TypeError, "top_k must not be of torch.float32"),
        (lambda x: metalcore.top_p_renorm_probs(x, 1.5), ValueError, r"top_p must be in \[0, 1\]"),
        (lambda x: metalcore.top_k_renorm_probs(x.int(), 1), RuntimeError, "floating-point"),
        (lambda x: metalcore.top_k_renorm_probs([1.0], 1), TypeError, "probs must be a tensor"),
        (lambda x: metalcore.topk(x, 6), RuntimeError, "k"),
    ],
)
def test_errors(device, call, error, message):
    with pytest.raises(error, match=message):
        call(tensor(2, 5, device=device))
