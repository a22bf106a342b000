"""flex_attention: what the caller's functions read beside their arguments, and masks for other tensors."""

import types

import pytest
import torch
from flex_cases import formula
from rows import tuned
from torch.nn.attention.flex_attention import create_block_mask

import metalcore
from metalcore.programs.flex import captured, running
from metalcore.programs.flex.graphs import derivative_of, trace_mod

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


def of_activations(s, b, h, q, k):
    functions = torch.nn.functional
    s = functions.softplus(s) - functions.elu(-s) + functions.mish(0.5 * s) + functions.logsigmoid(s)
    return s + functions.celu(s, 0.5) * functions.selu(s - 1)


def test_derivatives_that_are_several_operations(device):
    """PyTorch has a backward operator for each of these functions."""
    leaf, key, value = tensors(device)
    gradients = []
    for query in (leaf.clone().requires_grad_(), leaf.cpu().double().requires_grad_()):
        if query.is_cpu:
            out, _ = formula(query, key.cpu().double(), value.cpu().double(), of_activations, None)
        else:
            out = metalcore.flex_attention(query, key, value, of_activations)
        gradients.append(torch.autograd.grad(out.square().sum(), query)[0].cpu().double())
    error = (gradients[0] - gradients[1]).abs().max()
    assert error <= 2e-5 * gradients[1].abs().max()  # the formula in float32 has 1e-5


def test_conversions_of_inductors_graphs_have_a_derivative(device):
    def score(s, b, h, q, k):
        return torch.ops.prims.convert_element_type(torch.ops.prims.convert_element_type(s, torch.float32) * 3, s.dtype)

    traced = trace_mod(score, "score_mod", torch.bfloat16, torch.device(device))
    joint = derivative_of(traced, torch.bfloat16, torch.device(device))
    gradient, places = torch.tensor(2.0, dtype=torch.bfloat16), [torch.zeros((), dtype=torch.int32)] * 4
    assert joint(gradient, *places, gradient)[0] == 6


def test_autocast_changes_no_function(device):
    """A graph that is kept serves calls with autocast and without."""
    words, mix = torch.rand(LENGTH, 8, device=device), torch.rand(8, 3, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        traced = trace_mod(
            lambda s, b, h, q, k: s + (words[k] @ mix).sum(-1), "score_mod", torch.float32, torch.device(device)
        )
    assert torch.ops.aten._to_copy.default not in [node.target for node in traced.graph.graph.nodes]


def test_graphs_with_constants_know_the_sizes_of_each_call(device):
    """Such a graph of PyTorch's is traced once more, and its loops have the lengths of the captured vectors."""

    class Halved(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("factor", torch.tensor(0.5))

        def forward(self, s, b, h, q, k, table):
            return s * self.factor + table[q].sum(-1)

    graph = torch.fx.symbolic_trace(Halved())
    for size in (3, 5):
        traced = running._captured(graph, "score_mod", tensors(device)[0], (torch.ones(LENGTH, size, device=device),))
        places = [node for node in traced.graph.graph.nodes if node.op == "placeholder"]
        assert places[5].meta["val"].shape == (LENGTH, size)


def test_heads_that_share_tables_in_another_number(device, monkeypatch):
    """Calls of as many rows in all, with other batch items and heads, are the same kernel with tables of their own."""
    monkeypatch.setattr(captured, "_BYTES", 1 << 12)
    table = torch.rand(2, LENGTH, LENGTH, device=device, requires_grad=True)

    def score(s, b, h, q, k):
        return s + table[h % 2, q, k]

    for batch, heads in ((2, 4), (4, 2)):
        query, key, value = (x.expand(batch, -1, -1, -1).repeat(1, heads // 2, 1, 1) for x in tensors(device))
        found, expected = (
            torch.autograd.grad(out.square().sum(), table)[0]
            for out in (
                metalcore.flex_attention(query, key, value, score),
                ((query @ key.mT / 4) + table.repeat(heads // 2, 1, 1)).softmax(3) @ value,
            )
        )
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_errors_about_masks_and_results(device):
    query, key, value = tensors(device)
    table = torch.ones(LENGTH)
    for batch, heads in ((2, None), (None, 3)):
        block_mask = create_block_mask(lambda b, h, q, k: q >= k, batch, heads, LENGTH, LENGTH, device=device)
        with pytest.raises(
            ValueError, match=rf"block_mask is for {batch or 1} batch items and {heads or 1} heads, not"
        ):
            metalcore.flex_attention(query, key, value, block_mask=block_mask)
    with pytest.raises(RuntimeError, match=r"a captured tensor of shape \[40\] on cpu; query is on"):
        metalcore.flex_attention(query, key, value, lambda s, b, h, q, k: s + table[k])
    with pytest.raises(
        RuntimeError, match=r"score_mod \(.*test_flex_functions.py, line \d+, in <lambda>\) must return"
    ):
        metalcore.flex_attention(query, key, value, lambda s, b, h, q, k: None)
