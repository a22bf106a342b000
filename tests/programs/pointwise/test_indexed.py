"""Operations that read other elements than their own, in one kernel each time: their results flattened and joined."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch.fx import symbolic_trace
from traced import built, graph_of, placed, results

import metalcore
from metalcore.programs import pointwise

aten = torch.ops.aten


def joined(functions):
    """One function for all, so that they are one kernel; reshape and cat are part of it."""
    return lambda *tensors: torch.cat([function(*tensors).reshape(-1) for function in functions])


def check(functions, *tensors, tolerance=0.0):
    ((made, expected),) = results(joined(functions), *tensors)
    sizes = [function(*[t.cpu() for t in tensors]).numel() for function in functions]
    for k, (a, b) in enumerate(zip(made.cpu().split(sizes), expected.split(sizes), strict=True)):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda m, k=k: f"{k}: {m}")


VIEWS = [
    lambda x, i: x.reshape(6, 2, 4),
    lambda x, i: x.permute(2, 0, 1).reshape(4, 6, 2),
    lambda x, i: x.transpose(0, 2).contiguous().view(-1)[3:50:4],
    lambda x, i: x[:, -2].unsqueeze(1) + x[1:, ::2],
    lambda x, i: x[1:, ::2, :8:3],
    lambda x, i: x.flip(0, 2) + x.roll((1, -9), (0, 1)),
    lambda x, i: x[:, :, 2].repeat(2, 1, 3),
    lambda x, i: x.repeat_interleave(2, 1)[..., 1],
    lambda x, i: x.diagonal(-1, 1, 2),
    lambda x, i: x.diagonal(2, 0, 2),
    lambda x, i: x.tril(1) + x.triu(-2),
    lambda x, i: F.pixel_shuffle(x.view(4, 3, 4), 2) * F.pixel_unshuffle(x.view(1, 6, 8), 2).flatten()[0],
    lambda x, i: x.expand(2, 2, 3, 8)[1].squeeze().unflatten(2, (2, 4)),
]
PARTS = [
    lambda x, i: torch.cat([x.exp() * 0 + 1, x[:, :1], x[0, 0, :0]], 1),
    lambda x, i: torch.stack([x[0], x[1] + 1, x[0] * 2], -1),
    lambda x, i: torch.cat([i, i + 1]).float(),
    lambda x, i: F.pad(x, (1, 2, -1, 1), value=7.0),
    lambda x, i: F.pad(x, (-1, -2)),
    lambda x, i: F.pad(x, (3, 2), mode="reflect"),
    lambda x, i: F.pad(x, (3, 9), mode="replicate"),
    lambda x, i: aten.slice_scatter(x, x[:, :, :3] + 1, 2, 1, 7, 2),
    lambda x, i: aten.select_scatter(x, x[:, :, 3] + 1, 2, -1),
    lambda x, i: aten.slice_backward(x[:, :1], [2, 3, 8], 1, 2, 3, 1),
    lambda x, i: aten.select_backward(x[:, 1], [2, 3, 8], 1, 2),
    lambda x, i: F.interpolate(x, size=5) + F.interpolate(x, size=5, mode="nearest-exact"),
    lambda x, i: F.interpolate(x[None], scale_factor=(2, 1.5), mode="nearest"),
]
INDICES = [
    lambda x, i: x.index_select(1, i),
    lambda x, i: x[:, i],
    lambda x, i: x[i % 2, i],
    lambda x, i: x[:, i - 3, i[:, None] + 4],
    lambda x, i: x[i % 2, :, i],
    lambda x, i: x.gather(2, i.view(1, 2, 2).expand(2, 2, 2) * 3),
    lambda x, i: F.embedding(i.view(2, 2), x.view(6, 8) * 2),
    lambda x, i: torch.arange(8, device=x.device) * x[0, 0],
    lambda x, i: torch.arange(1, 5, 0.5, device=x.device) + torch.eye(3, 8, device=x.device),
]


@pytest.mark.parametrize("functions", [VIEWS, PARTS, INDICES], ids=["views", "parts", "indices"])
def test_elements_keep_their_bits(device, functions):
    x = torch.arange(48.0).view(2, 3, 8)
    check(functions, x.to(device), torch.tensor([2, 0, 1, 1]).to(device))


def test_dtypes_strides_and_one_kernel(device):
    torch.manual_seed(0)
    h = placed(torch.randn(4, 6, 5).half().permute(2, 0, 1), device)
    i = torch.tensor([3, -1], dtype=torch.int32, device=device)

    def function(h, i):
        y = torch.cat([h.relu(), h[:, i].to(torch.float32) > 0], 1)
        return y.permute(1, 0, 2), (y * 2).flip(0).permute(1, 0, 2)

    run = built(function, h, i)
    assert len(run.parts) == 1
    for made, expected in results(function, h, i):
        assert (made.dtype, made.shape, made.stride()) == (expected.dtype, expected.shape, expected.stride())
        assert torch.equal(made.cpu(), expected)


POOLS = [
    lambda x: F.max_pool2d(x.relu(), 3, 2, 1),
    lambda x: F.max_pool2d(x, (2, 3), (1, 2), (0, 1), (2, 1), ceil_mode=True),
    lambda x: F.max_pool2d(x, 2, return_indices=True)[1].float(),
    lambda x: F.avg_pool2d(x, 3, 2, 1),
    lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True),
    lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False),
    lambda x: F.avg_pool2d(x, (2, 3), divisor_override=5),
    lambda x: F.adaptive_avg_pool2d(x, (3, 1)) + F.adaptive_avg_pool2d(x, (3, 4)),
    lambda x: F.adaptive_max_pool2d(x, (3, 5), return_indices=True)[1] * F.adaptive_max_pool2d(x, (3, 5)),
    lambda x: F.max_pool1d(x[0], 3, 2) + F.avg_pool1d(x[0], 3, 2) + F.adaptive_avg_pool1d(x[0], 4),
    lambda x: F.max_pool3d(x, 2) - F.avg_pool3d(x, 2),
    lambda x: F.max_pool2d(F.avg_pool2d(x, 3, 1).exp(), 3, 1),
]


def test_pooling(device):
    torch.manual_seed(0)
    x = torch.randn(2, 4, 7, 9)
    x[0, 1, 2, 3], x[1, :, :3, :3] = float("nan"), -torch.inf
    check(POOLS, x.to(device), tolerance=1e-6)


def test_batch_norm_of_given_statistics(device):
    torch.manual_seed(0)
    x, mean, weight, bias = torch.randn(2, 3, 5), torch.randn(3), torch.randn(3), torch.randn(3)
    variance = torch.rand(3) + 0.5

    def function(x, mean, variance, weight, bias):
        full = aten.batch_norm.default(x, weight, bias, mean, variance, False, 0.1, 1e-5, False)
        return aten.relu.default(full), aten.batch_norm.default(x, None, None, mean, variance, False, 0.1, 1e-3, False)

    tensors = [tensor.to(device) for tensor in (x, mean, variance, weight, bias)]
    run = pointwise.build(symbolic_trace(function), tensors)  # make_fx would take batch_norm apart
    for made, expected in zip(run(*tensors), function(x, mean, variance, weight, bias), strict=True):
        torch.testing.assert_close(made.cpu(), expected, rtol=2e-6, atol=2e-6)


def test_scans(device):
    torch.manual_seed(0)
    x, i = torch.randn(2, 1100, 2), torch.randint(-9, 9, (5, 7))

    def functions(x, i):
        return (
            (x * 2).cumsum(1) + 1,
            i.cumsum(0),
            i.cumprod(1),
            x.bfloat16().cumsum(0),
            x.flip(2).cumsum(2),
        )

    tolerances = [1e-4, 0, 0, 1e-2, 1e-6]
    for (made, expected), tolerance in zip(results(functions, x.to(device), i.to(device)), tolerances):
        assert (made.dtype, made.shape, made.stride()) == (expected.dtype, expected.shape, expected.stride())
        torch.testing.assert_close(made.cpu(), expected, rtol=tolerance, atol=tolerance)


def test_writes_by_indices(device):
    torch.manual_seed(0)
    x, v, i = torch.randn(4, 5, 6), torch.randn(4, 2, 6), torch.tensor([3, 1])

    def function(x, v, i):
        return (
            (x + 1).index_copy(1, i, v * 2),
            aten.index_put.default(x, [None, i], v).relu(),
            x.index_put((i, torch.arange(2, device=x.device)), v[0, 0]),
            aten.index_put.default(x, [i - 4, None, i], v[0, 0, 0]),
            x.scatter(1, i.view(1, 2, 1).expand(3, 2, 4), v),
            x.scatter(2, i.view(1, 1, 2).expand(2, 5, 2), 1.5),
            x.index_fill(0, i, -1),
        )

    for made, expected in results(function, x.to(device), v.to(device), i.to(device)):
        assert made.stride() == expected.stride() and torch.equal(made.cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_written_results_of_16_bits_are_rounded_once(device, dtype):
    """The store rounds: a kernel that writes converts what an operation gives once, and has PyTorch's bits."""
    torch.manual_seed(0)
    x, v, i = torch.randn(4, 6).to(dtype), torch.randn(2, 6).to(dtype), torch.tensor([3, 1])

    def function(x, v, i):
        return x.index_copy(0, i, v * 1.1), x.index_put((i,), v * 1.1), x.scatter(0, i.view(2, 1).expand(2, 6), v * 1.1)

    tensors = x.to(device), v.to(device), i.to(device)
    run = built(function, *tensors)
    for made, expected in zip(run(*tensors), function(x, v, i), strict=True):
        assert torch.equal(made.cpu(), expected)
    stores = [re.search(r"out0\[.*\] = b?(?:half|float)\((v\d+)\);", source) for source in run.sources(*tensors)]
    stored = [re.search(rf"{store[1]} = (.*);", store.string) for store in stores if store]
    assert len(stored) == 3 and not any("half(" in made[1] or "bfloat(" in made[1] for made in stored if made)


