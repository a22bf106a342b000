"""Convolutions by units that multiply tensors, against float64 convolutions."""

import pytest
import torch
import torch.nn.functional as F
from references import tensor, wide

import metalcore
from metalcore import _C
from metalcore.recording import record

pytestmark = pytest.mark.only_on("simulator", "cuda")


@pytest.fixture(autouse=True)
def units(device):
    """A GPU of 4 cores has units, so that small convolutions have wide tiles too."""
    _C.use_measured(device, _C.gpu_family(device), [("gemm", "units", [1]), ("gemm", "unit_threadgroups", [4])])
    yield
    _C.use_measured(device, _C.gpu_family(device), [])


def operands(device, dtype, shape, weight_shape, last_x=True, last_weight=True):
    x, weight = (tensor(*each, dtype=dtype, device=device) for each in (shape, weight_shape))
    last = torch.channels_last
    return x.to(memory_format=last) if last_x else x, weight.to(memory_format=last) if last_weight else weight


def check(x, weight, kernel, residual=None, **options):
    """Compares with float64. A result is rounded once, and a sum of float32 is nearer to the exact one than that."""
    channels = weight.shape[0]
    bias, scale = (tensor(channels, dtype=x.dtype, device=x.device) for _ in range(2))
    given = {"scale": scale} if kernel.startswith("conv2d") else {}
    result, recording = record(
        metalcore.conv2d, x, weight, bias, residual=residual, activation="relu", **given, **options
    )
    assert kernel in recording.kernels
    factor = wide(scale)[:, None, None] if given else 1.0
    exact = F.conv2d(wide(x), wide(weight), **options) * factor + wide(bias)[:, None, None]
    exact = (exact if residual is None else exact + wide(residual)).relu()
    rounding = torch.finfo(x.dtype).eps / 2
    torch.testing.assert_close(wide(result), exact, rtol=2 * rounding, atol=rounding * exact.abs().max().item() / 4)
    return result


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("shape", "weight_shape", "options"),
    [
        ((2, 8, 9, 7), (16, 8, 3, 3), {"padding": 1}),  # 126 pixels, and steps of 8 places
        ((2, 72, 8, 8), (70, 72, 3, 2), {"padding": 1, "dilation": 2}),  # 128 and more, and steps within places
        ((1, 16, 24, 24), (65, 16, 3, 3), {"stride": 2}),
        ((3, 32, 9, 9), (20, 16, 1, 1), {"groups": 2, "stride": 2}),
    ],
    ids=["places", "channels", "strides", "groups"],
)
def test_images(device, dtype, shape, weight_shape, options):
    x, weight = operands(device, dtype, shape, weight_shape)
    name = "half" if dtype == torch.float16 else "bfloat"
    result = check(x, weight, f"conv2d_unit_deep_64_{name}", **options)
    assert result.is_contiguous(memory_format=torch.channels_last)
    residual = tensor(*result.shape, dtype=dtype, device=device).to(memory_format=torch.channels_last)
    check(x, weight, f"conv2d_unit_deep_64_{name}", residual, **options)


def test_more_tiles_than_cores(device):
    """Four tiles of 128 pixels are as many as there are cores, and five are more."""
    for width, kernel in ((32, "conv2d_unit_deep_64_half"), (33, "conv2d_unit_64_half")):
        check(*operands(device, torch.float16, (2, 8, 8, width), (64, 8, 3, 3)), kernel, padding=1)
    for outputs, kernel in ((130, "conv2d_unit_deep_128_half"), (260, "conv2d_unit_128_half")):
        check(*operands(device, torch.float16, (2, 8, 8, 16), (outputs, 8, 3, 3)), kernel, padding=1)


def test_wide_tiles_and_a_weight_in_another_order(device):
    x, weight = operands(device, torch.bfloat16, (2, 8, 16, 16), (130, 8, 3, 3), last_weight=False)
    check(x, weight, "conv2d_unit_128_bfloat", padding=1)


@pytest.mark.parametrize(
    ("shape", "channels", "kernels"),
    [
        (
            (1, 40, 5, 5),
            24,
            ["conv2d_unit_deep_64_half", "conv2d_unit_sum_half"],
        ),  # 360 terms are 6 steps: 2 threadgroups
        ((1, 32, 5, 5), 24, ["conv2d_unit_deep_64_half"]),  # 288 are 5: shares would be too short
        ((1, 344, 4, 4), 160, ["conv2d_unit_deep_128_half", "conv2d_unit_sum_half"]),  # two wide tiles
    ],
    ids=["shared", "short", "wide"],
)
def test_threadgroups_share_terms(device, shape, channels, kernels):
    x, weight = operands(device, torch.float16, shape, (channels, shape[1], 3, 3))
    _, recording = record(metalcore.conv2d, x, weight, padding=1)
    if recording.dispatches[0].together > 1:
        kernels = kernels[:1]  # they add their sums themselves
    assert list(recording.kernels) == kernels
    for residual in (None, tensor(1, channels, *shape[2:], dtype=torch.float16, device=device)):
        check(x, weight, kernels[-1], residual, padding=1)


