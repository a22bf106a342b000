"""Each pattern finds what it is for, in several spellings, and changes no result."""

import math

import pytest
import torch
import torch.nn.functional as F
from agreement import agree, operators
from torch import nn

import metalcore


class Plain(nn.Module):
    """A function of an input and of some parameters."""

    def __init__(self, function, *shapes):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.function = function
        self.weights = nn.ParameterList(torch.randn(shape, generator=generator) for shape in shapes)

    def forward(self, *inputs):
        return self.function(*inputs, *self.weights)


def llama_norm(x, weight):
    dtype = x.dtype
    x = x.to(torch.float32)
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * x.to(dtype)


def gemma_norm(x, weight):
    normal = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    return (normal * (1.0 + weight.float())).type_as(x)


def short_norm(x, weight):
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + 1e-5) * weight


def bare_norm(x):
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).sqrt().reciprocal()


def written_layer_norm(x, weight, bias):
    centered = x - x.mean(-1, keepdim=True)
    return centered / torch.sqrt(centered.pow(2).mean(-1, keepdim=True) + 1e-5) * weight + bias


def other_layer_norm(x, weight, bias):
    mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
    return bias + weight * ((x - mean) * torch.rsqrt(variance + 1e-5))


def norm_of_sum(x, residual, weight):
    total = x + residual
    return F.rms_norm(total, (total.shape[-1],), weight, 1e-6), total


def wide_norm_of_sum(x, residual, weight):
    total = x + residual
    return llama_norm(total, weight), total


def layer_norm_of_sum(x, residual, weight, bias):
    total = residual + x
    return F.layer_norm(total, (16,), weight, bias) @ total.mT


def rotate_half(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def hugging_rope(q, k, angles):
    angles = torch.cat((angles, angles), dim=-1)
    cos, sin = (angles.cos() * 1.5).unsqueeze(1), (angles.sin() * 1.5).unsqueeze(1)
    return (q * cos) + (rotate_half(q) * sin), (k * cos) + (rotate_half(k) * sin)


def rope_of_tokens_first(q, k, angles):
    cos, sin = (torch.cat([f(angles)] * 2, -1)[:, :, None] for f in (torch.cos, torch.sin))
    turned = [torch.cat((x[..., 4:].neg(), x[..., :4]), -1) for x in (q, k)]
    return cos * q + sin * turned[0], cos * k + turned[1] * sin


def written_attention(q, k, v):
    scores = torch.matmul(q, k.transpose(2, 3)) * (q.shape[-1] ** -0.5)
    return torch.matmul(F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype), v)


def masked_attention(q, k, v, mask):
    return torch.softmax(q / math.sqrt(8) @ k.permute(0, 1, 3, 2) + mask, -1) @ v


def repeated(x, times=3):
    batch, heads, length, size = x.shape
    return x[:, :, None].expand(batch, heads, times, length, size).reshape(batch, heads * times, length, size)


def attention_of_groups(q, k, v, mask):
    return F.scaled_dot_product_attention(q, repeated(k), repeated(v), mask > 0)


def attention_of_interleaved_groups(q, k, v):
    return F.scaled_dot_product_attention(q, *(x.repeat_interleave(3, dim=1) for x in (k, v)))


def attention_of_three(q, k, v):
    return (q[0] @ k[0].mT).div(2.0).softmax(-1) @ v[0]


def sigmoid_gate(gate, up):
    return up * (gate * torch.sigmoid(gate))


def conv_block(x, residual, weight, bias):
    return F.relu(residual + F.conv2d(x, weight, bias, padding="same"))


def linear_with_residual(x, residual, weight, bias):
    return residual + F.linear(x, weight, bias)


def normed_projections(x, weight, a, b, c, bias):
    y = llama_norm(x, weight)
    return F.linear(y, a, bias), F.linear(y, b), F.linear(y, c)


def normed_gate(x, residual, weight, gate, up, down):
    y = gemma_norm(x + residual, weight)
    return x + residual + F.linear(F.silu(F.linear(y, gate)) * F.linear(y, up), down)


