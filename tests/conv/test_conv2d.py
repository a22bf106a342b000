"""conv2d against float64, in all layouts, above and below the boundaries of tiles, packs and kernels."""

import pytest
import torch
import torch.nn.functional as F
from references import DTYPES, check_operator, tensor, wide
from rows import tuned

import metalcore
from metalcore._core.registry import OPS
from metalcore.conv import _gradients
from metalcore.recording import on_meta, record

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
ACTIVATIONS = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


def assert_near(actual, x, weight, *added, function=lambda x: x, **options):
    """Within the rounding of the dtype and n eps, relative to the sum of the absolute terms. No activation multiplies
    an error by more than 1.2."""
    x, weight = wide(x), wide(weight)
    total = sum((wide(one) for one in added), torch.zeros(()))
    magnitude = F.conv2d(x.abs(), weight.abs(), **options) + total.abs()
    eps = (weight[0].numel() + 4) * torch.finfo(torch.float32).eps + torch.finfo(actual.dtype).eps
    expected = function(F.conv2d(x, weight, **options) + total)
    assert actual.shape == expected.shape
    assert ((wide(actual) - expected).abs() <= 1.2 * eps * magnitude + torch.finfo(actual.dtype).tiny).all()


def laid_out(shape, layout, dtype, device):
    """A tensor of four dimensions in one of the ways in which images and weights lie in memory."""
    n, c, h, w = shape
    if layout == "contiguous":
        return tensor(n, c, h, w, dtype=dtype, device=device)
    if layout == "channels last":
        return tensor(n, h, w, c, dtype=dtype, device=device).permute(0, 3, 1, 2)
    if layout == "first inside":
        return tensor(h, w, c, n, dtype=dtype, device=device).permute(3, 2, 0, 1)
    if layout == "first inside, channels outside":
        return tensor(c, h, w, n, dtype=dtype, device=device).permute(3, 0, 1, 2)
    if layout == "offset":
        return tensor(n * h * w * c + 1, dtype=dtype, device=device)[1:].view(n, h, w, c).permute(0, 3, 1, 2)
    return tensor(n, 2 * c, h, 3 * w, dtype=dtype, device=device)[:, ::2, :, ::3]


LAYOUTS = ["contiguous", "channels last", "first inside", "first inside, channels outside", "offset", "strided"]
# shapes of x and of the weight, and options: at and beside the boundaries of tiles (64), steps (16 or 32) and packs
CASES = [
    ((1, 16, 8, 8), (64, 16, 1, 1), {}),
    ((1, 17, 5, 13), (65, 17, 1, 1), {}),
    ((3, 8, 5, 7), (8, 8, 3, 3), {"padding": 1}),
    ((1, 24, 9, 6), (16, 24, 2, 3), {"stride": (2, 1), "padding": (1, 2)}),
    ((2, 3, 11, 10), (9, 3, 7, 5), {"stride": 2, "padding": 3}),
    ((1, 32, 7, 7), (16, 16, 3, 3), {"groups": 2, "dilation": (1, 2)}),
    ((1, 12, 6, 5), (20, 3, 1, 4), {"groups": 4, "padding": (0, 3), "dilation": (3, 1)}),
    ((1, 5, 6, 7), (5, 5, 4, 1), {"stride": (1, 3)}),
]


@each_dtype
@pytest.mark.parametrize("shape, weight_shape, options", CASES, ids=range(len(CASES)))
def test_tiles(device, dtype, shape, weight_shape, options):
    for layout in LAYOUTS:
        x = laid_out(shape, layout, dtype, device)
        for of_weight in LAYOUTS[:4] if layout in ("contiguous", "channels last") else LAYOUTS[:2]:
            weight = laid_out(weight_shape, of_weight, dtype, device)
            y, recording = record(metalcore.conv2d, x, weight, **options)
            assert_near(y, x, weight, **options)
            tiles = ("packs", "elements") if device == "mps" else ("packs", "elements", "unit", "gemm")
            assert not recording.torch_steps and recording.plans[0].variant.startswith(tiles)