@pytest.mark.only_on("simulator")
def test_indices_out_of_range_touch_no_memory(device):
    """Floating-point numbers that do not exist are NaN, and what has no place is not written."""
    x, i = torch.arange(6.0).view(3, 2), torch.tensor([0, 3, -4])
    graph = graph_of(lambda x, i: (x[i], x.index_select(0, i), x.index_copy(0, i, x + 1)), x, torch.tensor([0, 1, 2]))
    tensors = x.to(device), i.to(device)
    with metalcore.simulator.checking():
        read, selected, copied = pointwise.build(graph, tensors)(*tensors)
    nan = float("nan")
    for made, expected in (
        (read, [[0, 1], [nan, nan], [nan, nan]]),
        (selected, [[0, 1], [nan, nan], [nan, nan]]),
        (copied, [[1, 2], [2, 3], [4, 5]]),
    ):
        assert torch.equal(made.cpu().nan_to_num(-9), torch.tensor(expected).nan_to_num(-9))


def test_what_is_expensive_is_computed_once(device):
    """A window over windows, a result that others read at other places, and what a reduction reads, have a kernel."""
    torch.manual_seed(0)
    x = torch.randn(1, 2, 12, 12, device=device)

    def function(x):
        y = F.avg_pool2d(x, 3)
        return F.max_pool2d(F.max_pool2d(x, 3), 3), y + y.flip(2), x.flip(0).sum(1)

    run = built(function, x)
    assert len(run.parts) == 6
    for made, expected in results(function, x):
        torch.testing.assert_close(made.cpu(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "function, reason",
    [
        (lambda x, i: x.index_put((i,), x[i], accumulate=True), "in an order that is not known"),
        (lambda x, i: x.bfloat16().index_put((i,), x[i]), "float32 into torch.bfloat16, which PyTorch refuses"),
        (lambda x, i: F.adaptive_avg_pool2d(x.expand(1, 40, 40), (1, 2)), "more than 256 are for reductions"),
    ],
)
def test_what_is_refused(function, reason):
    x, i = torch.randn(40), torch.tensor([1, 2])
    graph = graph_of(function, x, i)
    reasons = [pointwise.supports(node) for node in graph.graph.nodes if node.op == "call_function"]
    assert any(reason in (given or "") for given in reasons), reasons
