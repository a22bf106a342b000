"""PyTorch's flex_attention in graphs of the backend, and metalcore's there; transformers' attention by that name."""

import types

import pytest
import torch
from flex_cases import HEADS, KEYS, QUERIES, causal, formula, learned_cap, relative_positions, softcap
from rows import tuned
from test_flex import check, computed, inputs
from torch._inductor import config as inductor_config
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask

import metalcore
from metalcore._core import generated_kernels
from tools.register_gate import uses_of

LSE = AuxRequest(lse=True)


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    with tuned("apple7"):
        yield
    torch._dynamo.reset()


def compiled(function, observed):
    run = torch.compile(function, backend="metalcore", fullgraph=True)

    def call(query, key, value, score_mod, mask_mod):
        mask = create_block_mask(mask_mod, None, None, QUERIES, KEYS, device=query.device)
        with metalcore.programs.observe() as graphs:
            out, aux = run(query, key, value, score_mod, mask, enable_gqa=True, return_aux=LSE)
        observed.extend(graphs)
        return out, aux.lse

    return call


@pytest.mark.parametrize("ours", [False, True], ids=["PyTorch's", "ours"])
def test_gradients_in_a_program(device, ours):
    """Also on mps, where PyTorch's function takes no gradient by itself, and the gradient of a captured table."""
    observed: list = []
    torch.compile(lambda x: x, backend="metalcore")  # makes the backend known
    function = metalcore.flex_attention if ours else torch_flex.flex_attention
    check(device, relative_positions, inputs(torch.float32), True, compiled(function, observed))
    steps = [step.operator for graph in observed for program in graph.programs for step in program.report().steps]
    assert steps.count("flex_forward") == steps.count("flex_backward") == 1


def constants(device, dtype):
    """Numbers that the function makes tensors of, which the graph holds."""
    half = torch.tensor(0.5, dtype=dtype, device="cpu")
    return (lambda s, b, h, q, k: s * torch.where(q < k, torch.tensor(0.25, dtype=dtype), half)), None, ()


@pytest.mark.parametrize("case", [relative_positions, learned_cap, constants], ids=lambda case: case.__name__)
def test_gradients_in_inductors_graphs(device, case, monkeypatch):
    """With captured tensors of one and of no dimension, and with a size that is a symbol in the second graph."""
    if device != "mps":
        pytest.skip("on CUDA Inductor has PyTorch's own kernels")
    from metalcore.programs.flex import inductor

    calls = []
    for name in ("flex_forward", "flex_backward"):

        def counted(*args, name=name, function=getattr(inductor, name), **options):
            calls.append(name)
            return function(*args, **options)

        monkeypatch.setattr(inductor, name, counted)
    run = torch.compile(torch_flex.flex_attention, fullgraph=True)

    def by_inductor(query, key, value, score_mod, mask_mod):
        mask = None
        if mask_mod is not None:
            mask = create_block_mask(mask_mod, None, None, QUERIES, KEYS, device=query.device)
        out, aux = run(query, key, value, score_mod, mask, enable_gqa=True, return_aux=LSE)
        return out, aux.lse

    with inductor_config.patch(compile_threads=1, force_disable_caches=True):
        check(device, case, inputs(torch.float32), True, by_inductor)
    assert calls == ["flex_forward", "flex_backward"]


def test_sizes_that_are_symbols(device):
    """A captured tensor's size that is a symbol is captured, too, and has no gradient."""
    run = torch.compile(torch_flex.flex_attention, backend="metalcore", fullgraph=True, dynamic=True)
    for heads in (2, 4):
        slopes = torch.rand(heads, device=device, requires_grad=True)
        leaf = torch.rand(1, heads, 24, 64, device=device, requires_grad=True)

        def score(s, b, h, q, k, slopes=slopes):
            return s * slopes[h]

        results = (function(leaf, leaf, leaf, score) for function in (run, metalcore.flex_attention))
        found, expected = (torch.autograd.grad(out.square().sum(), (leaf, slopes)) for out in results)
        assert all(map(torch.equal, found, expected))


def test_operations_that_are_several_in_a_kernel(device):
    """AOTAutograd leaves norms and softmax whole, and a kernel has their parts."""
    run = torch.compile(torch_flex.flex_attention, backend="metalcore", fullgraph=True)
    leaf = torch.rand(1, 2, 24, 64, device=device, requires_grad=True)
    words = torch.rand(24, 5, device=device, requires_grad=True)

    def score(s, b, h, q, k):
        return s - torch.linalg.norm(words[q] - words[k]) + torch.softmax(words[k], 0)[q % 5]

    results = (function(leaf, leaf, leaf, score) for function in (run, metalcore.flex_attention))
    found, expected = (torch.autograd.grad(out.square().sum(), (leaf, words)) for out in results)
    assert all(map(torch.equal, found, expected))