HEADS = (2, 3, 5, 8)
IMAGES = (2, 8, 5, 6)
# pattern, what it becomes, function, shapes of the inputs, shapes of the parameters
CASES = [
    ("rms_norm", "metalcore.rms_norm", llama_norm, [(3, 4, 16)], [(16,)]),
    ("rms_norm", "metalcore.rms_norm", gemma_norm, [(3, 4, 16)], [(16,)]),
    ("rms_norm", "metalcore.rms_norm", short_norm, [(4, 16)], [(16,)]),
    ("rms_norm", "metalcore.rms_norm", bare_norm, [(4, 16)], []),
    ("rms_norm", "metalcore.rms_norm", lambda x, w: F.rms_norm(x, (4, 16), w), [(3, 4, 16)], [(4, 16)]),
    ("layer_norm", "metalcore.layer_norm", lambda x, w, b: F.layer_norm(x, (16,), w, b), [(4, 16)], [(16,), (16,)]),
    ("layer_norm", "metalcore.layer_norm", lambda x: F.layer_norm(x, (4, 16)), [(3, 4, 16)], []),
    ("layer_norm", "metalcore.layer_norm", written_layer_norm, [(4, 16)], [(16,), (16,)]),
    ("layer_norm", "metalcore.layer_norm", other_layer_norm, [(4, 16)], [(16,), (16,)]),
    ("add_norm", "metalcore.add_rms_norm", norm_of_sum, [(4, 16), (4, 16)], [(16,)]),
    ("add_norm", "metalcore.add_layer_norm", layer_norm_of_sum, [(4, 16), (4, 16)], [(16,), (16,)]),
    ("rope", "metalcore.rope", hugging_rope, [HEADS, (2, 1, 5, 8), (1, 5, 4)], []),
    ("rope", "metalcore.rope", rope_of_tokens_first, [(2, 5, 3, 8), (2, 5, 1, 8), (2, 5, 4)], []),
    ("written_attention", "metalcore.attention", written_attention, [HEADS] * 3, []),
    ("written_attention", "metalcore.attention", masked_attention, [HEADS, HEADS, HEADS, (2, 1, 5, 5)], []),
    ("written_attention", "metalcore.attention", attention_of_three, [HEADS] * 3, []),
    ("attention", "metalcore.attention", F.scaled_dot_product_attention, [HEADS] * 3, []),
    ("attention", "metalcore.attention", attention_of_groups, [(2, 6, 1, 8), *[(2, 2, 40, 8)] * 2, (2, 1, 1, 40)], []),
    ("attention", "metalcore.attention", attention_of_interleaved_groups, [(2, 6, 1, 8), *[(2, 2, 5, 8)] * 2], []),
    ("gated", "metalcore.gated", lambda gate, up: F.silu(gate) * up, [(4, 16)] * 2, []),
    ("gated", "metalcore.gated", lambda gate, up: up * F.gelu(gate, approximate="tanh"), [(4, 16)] * 2, []),
    ("gated", "metalcore.gated", sigmoid_gate, [(4, 16)] * 2, []),
    ("cross_entropy", "metalcore.cross_entropy", lambda x: F.cross_entropy(x, x.argmax(-1)), [(4, 16)], []),
    ("joined_linear", "metalcore.joined_linear", lambda x, w: F.linear(x, w), [(1, 1, 16)], [(8, 16)]),
    ("joined_linear", "metalcore.joined_linear", normed_projections, [(1, 1, 16)], [(16,), *[(8, 16)] * 3, (8,)]),
    ("joined_linear", "metalcore.joined_linear", normed_gate, [(1, 16)] * 2, [(16,), *[(8, 16)] * 2, (16, 8)]),
    ("joined_linear", "metalcore.joined_linear", linear_with_residual, [(1, 16), (1, 8)], [(8, 16), (8,)]),
    ("linear", "metalcore.matmul", lambda x, w, b: F.linear(x, w, b).relu(), [(3, 4, 16)], [(8, 16), (8,)]),
    ("linear", "metalcore.matmul", lambda x, w: F.gelu(F.linear(x, w)), [(4, 16)], [(8, 16)]),
    ("linear", "metalcore.matmul", linear_with_residual, [(4, 16), (4, 8)], [(8, 16), (8,)]),
    ("conv", "metalcore.conv2d", lambda x, w: F.conv2d(x, w, stride=2), [(2, 3, 7, 8)], [(9, 3, 3, 2)]),
    ("conv", "metalcore.conv2d", lambda x, w, b: F.silu(F.conv2d(x, w, b)), [IMAGES], [(8, 8, 3, 3), (8,)]),
    ("conv", "metalcore.conv2d", lambda x, w: F.gelu(F.conv2d(x, w, groups=8)), [IMAGES], [(8, 1, 3, 3)]),
    ("conv", "metalcore.conv2d", conv_block, [IMAGES, IMAGES], [(8, 8, 3, 2), (8,)]),
    ("kernels", "metalcore.softmax", lambda x: torch.softmax(x, 0), [(4, 16)], []),
    ("kernels", "metalcore.log_softmax", lambda x: x.log_softmax(-1), [(4, 16)], []),
    ("kernels", "metalcore.group_norm", lambda x, w, b: F.group_norm(x, 2, w, b), [(2, 4, 5)], [(4,), (4,)]),
]


