"""Attention by units that multiply tensors, against float64."""

import contextlib
import math

import pytest
import torch
from attention_cases import by_torch, check, computed, make
from rows import tuned
from test_attention_options import formula
from test_attention_options import test_variable_lengths as variable_lengths

import metalcore
from metalcore import _C
from metalcore.recording import record

pytestmark = pytest.mark.only_on("simulator", "cuda")


@contextlib.contextmanager
def on_units(device):
    _C.use_measured(device, _C.gpu_family(device), [("attention", "units", [1])])
    try:
        yield
    finally:
        _C.use_measured(device, _C.gpu_family(device), [])


@pytest.fixture(autouse=True)
def units(device):
    with on_units(device):
        yield


def kernels(*tensors, **options):
    return record(metalcore.scaled_dot_product_attention, *tensors, **options)[1].kernels


@pytest.mark.parametrize(
    "size, value_size, dtype",
    [(64, 64, torch.bfloat16), (40, 33, torch.float16), (72, 128, torch.bfloat16), (130, 256, torch.float16)],
    ids=str,
)
def test_head_sizes(device, size, value_size, dtype):
    """Also those that fill no tile, and rows that do not begin at multiples of 16 bytes."""
    tensors = make((1, 2, 35, size), (1, 1, 37, size), (1, 1, 37, value_size), dtype)
    tile = next(tile for tile in (64, 128, 256) if max(size, value_size) <= tile)
    name = f"attention_forward_unit_{tile}_{'half' if dtype is torch.float16 else 'bfloat'}"
    assert kernels(*(x.to(device) for x in tensors), is_causal=True, enable_gqa=True) == (name,)
    check(device, tensors, is_causal=True, enable_gqa=True)


@pytest.mark.parametrize("rows, columns", [(12, 129), (130, 128), (129, 300)])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_lengths(device, rows, columns, causal):
    """Sizes lie at and beside those of blocks of queries and of tiles of keys."""
    shapes = (1, 1, rows, 64), (1, 1, columns, 64), (1, 1, columns, 64)
    check(device, make(*shapes, torch.bfloat16), is_causal=causal)


@pytest.mark.parametrize("size", [128, 256])
def test_whole_tiles_before_an_edge(device, size):
    """The weights of a whole tile are in use while the next one's scores are masked."""
    q, k, v = (x.to(device) for x in make(*((1, 1, 272, size),) * 3, torch.bfloat16))
    result = metalcore.scaled_dot_product_attention(q, k, v, is_causal=True)
    exact = by_torch(*(x.cpu().double() for x in (q, k, v)), is_causal=True)
    # Weights, values and results have a rounding each.
    assert (result.cpu() - exact).abs().max() <= 2 * torch.finfo(torch.bfloat16).eps * exact.abs().max()


def test_heads_take_turns(device):
    """18 heads of queries do so by 6, and 9 heads of keys by 3: more than one turn, of two blocks."""
    shapes = (3, 6, 70, 64), (3, 3, 70, 64), (3, 3, 70, 64)
    check(device, make(*shapes, torch.bfloat16), is_causal=True, enable_gqa=True)


def test_windows_and_sinks(device):
    """Queries that see no key, keys that no query of a block sees, and sinks."""
    tensors = make((1, 2, 150, 64), (1, 2, 290, 64), (1, 2, 290, 64), torch.float16)
    options = {"window": (40, 3), "lower_right": True, "return_lse": True}
    check(device, tensors, formula=formula, sinks=torch.randn(2).half(), **options)
    q, k, v = (x.to(device) for x in tensors)
    out, lse = metalcore.scaled_dot_product_attention(k, q, v[:, :, :150], is_causal=True, **options)
    assert not out[:, :, :100].any() and (lse[:, :, :100] == -torch.inf).all()


def test_variable_lengths(device):
    variable_lengths(device, torch.bfloat16)


def test_checking_mode_finds_nothing(device):
    """There the layouts of cooperative tensors are others."""
    if device != "mps":
        pytest.skip("checking mode is the simulator's")
    tensors = [x.to(device) for x in make((1, 1, 20, 24), (1, 1, 140, 24), (1, 1, 140, 20), torch.bfloat16)]
    expected = metalcore.scaled_dot_product_attention(*tensors)
    with metalcore.simulator.checking(1):
        checked = metalcore.scaled_dot_product_attention(*tensors).cpu()  # which waits for it
    assert (checked - expected.cpu()).abs().max() <= torch.finfo(torch.bfloat16).eps * expected.abs().max()


