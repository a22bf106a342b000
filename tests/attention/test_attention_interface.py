"""scaled_dot_product_attention as PyTorch sees it: its samples, derivatives of derivatives, tracing, autocast, the
override, explain, and errors."""

import functools

import pytest
import torch
import torch.nn.functional as F
from attention_cases import by_torch, make
from opinfo import check_samples
from references import DTYPES, check_operator
from rows import tuned
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import checkpoint

import metalcore
from metalcore.attention._operators import Options

run = metalcore.scaled_dot_product_attention
ops = torch.ops.metalcore


def leaves(device, dtype=torch.float32, rows=40, columns=50, size=64):
    tensors = make((2, 4, rows, size), (2, 2, columns, size), (2, 2, columns, size), dtype)
    return [x.to(device).requires_grad_() for x in tensors]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_samples_of_pytorch(device, dtype):
    """All except those with dropout, whose random numbers are not PyTorch's."""
    name = "nn.functional.scaled_dot_product_attention"
    with sdpa_kernel(SDPBackend.MATH):  # the reference's other kernels have no second derivative
        check_samples(run, name, device, dtype, select=lambda q, args, options: options["dropout_p"] == 0)


def test_operators(device):
    q, k, v = leaves(device)
    mask, sinks = torch.randn(1, 4, 40, 50, device=device), torch.randn(4, device=device, requires_grad=True)
    seed = torch.tensor([1, 2], dtype=torch.int32, device=device)
    options = Options(0, 0, 10, 5, True, 0.1, 3.0, 0.25)
    check_operator(ops.attention, q, k, v, mask, sinks, None, None, seed, *options, True)
    cu_seq = torch.tensor([0, 11, 30], dtype=torch.int32, device=device)
    options = Options(30, 30, -1, 0, False, 0.1, 0.0, 0.0)
    q, k, v = (x.detach() for x in (q, k, v))
    check_operator(ops.attention, q[:1], k[:1], v[:1], None, None, cu_seq, cu_seq, None, *options, False)
    check_operator(ops.plain_attention, q, k, v, True, 0.1)
    q, k, v = (x.bfloat16() for x in (q, k, v))
    out, _, sums, rests = ops.attention(q, k, v, None, None, None, None, None, *options, True)
    check_operator(ops.attention_backward, out, None, q, k, v, out, sums, rests, None, None, None, None, None, *options)


@pytest.mark.parametrize("causal", [False, True])
def test_calls_without_options_give_the_same_bits(device, causal):
    q, k, v = (x.detach() for x in leaves(device))
    call = functools.partial(metalcore.scaled_dot_product_attention, q, k, v, is_causal=causal, enable_gqa=True)
    assert torch.equal(call(), call(return_lse=True)[0])
    assert not ops.plain_attention(q[:0], k[:0], v[:0], causal, 0.1).numel()
    leaf = q.requires_grad_()
    found = torch.autograd.grad(ops.plain_attention(leaf, k, v, causal, q.shape[-1] ** -0.5).sum(), leaf)
    assert torch.equal(found[0], torch.autograd.grad(call().sum(), leaf)[0])


def test_second_derivatives(device):
    """Of everything at once, against the formula's."""
    q, k, v = leaves(device, rows=6, columns=7, size=8)
    mask, sinks = (torch.randn(shape, device=device, requires_grad=True) for shape in ((2, 1, 6, 7), (4,)))

    def second(inputs):
        out, lse = run(*inputs[:4], softcap=2.0, window=(4, 2), sinks=inputs[4], enable_gqa=True, return_lse=True)
        first = torch.autograd.grad((out.sin().sum() + lse.cos().sum()), inputs, create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first), inputs)

    inputs = [q, k, v, mask, sinks]
    expected = second([x.detach().cpu().double().requires_grad_() for x in inputs])
    for a, b in zip(second(inputs), expected):
        assert (a.cpu() - b).abs().max() < 1e-4 * b.abs().max()


def test_lse_alone_has_a_gradient(device):
    q, k, v = leaves(device)
    _, lse = run(q, k, v, enable_gqa=True, return_lse=True)
    found = torch.autograd.grad(lse.sum(), (q, k, v), allow_unused=True)
    wide = [x.detach().cpu().double().requires_grad_() for x in (q, k)]
    scores = wide[0] @ wide[1].repeat_interleave(2, 1).mT / 8
    for a, b in zip(found, torch.autograd.grad(scores.logsumexp(-1).sum(), wide)):
        assert (a.cpu() - b).abs().max() < 1e-5
    assert not found[2].any()


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(device, dynamic):
    q, k, v = leaves(device, torch.bfloat16)
    mask = torch.randn(40, 50, device=device, dtype=torch.bfloat16, requires_grad=True)

    def function(q, k, v, mask):
        return run(q * 2, k, v, mask, enable_gqa=True, window=(20, -1))

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    out, expected = compiled(q, k, v, mask), function(q, k, v, mask)
    assert torch.equal(out, expected)
    found, expected = (torch.autograd.grad(x, (q, k, v, mask), torch.ones_like(x)) for x in (out, expected))
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