def inputs(shapes, device):
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(shape, generator=generator).to(device) for shape in shapes)


@pytest.mark.parametrize("pattern, becomes, function, shapes, parameters", CASES)
def test_with_and_without(device, pattern, becomes, function, shapes, parameters):
    module, args = Plain(function, *parameters).to(device), inputs(shapes, device)
    names = [p.name for p in metalcore.programs.PATTERNS]
    fused = metalcore.compile(module, args, fusions=names)
    plain = metalcore.compile(module, args, fusions=[name for name in names if name != pattern])
    assert pattern in {rewritten.pattern for rewritten in fused.report().fused}
    assert becomes in operators(fused) and becomes not in operators(plain)
    with torch.no_grad():
        expected = module(*args)
    agree(expected, fused(*args))
    agree(expected, plain(*args))


def wide_in_half(x, weight):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def other_dimension(x, weight):
    return x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-6) * weight


def normal_of_sample(x, weight, bias, **options):
    """Variances are divided by n - 1 by default, and those of a layer norm by n."""
    return (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True, **options) + 1e-5) * weight + bias


def normal_of_sample_by_correction(x, weight, bias):
    return normal_of_sample(x, weight, bias, correction=1)


def angles_of_one_half(q, k, angles):
    cos, sin = torch.cat([angles, angles + 1], -1).cos(), torch.cat([angles, angles], -1).sin()
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def other_tables_of_the_key(q, k, angles):
    cos, sin = (torch.cat([f(angles)] * 2, -1) for f in (torch.cos, torch.sin))
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * cos


def quarter_rotation(q, k, angles):
    cos, sin = (torch.cat([f(angles)] * 2, -1) for f in (torch.cos, torch.sin))
    turned = [torch.cat((-x[..., 6:], x[..., :6]), -1) for x in (q, k)]
    return q * cos + turned[0] * sin, k * cos + turned[1] * sin


def softmax_of_queries(q, k, v):
    return torch.softmax(q @ k.mT, -2) @ v


def untransposed(q, k, v):
    return torch.softmax(q @ k, -1) @ v


def shown_weights(q, k, v):
    weights = torch.softmax(q @ k.mT, -1)
    return weights @ v, weights


SQUARE = (2, 3, 8, 8)
# what must not become one of metalcore's operators: the pattern, a function, shapes, dtype
OTHERS = [
    ("rms_norm", wide_in_half, [(4, 16), (16,)], torch.float16),
    ("rms_norm", other_dimension, [(4, 16), (16,)], torch.float32),
    ("layer_norm", normal_of_sample, [(4, 16), (16,), (16,)], torch.float32),
    ("layer_norm", normal_of_sample_by_correction, [(4, 16), (16,), (16,)], torch.float32),
    ("rope", angles_of_one_half, [HEADS, HEADS, (1, 5, 4)], torch.float32),
    ("rope", other_tables_of_the_key, [HEADS, HEADS, (1, 5, 4)], torch.float32),
    ("rope", quarter_rotation, [HEADS, HEADS, (1, 5, 4)], torch.float32),
    ("written_attention", softmax_of_queries, [SQUARE] * 3, torch.float32),
    ("written_attention", untransposed, [SQUARE] * 3, torch.float32),
    ("written_attention", shown_weights, [SQUARE] * 3, torch.float32),
    ("gated", lambda gate, up: F.silu(gate) * up, [(4, 16), (16,)], torch.float32),
    ("gated", lambda gate, up, z: F.silu(gate) * up + z, [(4, 16)] * 3, torch.float32),  # one generated kernel
    ("gated", lambda gate, up: F.gelu(gate + 1) * up, [(4, 16)] * 2, torch.float32),
    ("joined_linear", F.linear, [(2, 16), (8, 16)], torch.float32),  # two rows
    ("joined_linear", F.linear, [(1, 16), (16,)], torch.float32),
    ("joined_linear", lambda x, w: x @ w.T, [(1, 16), (8, 16)], torch.float32),
    ("add_norm", lambda x, y, w: F.rms_norm(x + 2 * y + y.sum(), (16,), w), [(4, 16), (4, 1), (16,)], torch.float32),
]