@each_dtype
@pytest.mark.parametrize(
    "shape, weight_shape, options",
    [
        ((2, 8, 6, 7), (8, 1, 3, 3), {"groups": 8, "padding": 1}),
        ((1, 12, 9, 5), (12, 1, 5, 2), {"groups": 12, "stride": 2, "dilation": (1, 2)}),
        ((2, 3, 5, 4), (12, 1, 2, 2), {"groups": 3, "padding": (2, 0)}),
        ((1, 3, 9, 9), (30, 1, 3, 3), {"groups": 3, "stride": (1, 2)}),
        ((1, 6, 7, 10), (4, 6, 3, 3), {"padding": 1}),
        ((1, 6, 7, 10), (6, 2, 1, 3), {"groups": 3, "dilation": 2}),
    ],
    ids=range(6),
)
def test_direct(device, dtype, shape, weight_shape, options):
    """Depthwise convolutions and others with few channels in a group."""
    depthwise = weight_shape[1] == 1 and shape[1] == weight_shape[0] and shape[1] * dtype.itemsize % 16 == 0
    for layout in LAYOUTS:
        x = laid_out(shape, layout, dtype, device)
        for of_weight in LAYOUTS[:3]:
            weight = laid_out(weight_shape, of_weight, dtype, device)
            y, recording = record(metalcore.conv2d, x, weight, **options)
            assert_near(y, x, weight, **options)
            expected = "channels" if depthwise and layout in ("channels last", "first inside") else "rows"
            assert not y.is_contiguous() or recording.plans[0].variant == "rows"
            if layout != "first inside":
                assert recording.plans[0].variant == expected


def test_variants(device):
    """What decides how x and the weight are read, and what the reasons say."""

    def plan(shape, layout, weight_shape, of_weight, dtype=torch.float32):
        x, weight = laid_out(shape, layout, dtype, device), laid_out(weight_shape, of_weight, dtype, device)
        return record(metalcore.conv2d, x, weight)[1].plans[0]

    last, shape, weight = "channels last", (1, 8, 9, 9), (16, 8, 3, 3)
    assert plan(shape, last, weight, last).variant == "packs"
    assert "x is read 16 bytes at a time along its channels" in plan(shape, last, weight, last).why
    assert plan(shape, "contiguous", weight, last).variant == "elements"
    assert plan(shape, last, weight, "contiguous").variant == "elements"
    assert plan((1, 12, 9, 9), last, (16, 12, 3, 3), last).variant == "packs"
    with tuned("simulator"):  # units of a GPU have other tiles
        assert plan((1, 12, 9, 9), last, (16, 12, 3, 3), last, torch.float16).variant == "elements"
    assert "weight 16 bytes at a time along its outputs" in plan(shape, last, weight, "first inside").why
    assert "weight one element at a time" in plan((1, 3, 9, 9), last, (16, 3, 3, 3), last).why
    assert plan(shape, last, (4, 8, 3, 3), last).variant == "rows"


def test_a_weight_without_order_is_copied_and_explain_says_so(device):
    x, weight = tensor(1, 5, 6, 6, device=device), tensor(8, 5, 6, 6, device=device)[..., ::2, ::2]
    y, recording = record(metalcore.conv2d, x, weight)
    assert_near(y, x, weight)
    assert [name for _, name in recording.torch_steps]


@each_dtype
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_epilogue(device, dtype, activation):
    """Scale, bias, a residual that is broadcast and an activation, in each kernel."""
    for shape, weight_shape, groups in (
        ((2, 8, 6, 5), (24, 8, 2, 3), 1),
        ((1, 8, 6, 9), (8, 1, 3, 3), 8),
    ):
        for layout in ("contiguous", "channels last"):
            x, weight = (laid_out(each, layout, dtype, device) for each in (shape, weight_shape))
            y = metalcore.conv2d(x, weight, groups=groups)
            scale, bias = (tensor(len(y[0]), 2, dtype=dtype, device=device)[:, 0] for _ in range(2))
            residual = tensor(1, *y.shape[1:3], 1, dtype=dtype, device=device)
            y = metalcore.conv2d(x, weight, bias, groups=groups, scale=scale, residual=residual, activation=activation)
            scaled = wide(weight) * wide(scale)[:, None, None, None]
            added = wide(bias)[:, None, None], wide(residual)
            assert_near(y, x, scaled, *added, function=ACTIVATIONS[activation], groups=groups)