def test_dropout_is_compiled(device):
    q, k, v = leaves(device)
    compiled = torch.compile(
        lambda q, k, v: run(q, k, v, enable_gqa=True, dropout_p=0.5), fullgraph=True, backend="aot_eager"
    )
    out = compiled(q, k, v)
    assert not torch.equal(out, compiled(q, k, v)) and out.isfinite().all()
    out.sum().backward()


def test_exported(device):
    class Module(torch.nn.Module):
        def forward(self, q, k, v):
            return run(q, k, v, enable_gqa=True, softcap=3.0)

    tensors = [x.detach() for x in leaves(device)]
    program = torch.export.export(Module(), tuple(tensors))
    assert any("metalcore.attention" in str(node.target) for node in program.graph.nodes)
    assert torch.equal(program.module()(*tensors), Module()(*tensors))


def test_checkpointed(device):
    tensors = leaves(device)

    def function(q, k, v):
        return run(q, k, v, enable_gqa=True, is_causal=True)

    found = torch.autograd.grad(checkpoint(function, *tensors, use_reentrant=False).sin().sum(), tensors)
    for a, b in zip(found, torch.autograd.grad(function(*tensors).sin().sum(), tensors)):
        assert torch.equal(a, b)


def test_autocast(device):
    q, k, v = leaves(device)
    mask = torch.randn(40, 50, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        expected = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        ours = run(q, k, v, mask, enable_gqa=True)
    assert ours.dtype == expected.dtype
    assert all(x.dtype == torch.float32 for x in torch.autograd.grad(ours.float().sum(), (q, k, v)))


def test_the_override(device):
    q, k, v = leaves(device)
    with metalcore.enable_pytorch_overrides("scaled_dot_product_attention"):
        ours = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        gradients = torch.autograd.grad(ours.sum(), (q, k, v))
        F.scaled_dot_product_attention(q[..., :0], k[..., :0], v, enable_gqa=True)  # it is left to PyTorch
        rows = [row for row in metalcore.report().rows if row.override == "scaled_dot_product_attention"]
        row = next(row for row in rows if row.what.startswith("aten::"))
    if device == "cuda":
        assert not row.replaced and "faster" in next(iter(row.left))
        return
    assert row.ran == 1 and row.left
    expected = run(q, k, v, is_causal=True, enable_gqa=True)
    assert torch.equal(ours, expected)
    for a, b in zip(gradients, torch.autograd.grad(expected.sum(), (q, k, v))):
        assert torch.equal(a, b)


@pytest.mark.only_on("simulator", "mps")  # other rows' plans have units that multiply tensors
@pytest.mark.parametrize("size, tile", [(64, 64), (65, 96), (97, 128), (129, 192), (193, 256), (256, 256)])
def test_explain(size, tile):
    with tuned("baseline"):  # a Metal device has rows of its own
        plan = metalcore.explain(
            "scaled_dot_product_attention", *[(2, 4, 300, size)] * 3, dtype=torch.bfloat16, backward=True
        )
    assert plan.variant == "flash" and f"tiles for {tile}" in plan.why
    assert plan.kernels == (f"attention_dq_{tile}_bfloat", f"attention_dkv_{tile}_bfloat")
    with tuned("baseline"):
        plan = metalcore.explain("scaled_dot_product_attention", *[(2, 4, 300, size)] * 3, dtype=torch.float16)
    assert plan.kernels == (f"attention_forward_{tile}_half",)
    assert "faster" not in plan.why


@pytest.mark.parametrize("family", ["apple7", "apple8", "apple9", "apple10"])
@pytest.mark.parametrize("size", [64, 96, 128, 192, 256])
def test_plans_of_apple_gpus(family, size):
    """Few registers a thread: 8 rows a simdgroup, and without masks, soft caps and dropout none of their branches."""
    shapes = [(2, 4, 300, size)] * 3
    with tuned(family):
        for options, kind in (({}, "narrow"), ({"is_causal": True}, "narrow"), ({"softcap": 2.0}, "narrow_general")):
            call = functools.partial(
                metalcore.explain, "scaled_dot_product_attention", *shapes, dtype=torch.float16, **options
            )
            gradients = ("dkv",) if size < 128 else ("dk", "dv")
            assert call().kernels == (f"attention_forward_{kind}_{size}_half",)
            assert call(backward=True).kernels == tuple(
                f"attention_{gradient}_{kind}_{size}_half" for gradient in ("dq", *gradients)
            )
            for plan in (call(), call(backward=True)):
                assert plan.variant == "narrow_flash" and "128 registers" in plan.why
                assert ("with masks" in plan.why) == (kind == "narrow_general")


def test_other_tensors_go_to_pytorch():
    """On the CPU, and in float64."""
    tensors = [torch.randn(2, 4, 6, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    assert torch.equal(run(*tensors), F.scaled_dot_product_attention(*tensors))
    bias = causal_lower_right(6, 6)
    assert (run(*tensors, bias) - F.scaled_dot_product_attention(*tensors, bias)).abs().max() < 1e-12
    out, lse = run(*tensors, return_lse=True)
    assert (out - by_torch(*tensors)).abs().max() < 1e-12 and lse.dtype == torch.float64
    assert torch.autograd.gradgradcheck(lambda *x: run(*x, softcap=2.0, window=(2, 1)), tensors)


def test_errors(device):
    q, k, v = (x.detach() for x in leaves(device))
    for arguments, options, error, message in [
        ((q, k, v), {"softcap": 1.0}, RuntimeError, None),  # heads that are no groups
        ((q, k[..., :9], v), {"return_lse": True, "enable_gqa": True}, RuntimeError, "do not go together"),
        ((q, k, v[:, :, :4]), {"return_lse": True, "enable_gqa": True}, RuntimeError, "do not go together"),
        ((q, k.half(), v), {"return_lse": True, "enable_gqa": True}, RuntimeError, "one dtype"),
        ((q, k, v.half()), {"enable_gqa": True}, RuntimeError, "one dtype|same dtype"),
        ((q, k[:, :1].expand(-1, 3, -1, -1), v), {"softcap": 1.0, "enable_gqa": True}, RuntimeError, "no multiple"),
        ((q, k, v, q), {"softcap": 1.0, "enable_gqa": True}, RuntimeError, None),
        ((q, k, v, q[0, 0, :, :50].int()), {"softcap": 1.0, "enable_gqa": True}, RuntimeError, "attn_mask must be"),
        (
            (q, k, v, q[0, 0, :, :50]),
            {"softcap": 1.0, "enable_gqa": True, "is_causal": True},
            RuntimeError,
            "no attn_mask",
        ),
        ((q, k, v), {"window": (1, -2), "enable_gqa": True}, ValueError, "attention: window must be"),
        ((q, k, v), {"window": 3, "enable_gqa": True}, ValueError, "attention: window must be"),
        ((q, k, v), {"softcap": -1.0, "enable_gqa": True}, ValueError, "attention: softcap must be"),
        ((q, k, v), {"softcap": torch.inf, "enable_gqa": True}, ValueError, "attention: softcap must be a finite"),
        ((q, k, v), {"softcap": None, "enable_gqa": True}, ValueError, "attention: softcap must be a finite"),
        ((q, k, v), {"sinks": q[0, 0, 0, :3], "enable_gqa": True}, ValueError, "attention: sinks must have"),
        ((q, k, v), {"sinks": [0.0] * 4, "enable_gqa": True}, TypeError, "attention: sinks must be a tensor"),
        ((q, k, v), {"sinks": torch.zeros(4), "enable_gqa": True}, RuntimeError, "must be on query's device"),
        ((q, k, v), {"dropout_p": 1.5, "enable_gqa": True}, ValueError, "attention: dropout_p must be"),
    ]:
        with pytest.raises(error, match=message):
            run(*arguments, **options)


def test_errors_of_the_operator(device):
    q, k, v = (x.detach() for x in leaves(device))
    numbers = torch.zeros(3, dtype=torch.int32, device=device)
    given = dict(zip(("mask", "sinks", "cu_seq_q", "cu_seq_k", "seed"), [None] * 5))
    for changed, dropout, message in [
        ({"mask": q}, 0.0, "mask must have shape"),
        ({"mask": numbers.view(1, 1, 1, 3)[..., :1]}, 0.0, "mask must be bool"),
        ({"sinks": q[0, 0, 0, :3]}, 0.0, "sinks must have 4"),
        ({"cu_seq_q": numbers}, 0.0, "go together"),
        ({"cu_seq_q": numbers, "cu_seq_k": numbers}, 0.0, "one batch item"),
        ({"cu_seq_q": numbers.long(), "cu_seq_k": numbers}, 0.0, "int32"),
        ({}, 0.5, "needs a seed"),
        ({"seed": numbers}, 0.5, "2 numbers"),
        ({}, 1.5, "dropout must be"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            ops.attention(q, k, v, *(given | changed).values(), *Options(0, 0, -1, -1, False, 1.0, 0.0, dropout), False)
    with pytest.raises(RuntimeError, match="do not go together"):
        ops.attention(q, k, v[..., :1, :], *given.values(), *Options(0, 0, -1, -1, False, 1.0, 0.0, 0.0), False)