def test_largest_scores(device):
    """PyTorch's own function has none on `mps`."""
    run = torch.compile(torch_flex.flex_attention, backend="metalcore", fullgraph=True)
    query, key = torch.randn(2, 1, 2, 24, 64, device=device)
    _, aux = run(query, key, key, return_aux=AuxRequest(max_scores=True))
    assert aux.lse is None
    torch.testing.assert_close(aux.max_scores, (query @ key.mT / 8).amax(-1))


def test_other_head_sizes_and_operations_are_left_to_pytorch(device):
    """The generator has no formula for a Bessel function, and no kernel has heads of 260."""

    def bessel(device, dtype):
        return (lambda score, b, h, q, k: score + torch.special.bessel_j0(q - k + 0.5)), causal(device, dtype)[1], ()

    check(device, bessel, inputs(torch.float32), True, compiled(torch_flex.flex_attention, []))
    check(device, softcap_and_causal, inputs(torch.float32, 260), True, compiled(torch_flex.flex_attention, []))


def test_a_tensor_on_another_device_is_refused(device):
    factors = torch.rand(4)
    function = torch.compile(torch_flex.flex_attention, backend="metalcore", fullgraph=True)
    with pytest.raises(RuntimeError, match=r"Buffers cannot be created for a captured tensor of shape \[4\] on cpu"):
        function(*torch.rand(3, 1, 4, 16, 64, device=device), lambda score, b, h, q, k: score * factors[h])


def softcap_and_causal(device, dtype):
    return softcap(device, dtype)


def test_autocast(device):
    """By metalcore's function, and by PyTorch's operators, which know no autocast on mps by themselves."""
    functions = metalcore.flex_attention, torch.compile(torch_flex.flex_attention, backend="metalcore", fullgraph=True)
    _, key, value = (x.to(device) for x in inputs(torch.float32))
    found = []
    for function in functions:
        query = inputs(torch.float32)[0].to(device).requires_grad_()
        with torch.autocast(device, dtype=torch.bfloat16):
            out = function(query, key.to(torch.bfloat16), value, enable_gqa=True)
        assert out.dtype == torch.bfloat16
        out.float().square().sum().backward()
        found.append((out, query.grad))
    assert all(map(torch.equal, *found))


def test_transformers_attention(device):
    """What attn_implementation="flex_attention" calls, with a soft cap, sinks, a gradient and heads of no power of two:
    transformers takes the sinks into account by the logarithms."""
    transformers = pytest.importorskip("transformers.integrations.flex_attention")
    from metalcore.integrations.transformers import register_attention

    register_attention()
    layer, sinks = types.SimpleNamespace(training=True), torch.rand(HEADS, dtype=torch.float64)

    def by_transformers(query, key, value, score_mod, mask_mod):
        mask = create_block_mask(mask_mod, None, None, QUERIES, KEYS, device=query.device)
        s_aux = sinks.to(query)
        out, lse = transformers.flex_attention_forward(layer, query, key, value, mask, softcap=3.0, s_aux=s_aux)
        return out.transpose(1, 2), lse

    def expected(query, key, value, score_mod, mask_mod):
        out, lse = formula(query, key, value, score_mod, mask_mod)
        return out * torch.sigmoid(lse - sinks.to(query)[:, None]).unsqueeze(-1), lse

    tensors = inputs(torch.float32)
    ours = computed(by_transformers, softcap, tensors, device, torch.float32, True)
    exact = computed(expected, softcap, tensors, "cpu", torch.float64, True)
    for a, b in zip(ours, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_kernels_fit_the_registers_of_apple_gpus(device):
    """A representative sample: a soft cap, a table of biases and a mask of documents, in bfloat16."""
    before = set(generated_kernels._sources)
    table = torch.rand(2, 300, device=device)
    ids = torch.zeros(300, dtype=torch.int32, device=device)
    mask = create_block_mask(lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k), None, None, 40, 40, device=device)
    leaf = torch.rand(1, 2, 40, 128, device=device, dtype=torch.bfloat16, requires_grad=True)

    def score(s, b, h, q, k):
        return 20 * torch.tanh((s + table[h, q - k + 150]) / 20)

    metalcore.flex_attention(leaf, leaf, leaf, score, mask).sum().backward()
    made = [kernel for kernel in generated_kernels._sources if kernel not in before]
    assert len(made) == 4
    for kernel in made[:2]:  # the forward pass and the gradient of queries, which take the most
        (use,) = uses_of(generated_kernels.source(kernel))
        assert use.fits, use