@pytest.mark.parametrize("layout", ["contiguous", "channels last"])
@pytest.mark.parametrize("window", [(3, 3), (4, 2), (1, 5)])
def test_padding_by_name(device, layout, window):
    x, weight = laid_out((1, 8, 7, 9), layout, torch.float32, device), tensor(8, 8, *window, device=device)
    for options in ({"padding": "same"}, {"padding": "same", "dilation": (2, 3)}, {"padding": "valid", "stride": 2}):
        assert_near(metalcore.conv2d(x, weight, **options), x, weight, **options)


def test_the_result_lies_as_the_input_or_the_weight(device):
    x, weight = tensor(2, 8, 5, 6, device=device), tensor(8, 8, 3, 3, device=device)
    last = torch.channels_last
    for a in (x, x.contiguous(memory_format=last)):
        for b in (weight, weight.contiguous(memory_format=last)):
            assert metalcore.conv2d(a, b).stride() == F.conv2d(a, b).stride()


def test_without_a_batch_and_empty(device):
    x, weight = tensor(3, 6, 7, device=device), tensor(5, 3, 2, 2, device=device)
    y = metalcore.conv2d(x, weight, residual=x[:1, :5, :6], stride=[1])
    assert y.shape == (5, 5, 6)
    assert_near(y[None], x[None], weight, x[:1, :5, :6])
    x = tensor(0, 3, 6, 7, device=device).requires_grad_()
    weight.requires_grad_()
    y = metalcore.conv2d(x, weight, activation="relu")
    assert y.shape == (0, 5, 5, 6)
    y.sum().backward()
    assert x.grad.shape == x.shape and (weight.grad == 0).all()


def test_the_same_bits_on_every_run(device):
    x, weight = tensor(1, 20, 9, 9, device=device), tensor(12, 20, 3, 3, device=device)
    assert torch.equal(metalcore.conv2d(x, weight), metalcore.conv2d(x, weight))


def test_special_values_stay_where_the_kernel_meets_them(device):
    """Also where tiles read places that are no part of a sum."""
    for layout in ("contiguous", "channels last"):
        x, weight = (laid_out(shape, layout, torch.float32, device) for shape in ((1, 8, 9, 9), (8, 8, 3, 3)))
        x[0, 0, 0, 0] = torch.nan
        y = metalcore.conv2d(x, weight, padding=1)
        assert y[..., :2, :2].isnan().all() and y[..., 2:, :].isfinite().all() and y[..., 2:].isfinite().all()


@pytest.mark.parametrize(
    "options", [{"padding": 1}, {"padding": "same", "dilation": 2}, {"groups": 2, "stride": (2, 1)}], ids=str
)
def test_gradients(device, options):
    """Of both orders, with everything that follows the sums, against those of PyTorch's ops."""
    groups = options.get("groups", 1)
    x, weight = tensor(2, 4, 6, 5, device=device), tensor(6, 4 // groups, 2, 3, device=device)
    scale, bias = (tensor(6, device=device) for _ in range(2))
    residual = tensor(6, 1, 1, device=device)
    inputs = [each.requires_grad_() for each in (x, weight, bias, scale, residual)]

    def both(function, tensors):
        given = dict(zip(("input", "weight", "bias", "scale", "residual"), tensors))
        y = function(**given, activation="silu", **options)
        first = torch.autograd.grad(y.square().sum(), tensors, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), tensors)
        return [*first, *second]

    ours = both(metalcore.conv2d, inputs)
    theirs = both(OPS["conv2d"].reference, [each.detach().cpu().double().requires_grad_() for each in inputs])
    for found, expected in zip(ours, theirs):
        torch.testing.assert_close(found.cpu().double(), expected, rtol=2e-4, atol=2e-4 * expected.abs().max().item())