@pytest.mark.parametrize("channels", [1, 3, 12])
@pytest.mark.parametrize("last", [True, False], ids=["channels last", "contiguous"])
def test_channels_are_filled_up_to_packs(device, channels, last):
    """Also those of images that lie apart, within others."""
    x, weight = operands(device, torch.bfloat16, (2, channels + 2, 11, 9), (24, channels, 3, 2), last, last)
    result = check(x[:, 1:-1], weight, "conv2d_order_packs", padding=1)
    residual = torch.empty_like(result).copy_(tensor(*result.shape, dtype=torch.bfloat16, device=device))
    check(x[:, 1:-1], weight, "conv2d_unit_deep_64_bfloat", residual, padding=1)


@pytest.mark.parametrize("last", [True, False], ids=["channels last", "contiguous"])
@pytest.mark.parametrize(
    ("shape", "weight_shape", "groups", "kernel"),
    [
        ((2, 32, 6, 5), (32, 4, 3, 3), 8, "unit_deep_64"),  # all in one
        ((1, 80, 5, 6), (160, 8, 3, 2), 10, "unit_64"),  # by two: 3 and 4, which columns have room for, divide no 10
        ((1, 36, 5, 5), (36, 12, 3, 3), 3, "elements"),  # three have no packs of channels, and two are no part of three
        ((1, 32, 5, 5), (66, 16, 3, 3), 2, "unit_deep_64"),  # more than half of a tile's columns each
    ],
    ids=["all", "some", "no packs", "wide"],
)
def test_groups_are_joined(device, last, shape, weight_shape, groups, kernel):
    x, weight = operands(device, torch.bfloat16, shape, weight_shape, last, last)
    _, recording = record(metalcore.conv2d, x, weight, padding=1, groups=groups)
    assert ("conv2d_order_packs" in recording.kernels) == (groups > 3)
    kernel = f"conv2d_{kernel}_bfloat"
    result = check(x, weight, kernel, padding=1, groups=groups)
    residual = torch.empty_like(result).copy_(tensor(*result.shape, dtype=torch.bfloat16, device=device))
    check(x, weight, kernel, residual, padding=1, groups=groups)


@pytest.mark.parametrize("last", [True, False], ids=["channels last", "contiguous"])
@pytest.mark.parametrize(("channels", "outputs"), [(8, 1), (16, 4), (12, 3)])
def test_few_outputs(device, last, channels, outputs):
    x, weight = operands(device, torch.float16, (2, channels, 9, 8), (outputs, channels, 3, 3), last, last)
    check(x, weight, "conv2d_unit_deep_64_half", padding=1)


def test_weights_of_depthwise_convolutions_are_transposed(device):
    x, weight = operands(device, torch.bfloat16, (2, 24, 9, 7), (24, 1, 3, 3))
    check(x, weight, "conv2d_order", padding=1, groups=24)
    check(x, weight, "conv2d_channels_bfloat", stride=2, groups=24)


def test_contiguous_images_are_copied_in_another_order(device):
    """Images of 63 to 66 channels and pixels lie at and beside the tiles of the copy."""
    for shape, channels in (((2, 64, 8, 8), 65), ((3, 72, 7, 9), 63), ((1, 8, 5, 13), 66)):
        x, weight = operands(device, torch.float16, shape, (channels, shape[1], 3, 3), False, False)
        result = check(x, weight, "conv2d_order", padding=1)
        assert result.is_contiguous()
        residual = tensor(*result.shape, dtype=torch.float16, device=device)
        check(x, weight, "conv2d_order", residual, padding=1)


@pytest.mark.parametrize(
    ("last_x", "size", "kernel"),
    [
        (True, (5, 7), "gemm_unit_nt_short_small_bfloat"),
        (False, (4, 10), "gemm_unit_nn_short_small_bfloat"),
        (False, (5, 7), "gemm_unit_nt_short_small_bfloat"),  # of copies in the other order
    ],
    ids=["channels last", "contiguous", "contiguous without packs"],
)
@pytest.mark.parametrize("images", [1, 3])
def test_windows_of_one_pixel_are_products(device, last_x, size, kernel, images):
    x, weight = operands(device, torch.bfloat16, (images, 24, *size), (40, 24, 1, 1), last_x)
    result = check(x, weight, kernel)
    residual = tensor(*result.shape, dtype=torch.bfloat16, device=device)
    check(x, weight, kernel, residual)


def test_what_other_kernels_take(device):
    for shape, weight_shape, last in (
        ((1, 24, 6, 6), (16, 12, 3, 3), True),  # no packs of a group's channels
        ((1, 16, 6, 6), (16, 1, 3, 3), True),  # a channel for each group
    ):
        x, weight = operands(device, torch.bfloat16, shape, weight_shape, last, last)
        _, recording = record(metalcore.conv2d, x, weight, groups=shape[1] // weight_shape[1])
        assert "unit" not in recording.kernels[0]


@pytest.mark.parametrize("last_x", [False, True], ids=["contiguous", "channels last"])
def test_programs_have_weights_as_units_take_them(device, last_x):
    x, weight = operands(device, torch.bfloat16, (2, 16, 9, 7), (24, 16, 3, 3), last_x, last_x)
    net = torch.nn.Conv2d(16, 24, 3, padding=1, bias=False, device=device, dtype=torch.bfloat16)
    net.weight.data = weight
    program = metalcore.compile(net.eval(), (x,), fusions=["conv"])
    _, recording = record(program, x)
    assert "conv2d_unit_deep_64_bfloat" in recording.kernels