@pytest.mark.parametrize("pattern, function, shapes, dtype", OTHERS)
def test_what_looks_alike_stays(device, pattern, function, shapes, dtype):
    module, args = Plain(function), tuple(x.to(dtype) for x in inputs(shapes, device))
    program = metalcore.compile(module, args)
    assert pattern not in {rewritten.pattern for rewritten in program.report().fused}
    agree(module(*args), program(*args), 2e-3 if dtype is torch.float16 else 2e-5)


@pytest.mark.parametrize(
    "pattern, product, x, weight",
    [
        ("linear", F.linear, (4, 16), (16, 16)),
        ("joined_linear", F.linear, (1, 16), (16, 16)),
        ("conv", F.conv2d, (1, 4, 6, 6), (4, 4, 1, 1)),
    ],
)
@pytest.mark.parametrize("after", [lambda y: y, F.relu])
def test_a_product_is_no_residual_of_itself(device, pattern, product, x, weight, after):
    def function(x, weight):
        y = product(x, weight)
        return after(y + y)

    module, args = Plain(function, weight).to(device), inputs([x], device)
    agree(module(*args), metalcore.compile(module, args, fusions=[pattern])(*args))
    options = {"fusions": [pattern], "fallback": False}
    compiled = torch.compile(function, backend="metalcore", options=options)  # PyTorch 2.11 unpacks no ParameterList
    agree(module(*args), compiled(*args, *module.weights))


def test_values_that_are_written_to_are_left_alone(device):
    def function(x, weight):
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        x.add_(1)
        return x * scale * weight

    module, (x,) = Plain(function, (16,)).to(device), inputs([(4, 16)], device)
    program, other = metalcore.compile(module, (x.clone(),)), x.clone()
    assert not program.report().fused
    agree(module(x), program(other))
    agree(x, other)


def test_what_was_written_to_before_is_read(device):
    """Attention over a cache of keys, which the program writes to, sees what it wrote."""

    def function(q, k, cache):
        cache[:, :, 2:4] = k
        y = F.scaled_dot_product_attention(q, cache, cache)
        cache[:, :, 4:] = k
        return y + F.scaled_dot_product_attention(q, cache, cache)

    args = inputs([(2, 3, 2, 8), (2, 3, 2, 8), (2, 3, 6, 8)], device)
    program, others = metalcore.compile(Plain(function), args, fusions=["attention"]), [x.clone() for x in args]
    assert operators(program).count("metalcore.attention") == 2
    agree(function(*args), program(*others))
    agree(args, others)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half(device, dtype):
    module, args = Plain(llama_norm, (64,)).to(device), inputs([(4, 64)], device)
    program = metalcore.compile(module, args, dtype=dtype)
    found = program(args[0].to(dtype))
    assert found.dtype == dtype and "metalcore.rms_norm" in operators(program)
    agree(module(args[0].to(dtype).float()), found.float(), 0.01)


def test_a_norm_of_16_bits_begins_before_its_conversion(device):
    """So that the sum before it is part of the norm, and no tensor of float32 is left."""
    module, args = Plain(wide_norm_of_sum, (64,)).to(device), inputs([(4, 64)] * 2, device)
    program = metalcore.compile(module, args, dtype=torch.bfloat16)
    assert operators(program) == ["metalcore.add_rms_norm"]
    rounded = tuple(x.bfloat16() for x in args)
    agree(module(*(x.float() for x in rounded)), tuple(x.float() for x in program(*rounded)), 0.02)