def test_operators(device):
    x, weight = tensor(2, 4, 5, 6, device=device).requires_grad_(), tensor(6, 2, 3, 2, device=device).requires_grad_()
    vectors = [tensor(6, device=device).requires_grad_() for _ in range(2)]
    residual = tensor(2, 6, 4, 5, device=device).requires_grad_()
    conv2d = torch.ops.metalcore.conv2d
    check_operator(conv2d, x, weight, *vectors, residual, [1, 1], [0, 0, 1, 0], [1, 1], 2, "none", True)
    check_operator(conv2d, x, weight, None, None, None, [2, 1], [1, 1, 1, 1], [1, 1], 2, "none", False)
    conv2d_backward = torch.ops.metalcore.conv2d_backward
    for wanted in ((True, True), (True, False), (False, True)):
        check_operator(conv2d_backward, residual, x, weight, [1, 1], [0, 0, 1, 0], [1, 1], 2, *wanted)


def test_compile(device):
    def function(x, weight, bias):
        return metalcore.conv2d(x, weight, bias, padding=1, activation="gelu").square().sum()

    inputs = [tensor(*shape, device=device).requires_grad_() for shape in ((1, 4, 5, 6), (6, 4, 3, 3), (6,))]
    expected = torch.autograd.grad(function(*inputs), inputs)
    found = torch.autograd.grad(torch.compile(function, fullgraph=True, backend="aot_eager")(*inputs), inputs)
    for ours, theirs in zip(found, expected):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("groups, images, least", [(1, 100, 5), (64, 400, 0.4)])
def test_long_convolutions_are_split(groups, images, least):
    """Into dispatches of tiles, or of threads, none of which keeps the slowest GPU for long."""
    with on_meta("mps") as recorder, torch.no_grad():
        shapes = (images, 64, 224, 224), (64, 64 // groups, 7, 7)
        metalcore.conv2d(*(torch.empty(shape, device="meta") for shape in shapes), groups=groups)
    times = [dispatch.seconds for dispatch in recorder.recording.dispatches]
    assert max(times) <= 0.2 and sum(times) > least and len(times) > 1


def test_other_input_goes_to_pytorch(device):
    x, weight = torch.randn(1, 3, 5, 5), torch.randn(4, 3, 2, 2)
    y = metalcore.conv2d(x, weight, scale=torch.full((4,), 2.0), residual=x[:, :1, :4, :4], activation="relu")
    torch.testing.assert_close(y, (F.conv2d(x, weight) * 2 + x[:, :1, :4, :4]).relu())
    integers = torch.arange(25).view(1, 1, 5, 5)
    assert torch.equal(metalcore.conv2d(integers, integers[..., :2, :2]), F.conv2d(integers, integers[..., :2, :2]))
    xs = tensor(3, 2, 3, 5, 5, device=device)
    vmapped = torch.func.vmap(metalcore.conv2d, (0, None))(xs, weight.to(device))
    torch.testing.assert_close(vmapped[1].cpu(), F.conv2d(xs[1].cpu(), weight), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda x, w: metalcore.conv2d(x, w[:, :2]), RuntimeError, "to have 2 channels, but got 3"),
        (lambda x, w: metalcore.conv2d(x[..., :1], w), RuntimeError, "Kernel size can't be greater"),
        (lambda x, w: metalcore.conv2d(x, w, stride=0), RuntimeError, "non-positive stride"),
        (lambda x, w: metalcore.conv2d(x, w, padding=-1), RuntimeError, "negative padding"),
        (lambda x, w: metalcore.conv2d(x, w, padding="same", stride=2), RuntimeError, "not supported for strided"),
        (lambda x, w: metalcore.conv2d(x, w, bias=w[0, 0, 0]), RuntimeError, "bias"),
        (lambda x, w: metalcore.conv2d(x, w, groups=2), RuntimeError, "groups=2"),
        (lambda x, w: metalcore.conv2d(x, w, scale=w[0, 0, 0]), RuntimeError, r"scale of shape \[2\]"),
        (lambda x, w: metalcore.conv2d(x, w, residual=x), RuntimeError, "expanded size"),
        (lambda x, w: metalcore.conv2d(x, w, residual=1.0), TypeError, "residual must be a tensor"),
        (lambda x, w: metalcore.conv2d(x, w, activation="tanh"), ValueError, "activation must be one of"),
        (lambda x, w: operator(x, w[:, :2]), RuntimeError, "does not go with weight"),
        (lambda x, w: operator(x, w, stride=[0, 1]), RuntimeError, "stride must be 2 numbers from 1 on"),
        (lambda x, w: operator(x, w, padding=[0, 1]), RuntimeError, "padding must be 4 numbers from 0 on"),
        (lambda x, w: operator(x[..., :1], w), RuntimeError, "does not fit"),
        (lambda x, w: operator(x, w, activation="tanh"), RuntimeError, "activation must be"),
        (lambda x, w: operator(x, w, scale=w[0, 0, 0]), RuntimeError, r"scale must have shape \[4\]"),
        (lambda x, w: operator(x, w, residual=x), RuntimeError, "residual must have shape"),
    ],
)
def test_errors(device, call, error, message):
    with pytest.raises(error, match=message):
        call(tensor(1, 3, 5, 6, device=device), tensor(4, 3, 2, 2, device=device))


