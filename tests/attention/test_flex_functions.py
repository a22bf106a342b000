"""flex_attention: what the caller's functions read beside their arguments, and masks for other tensors."""

import re
import types

import pytest
import torch
from flex_cases import formula
from rows import tuned
from torch.nn.attention.flex_attention import create_block_mask

import metalcore
from metalcore.programs.flex import captured, launches, running
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


@pytest.mark.parametrize("count", [19, 20, 40])  # a forward kernel has buffers for 19
def test_more_captured_tensors_than_a_kernel_has_buffers(device, count):
    """The smallest of each dtype share a buffer, with the distances of their elements."""
    generator = torch.Generator().manual_seed(5)
    tables = [torch.rand(LENGTH, 2, generator=generator) for _ in range(count)]
    tables = [(9 * x).int().t() if i % 7 == 3 else x[1:].t() if i % 5 == 1 else x.t() for i, x in enumerate(tables)]
    tables[2], tables[-1] = tables[2].contiguous().requires_grad_(), tables[-1].half().float().requires_grad_()

    def attention(function, query, key, value, tables):
        def score(s, b, h, q, k):
            for i, table in enumerate(tables):
                s = s + table[h, (k if i % 2 else q) % (LENGTH - 1)] * (0.3 - 0.1 * (i % 5)) * (1 + (q + k) % 3)
            return s

        leaves = [x.detach().requires_grad_() for x in (query, key, value)]
        out = function(*leaves, score)
        learned = [table for table in tables if table.requires_grad]
        return [out, *torch.autograd.grad(out.square().sum(), [*leaves, *learned])]

    on_device = [x.detach().to(device).requires_grad_(x.requires_grad) for x in tables]
    exact = [x.detach().double().requires_grad_() if x.requires_grad else x for x in tables]
    found = attention(metalcore.flex_attention, *tensors(device), on_device)
    inputs = [x.cpu().double() for x in tensors(device)]
    expected = attention(lambda q, k, v, score: formula(q, k, v, score, None)[0], *inputs, exact)
    for result, right in zip(found, expected, strict=True):
        error = (result.cpu().double() - right).abs().max()
        assert error <= 1e-4 * right.abs().max()  # 40 sums of scores up to 30, whose steps are 2e-6


def test_what_a_kernel_has_no_numbers_for_is_said(device):
    """Sizes and strides of captured tensors, and numbers of the functions, are 448 at most."""
    tables = [torch.ones(LENGTH, 1, 1, 1, device=device) for _ in range(57)]

    def score(s, b, h, q, k):
        return s + sum(table[k, 0, 0, 0] for table in tables)

    with pytest.raises(
        NotImplementedError, match=r"metalcore.flex_attention: score_mod and mask_mod have \d+ numbers .* takes 448"
    ):
        metalcore.flex_attention(*tensors(device), score)


def test_a_function_with_a_loop_is_compiled_once(device):
    """It is no part of each of a thread's scores, of which a kernel would have 32 copies."""
    words = torch.ones(LENGTH, 64, device=device)
    score = trace_mod(
        lambda s, b, h, q, k: s + (words[q] * words[k]).sum(-1), "score_mod", torch.float32, torch.device(device)
    )
    mask = trace_mod(lambda b, h, q, k: (words[q] * words[k]).sum(-1) > 0, "mask_mod", None, torch.device(device))
    lines = launches.Functions(score, mask).mods(1, "forward").text().splitlines()
    apart = [re.findall(r"(\w+)\(", line)[-1] for line in lines if "noinline" in line]
    assert apart == ["score", "mask"]


def test_a_norm_is_no_loop_in_a_loop(device):
    """What all elements of a vector are divided by is computed before the loop over them."""
    words = torch.ones(LENGTH, 64, device=device)

    def cosine(s, b, h, q, k):
        return s + torch.nn.functional.cosine_similarity(words[q], words[k], dim=-1)

    score = trace_mod(cosine, "score_mod", torch.float32, torch.device(device))
    method = launches.Functions(score, None).mods(1, "forward").text().split("float score(")[1].split("return")[0]
    before = [method[: found.start()] for found in re.finditer(r"for \(", method)]
    assert [text.count("{") - text.count("}") for text in before] == [1, 1, 1]


def test_a_mask_of_captured_vectors(device):
    """What a mask finds for a key alone may be a vector, of which a tile holds nothing."""
    generator = torch.Generator().manual_seed(6)
    words = torch.randint(-3, 4, (LENGTH, 4), generator=generator).float()  # sums are exact

    def mask(words):
        return lambda b, h, q, k: ((words[q] * words[k]).sum(-1) > 0) | (words[k].amax() == words[q, 0]) | (q == k)

    query, key, value = tensors(device)
    block_mask = create_block_mask(mask(words.to(device)), None, None, LENGTH, LENGTH, device=device)
    out = metalcore.flex_attention(query, key, value, block_mask=block_mask)
    shown = (words @ words.T > 0) | (words.amax(1) == words[:, :1]) | torch.eye(LENGTH, dtype=torch.bool)
    q, k, v = (x.cpu().double() for x in (query, key, value))
    expected = (q @ k.mT / 4).masked_fill(~shown, -torch.inf).softmax(3) @ v
    torch.testing.assert_close(out.cpu().double(), expected, rtol=1e-5, atol=1e-5)