def test_a_norm_begins_with_float32_that_others_need(device):
    def function(x, weight):
        return llama_norm(x.float(), weight), x.float().exp()

    module, (x,) = Plain(function, (64,)).to(device), inputs([(4, 64)], device)
    program = metalcore.compile(module, (x.half(),))
    assert "metalcore.rms_norm" in operators(program)
    agree(module(x.half()), program(x.half()))


def test_heads_are_read_once(device):
    """Repeated heads are no copies in memory. One query with a mask has kernels that are faster on every GPU."""
    args = inputs([(2, 6, 1, 8), *[(2, 2, 40, 8)] * 2, (2, 1, 1, 40)], device)
    program = metalcore.compile(Plain(attention_of_groups), args)
    assert [name for name in operators(program) if name in ("expand", "reshape", "metalcore.attention")] == [
        "metalcore.attention"
    ]
    agree(attention_of_groups(*args), program(*args))


def test_heads_in_another_order_stay_repeated(device):
    def function(q, k, v):
        tiled = [x[:, None].expand(2, 3, 2, 40, 8).reshape(2, 6, 40, 8) for x in (k, v)]
        return F.scaled_dot_product_attention(q, *tiled)

    args = inputs([(2, 6, 1, 8), *[(2, 2, 40, 8)] * 2], device)
    program = metalcore.compile(Plain(function), args, fusions=["attention"])
    assert "expand" in operators(program)
    agree(function(*args), program(*args))


def test_heads_that_were_repeated_before_a_write_are_read_before_it(device):
    def function(q, cache, k):
        keys, values = repeated(cache), repeated(cache)
        cache[:, :, 4:5] = k
        return F.scaled_dot_product_attention(q, keys, values)

    args = inputs([(2, 6, 1, 8), (2, 2, 40, 8), (2, 2, 1, 8)], device)
    program, others = metalcore.compile(Plain(function), args, fusions=["attention"]), [x.clone() for x in args]
    agree(function(*args), program(*others))
    agree(args, others)


def test_what_reads_one_row_is_one_product(device):
    """With the norm before it, and the gate or the residual after it."""
    args, parameters = inputs([(1, 16)] * 2, device), [(16,), *[(8, 16)] * 2, (16, 8)]
    program = metalcore.compile(Plain(normed_gate, *parameters).to(device), args, fusions=["rms_norm", "joined_linear"])
    assert operators(program) == ["add", "metalcore.joined_linear", "metalcore.joined_linear"]


def test_a_norm_that_others_need_is_apart_from_products(device):
    def function(x, weight, a, b):
        y = F.rms_norm(x, (16,), weight)
        return F.linear(y, a), F.linear(y, b), y

    module, args = Plain(function, (16,), (8, 16), (5, 16)).to(device), inputs([(1, 16)], device)
    program = metalcore.compile(module, args, fusions=["rms_norm", "joined_linear"])
    names = operators(program)
    assert names.count("metalcore.rms_norm") == names.count("metalcore.joined_linear") == 1
    agree(module(*args), program(*args))


def test_more_layers_than_the_kernel_takes(device):
    def function(x, *weights):
        return [F.linear(x, weight) for weight in weights]

    module, args = Plain(function, *[(n, 16) for n in (8, 5, 4, 3)]).to(device), inputs([(1, 16)], device)
    program = metalcore.compile(module, args, fusions=["joined_linear"])
    assert operators(program).count("metalcore.joined_linear") == 2
    agree(module(*args), program(*args))


def test_a_norm_with_a_wider_weight_is_apart_from_products(device):
    def function(x, weight, a):
        return F.linear(llama_norm(x, weight).half(), a.half())

    module, args = Plain(function, (16,), (8, 16)).to(device), tuple(x.half() for x in inputs([(1, 16)], device))
    program = metalcore.compile(module, args, fusions=["rms_norm", "joined_linear"])
    assert "metalcore.joined_linear" in operators(program)
    agree(module(*args).float(), program(*args).float(), 4e-3)
