"""flex_attention: what the caller's functions read beside their arguments, and masks for other tensors."""

import types

import pytest
import torch
from flex_cases import formula
from rows import tuned
from torch.nn.attention.flex_attention import create_block_mask

import metalcore

LENGTH = 40


@pytest.fixture(autouse=True)
def _one_family():
    with tuned("apple7"):
        yield


def tensors(device):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(1, 2, LENGTH, 16, generator=generator).to(device) for _ in range(3)]


def test_attributes_that_a_program_sets(device):
    """A graph that is kept is that of the attributes' present values: of a class, of a module and of a function."""
    settings = types.ModuleType("settings")

    class Config:
        factor = 0.0

    def shift(q, k):
        return (q - k) * shift.step

    def score(s, b, h, q, k):
        return s * Config.factor + settings.base * h + shift(q, k)

    query, key, value = tensors(device)
    for values in ((1.0, 0.5, 0.1), (3.0, 0.5, 0.1), (3.0, 2.0, 0.1), (3.0, 2.0, -0.3)):
        Config.factor, settings.base, shift.step = values
        out = metalcore.flex_attention(query, key, value, score)
        expected, _ = formula(*(x.cpu().double() for x in (query, key, value)), score, None)
        torch.testing.assert_close(out.cpu().double(), expected, rtol=1e-5, atol=1e-5)


def test_ends_at_the_limits_of_whole_numbers(device):
    """The ends of a row's keys are differences, which do not overflow."""
    limits = torch.iinfo(torch.int64)
    last = torch.tensor([limits.max, limits.min, 7], device=device)[torch.arange(LENGTH, device=device) % 3]
    query, key, value = tensors(device)

    def mask(last):
        return lambda b, h, q, k: k <= last[q]

    block_mask = create_block_mask(mask(last), None, None, LENGTH, LENGTH, device=device)
    out = metalcore.flex_attention(query, key, value, block_mask=block_mask)
    expected, _ = formula(*(x.cpu().double() for x in (query, key, value)), None, mask(last.cpu()))
    torch.testing.assert_close(out.cpu().double(), expected, rtol=1e-5, atol=1e-5)


def test_a_number_on_the_cpu_has_a_gradient(device):
    factor = torch.tensor(0.5, requires_grad=True)
    query, key, value = tensors(device)

    def score(s, b, h, q, k):
        return s * factor

    (found,) = torch.autograd.grad(metalcore.flex_attention(query, key, value, score).square().sum(), factor)
    exact, _ = formula(*(x.cpu() for x in (query, key, value)), score, None)
    (expected,) = torch.autograd.grad(exact.square().sum(), factor)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_errors_about_masks_and_results(device):
    query, key, value = tensors(device)
    table = torch.ones(LENGTH)
    for batch, heads in ((2, None), (None, 3)):
        block_mask = create_block_mask(lambda b, h, q, k: q >= k, batch, heads, LENGTH, LENGTH, device=device)
        with pytest.raises(ValueError, match=rf"block_mask is for {batch or 1} batch items and {heads or 1} heads, not"):
            metalcore.flex_attention(query, key, value, block_mask=block_mask)
    with pytest.raises(RuntimeError, match=r"a captured tensor of shape \[40\] on cpu; query is on"):
        metalcore.flex_attention(query, key, value, lambda s, b, h, q, k: s + table[k])
    with pytest.raises(RuntimeError, match=r"score_mod \(.*test_flex_functions.py, line \d+, in <lambda>\) must return"):
        metalcore.flex_attention(query, key, value, lambda s, b, h, q, k: None)