def test_largest_elements_and_layer_norm_of_captured_vectors(device):
    """Operations with several results: where a kernel has the one that is used."""
    generator = torch.Generator().manual_seed(7)
    words = torch.rand(LENGTH, 6, generator=generator)

    def score(s, normal, products):
        return s + 3 * products.max(-1).values - products.min(-1, keepdim=True)[0].sum(-1) + normal.sum(-1)

    def gradients(function, words, *inputs):
        words = words.requires_grad_()
        out = function(words, *inputs)
        return [out, *torch.autograd.grad(out.square().sum(), words)]

    def by_kernels(words, query, key, value):
        def mod(s, b, h, q, k):
            normal = torch.nn.functional.layer_norm(words[k], (6,)) * words[q]
            return score(s, normal, words[q] * words[k])

        return metalcore.flex_attention(query, key, value, mod)

    def by_matrices(words, query, key, value):
        normal = torch.nn.functional.layer_norm(words, (6,)) * words[:, None]
        return score(query @ key.mT / 4, normal, words[:, None] * words).softmax(3) @ value

    found = gradients(by_kernels, words.to(device), *tensors(device))
    expected = gradients(by_matrices, words.double(), *(x.cpu().double() for x in tensors(device)))
    for result, right in zip(found, expected, strict=True):
        assert (result.cpu().double() - right).abs().max() <= 2e-5 * right.abs().max()
    table = words.detach().to(device)
    with pytest.raises(NotImplementedError, match=r"score_mod: sort: .*test_flex_functions.py, line \d+, in <lambda>"):
        metalcore.flex_attention(*tensors(device), lambda s, b, h, q, k: s + table[q].sort().values[0])


def test_slopes_where_vectors_are_equal(device):
    """PyTorch's norms and sinc have a slope of 0 there, and no NaN."""
    generator = torch.Generator().manual_seed(8)
    words = torch.rand(LENGTH, 3, generator=generator)

    def score(s, q, k):
        far = torch.linalg.norm(q - k, dim=-1) + torch.linalg.vector_norm(q - k, ord=3, dim=-1)
        return s - far + torch.sinc(q[..., 0] - k[..., 0])

    check_words(device, words, score, lambda x: lambda s, b, h, q, k: score(s, x[q], x[k]))


def test_tensors_of_lists(device):
    """A function may make a table, and find the places of numbers between others."""
    words = torch.rand(LENGTH, 3, generator=torch.Generator().manual_seed(9))

    def table(like):
        return torch.tensor([0.25, 0.5, 2.0, 4.0], device=like.device), torch.tensor([-3, 0, 5], device=like.device)

    def score(s, q, k):
        factors, ends = table(s)
        places = torch.arange(LENGTH, dtype=torch.int32)
        return s * q[..., 1] + factors.to(s)[torch.bucketize(places[:, None] - places, ends)]

    def ours(x):
        def of_places(s, b, h, q, k):
            factors, ends = table(s)
            return s * x[q, 1] + factors[torch.bucketize(q - k, ends)]

        return of_places

    for _ in range(2):  # the second time it is known
        check_words(device, words, score, ours)


def check_words(device, words, score, ours):
    """Holds gradients of words, of which a score has those of its query and its key, against the formula."""
    query, key, value = tensors(device)
    leaf = words.to(device).requires_grad_()
    out = metalcore.flex_attention(query, key, value, ours(leaf))
    exact = words.double().requires_grad_()
    q, k, v = (x.cpu().double() for x in (query, key, value))
    expected = score(q @ k.mT / 4, exact[:, None], exact).softmax(3) @ v
    results = [(x, *torch.autograd.grad(x.square().sum(), of)) for x, of in ((out, leaf), (expected, exact))]
    for found, right in zip(*results, strict=True):
        assert (found.cpu().double() - right).abs().max() <= 2e-5 * right.abs().max()


def test_numbers_shifted_by_places_and_beyond_float32(device):
    words = torch.rand(LENGTH, 3, generator=torch.Generator().manual_seed(10))
    places = torch.arange(LENGTH, dtype=torch.int32)

    def score(s, q, k, at=(places[:, None], places)):
        bits = (((1 << (at[0] % 31)) >> at[1] % 8) & 3) + ((1000 >> (at[1] % 8)) & 1)
        return torch.where(s < 1e300, s, 0.0) + bits * q[..., 0] * k[..., 1] + torch.where(s > 1e39, 1.0, 0.0)

    check_words(device, words, score, lambda x: lambda s, b, h, q, k: score(s, x[q], x[k], (q, k)))