@pytest.mark.parametrize("kind", ["bool", "rows", "float", "odd"])
def test_masks(device, kind):
    """Also of queries that see no key, of one row for all queries, of float32 beside 16-bit queries, and with rows that
    have no pairs of numbers."""
    tensors = make((1, 2, 40, 64), (1, 2, 140, 64), (1, 2, 140, 64), torch.float16)
    generator = torch.Generator().manual_seed(1)
    mask = torch.randn((1 if kind == "rows" else 40, 140), generator=generator)
    mask = mask > 0 if kind == "bool" else mask.half() if kind == "rows" else mask
    if kind == "bool":
        mask[3] = False
    q, k, v = (x.to(device) for x in tensors)
    given = torch.nn.functional.pad(mask, (0, 1)).to(device)[:, :140] if kind == "odd" else mask.to(device)
    result, lse = metalcore.scaled_dot_product_attention(q, k, v, given, return_lse=True)
    exact = by_torch(*(x.double() for x in tensors), mask if kind == "bool" else mask.double())
    if kind == "bool":
        exact[:, :, 3], seen = 0, lse[:, :, 3] == -torch.inf
        assert seen.all()
    # Weights, values and results have a rounding each.
    assert (result.cpu() - exact).abs().max() <= 2 * torch.finfo(torch.float16).eps * exact.abs().max()


@pytest.mark.parametrize("kind", ["bool", "added", "float"])
def test_gradients_with_masks(device, kind):
    """Of whole tiles and of tiles with an edge, where two heads of queries share keys."""
    tensors = make((1, 2, 72, 64), (1, 1, 136, 64), (1, 1, 136, 64), torch.float16)
    mask = torch.randn((72, 136), generator=torch.Generator().manual_seed(1))
    mask = mask > 0 if kind == "bool" else mask.half() if kind == "added" else mask
    if kind == "bool":
        mask[3] = False  # a query that sees no key
    given = mask.to(device)

    def ours(q, k, v, _):
        return metalcore.scaled_dot_product_attention(q, k, v, given, enable_gqa=True)

    def formula(q, k, v, _):
        result = by_torch(q, k, v, mask if kind == "bool" else mask.to(q), enable_gqa=True)
        return result.masked_fill(~mask.any(1)[:, None], 0.0) if kind == "bool" else result

    found = computed(ours, tensors, device, torch.float16, {})
    exact = computed(formula, tensors, "cpu", torch.float64, {})
    for a, b in zip(found, exact, strict=True):
        # Weights, their derivatives, what these are made of, and results have a rounding each.
        assert (a - b).abs().max() <= 2 * torch.finfo(torch.float16).eps * b.abs().max()


@pytest.mark.parametrize("size", [2.0**6, 2.0**11, 2.0**13, 2.0**15])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_large_scores(device, size, sign):
    """Exponents lie on both sides of those that float32 rounds to integers. Two keys of two tiles have the largest."""
    tensors = make((1, 1, 20, 64), (1, 1, 140, 64), (1, 1, 140, 64), torch.float16)
    q, k, v = (x.to(device) for x in tensors)
    q.zero_(), k.zero_()
    q[..., 0], k[..., 0] = size, sign * size * torch.linspace(1, 1.25, 140, device=device)
    k[:, :, [5, 135], 0] = size * (1.5 if sign > 0 else -0.5)
    result, lse = metalcore.scaled_dot_product_attention(q, k, v, return_lse=True)
    exact = tensors[2].double()[:, :, [5, 135]].mean(2, keepdim=True)
    assert (result.cpu() - exact).abs().max() <= 2 * torch.finfo(torch.float16).eps * exact.abs().max()
    largest = q[0, 0, 0, 0].item() * k[0, 0, 5, 0].item() / 8
    torch.testing.assert_close(lse.cpu(), torch.full_like(lse.cpu(), largest + math.log(2)), rtol=2**-22, atol=0)


def test_which_kernels_are_general(device):
    q, k, v = (x.to(device) for x in make((1, 2, 40, 64), (1, 2, 40, 64), (1, 2, 40, 64), torch.float16))
    mask = torch.zeros(40, 40, dtype=torch.bool, device=device)
    for options in ({"attn_mask": mask}, {"softcap": 2.0}, {"scale": -1.0}, {"scale": 0.0}):
        assert "unit_general" in kernels(q, k, v, **options)[0]
    assert "unit_64" in kernels(q, k, v)[0]
    shapes, options = ((1, 2, 40, 64),) * 3, {"dtype": torch.float16, "backward": True}
    explained = metalcore.explain("scaled_dot_product_attention", *shapes, attn_mask=(40, 40), **options)
    assert explained.recording.kernels == ("attention_dq_unit_general_64_half", "attention_dkv_unit_general_64_half")
    capped = metalcore.explain("scaled_dot_product_attention", *shapes, softcap=2.0, **options)
    assert not any("unit" in kernel for kernel in capped.recording.kernels)
    assert "unit" not in kernels(q, k, v, dropout_p=0.5)[-1]
    assert "unit" not in kernels(q.float(), k.float(), v.float())[0]


def test_softcaps_and_negative_scales(device):
    tensors = make((1, 2, 40, 64), (1, 2, 140, 64), (1, 2, 140, 64), torch.float16)
    check(device, tensors, formula=formula, softcap=2.0)
    check(device, tensors, scale=-0.2)


def test_which_families_have_units(device):
    for family, variant in (("hopper", "unit_flash"), ("baseline", "flash"), ("apple10", "narrow_flash")):
        with tuned(family):
            shapes = ((1, 2, 64, 64),) * 3
            found = metalcore.explain("scaled_dot_product_attention", *shapes, dtype=torch.bfloat16).variant
            assert found == variant