def operator(x, w, *, scale=None, residual=None, stride=(1, 1), padding=(0, 0, 0, 0), activation="none"):
    options = list(stride), list(padding), [1, 1], 1, activation, False
    return torch.ops.metalcore.conv2d(x, w, scale, None, residual, *options)


@each_dtype
@pytest.mark.parametrize("shape, weight_shape, options", CASES, ids=range(len(CASES)))
def test_gradients_are_as_accurate_as_the_dtype(device, dtype, shape, weight_shape, options):
    """On CUDA as well, where PyTorch's own may be TF32's: eps of that is 2^-11."""
    x, weight = tensor(*shape, dtype=dtype, device=device), tensor(*weight_shape, dtype=dtype, device=device)
    y = metalcore.conv2d(x.requires_grad_(), weight.requires_grad_(), **options)
    grad = tensor(*y.shape, dtype=dtype, device=device)
    found = torch.autograd.grad(y, (x, weight), grad)

    def gradients(x, weight, grad):
        leaves = x.requires_grad_(), weight.requires_grad_()
        return torch.autograd.grad(F.conv2d(*leaves, **options), leaves, grad)

    wides = [wide(each.detach()) for each in (x, weight, grad)]
    terms = (y.shape[1] * weight[0, 0].numel(), y[:, 0].numel())
    everything = zip(found, gradients(*wides), gradients(*(each.detach().abs() for each in wides)), terms)
    for ours, expected, magnitude, count in everything:
        eps = (count + 4) * torch.finfo(torch.float32).eps + torch.finfo(dtype).eps
        assert ((wide(ours) - expected).abs() <= eps * magnitude + torch.finfo(dtype).tiny).all()


@pytest.mark.parametrize("images", [0, 3])
@pytest.mark.parametrize("shape, weight_shape, options", CASES, ids=range(len(CASES)))
def test_what_cuda_computes_gradients_with(monkeypatch, images, shape, weight_shape, options):
    """On the CPU, whole and in parts of one image."""
    pair = lambda name, default: torch.nn.modules.utils._pair(options.get(name, default))  # noqa: E731
    x, weight = torch.randn(images, *shape[1:]).double(), torch.randn(weight_shape).double()
    numbers = list(pair("stride", 1)), list(pair("padding", 0)), list(pair("dilation", 1)), options.get("groups", 1)
    y = F.conv2d(x.requires_grad_(), weight.requires_grad_(), **options)
    grad = torch.randn(y.shape).double()
    expected = torch.autograd.grad(y, (x, weight), grad)
    with torch.no_grad():
        found = _gradients.transposed(grad, x, weight, *numbers)
        torch.testing.assert_close(found, expected[0])
        stride, padding, *rest = numbers
        for limit in (_gradients._GATHERED_BYTES, 1):
            monkeypatch.setattr(_gradients, "_GATHERED_BYTES", limit)
            found = _gradients.gathered_product(grad, x, weight, stride, padding * 2, *rest)
            torch.testing.assert_close(found, expected[1])
