"""The gated delta rule, its step, and rules with other gates, against the chunks of PyTorch's ops that transformers'
fallback has as well."""

from functools import partial

import torch

import metalcore
from metalcore.sequence._delta_formulas import rule

from ...harness.case import DTYPES, KINDS, Comparison, family

# batch, length, heads, value heads, size of heads: the first ones are Qwen3-Next's
SHAPES = {
    "gpu": [(1, 2048, 16, 32, 128), (8, 2048, 16, 32, 128), (1, 16384, 16, 32, 128)],
    "simulator": [(1, 128, 1, 2, 32)],
    "quick": [(1, 16, 1, 2, 8)],
}
STEPS = {
    "gpu": [(64, 1, 16, 32, 128), (1, 1, 16, 32, 128)],
    "simulator": [(2, 1, 1, 2, 64)],
    "quick": [(1, 1, 1, 2, 8)],
}


FUNCTIONS = {"gated_delta_rule": metalcore.chunk_gated_delta_rule, "kda": metalcore.chunk_kda}


def ours(name, q, k, v, g, beta=None):
    if beta is None:
        return metalcore.chunk_simple_gla(q, k, v, g)[0]
    return FUNCTIONS[name](q, k, v, g, beta, use_qk_l2norm_in_kernel=True)[0]


def theirs(q, k, v, g, beta=None):
    return rule(q, k, v, g, beta, None, None, q.shape[3] ** -0.5, beta is not None)[0]


def our_step(q, k, v, g, beta, state):
    return metalcore.fused_recurrent_gated_delta_rule(
        q, k, v, g, beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
    )


def their_step(q, k, v, g, beta, state):
    return rule(q, k, v, g, beta, state, None, q.shape[3] ** -0.5, True)


@family
def gated_delta_rule(scale):
    for shape in SHAPES[scale]:
        for kind in KINDS:
            for dtype in DTYPES:
                yield case("gated_delta_rule", kind, shape, dtype, scale)
    for name in ("kda", "simple_gla"):
        for kind in KINDS:
            yield case(name, kind, SHAPES[scale][0], torch.bfloat16, scale)
    for shape in STEPS[scale]:
        for dtype in DTYPES:
            yield step(shape, dtype, scale)


def tensors(shape, dtype, device, name="gated_delta_rule"):
    batch, length, heads, value_heads, size = shape
    shapes = (*[(batch, length, heads, size)] * 2, (batch, length, value_heads, size))
    q, k, v = (torch.randn(each, device=device).to(dtype) for each in shapes)
    g, beta = (torch.rand(batch, length, value_heads, device=device) for _ in range(2))
    if name == "kda":
        g = torch.rand(batch, length, value_heads, size, device=device)
    return q, k, v, -g, *[beta.to(dtype)] * (name != "simple_gla")


def case(name, kind, shape, dtype, scale):
    batch, length, heads, value_heads, size = shape
    passes = {"forward": 1, "backward": 2, "forward+backward": 3}[kind]
    elements = batch * length * (2 * heads + 2 * value_heads) * size  # q, k, v and the result
    gates = batch * length * value_heads * size if name == "kda" else 0
    return Comparison(
        name=f"{name} {kind}",
        shape="x".join(map(str, shape)),
        dtype=dtype,
        ours=partial(ours, name),
        theirs=theirs,
        bind=KINDS[kind],
        inputs=lambda device: tensors(shape, dtype, device, name),
        bytes=passes * (elements * dtype.itemsize + gates * 4),
        # Three products of a state and a vector for each position, or two.
        flops=passes * (4 if name == "simple_gla" else 6) * batch * length * value_heads * size * size,
        peak="matmul_float32" if dtype == torch.float32 else "matmul_bfloat16",
        targets={"speedup": 1.0} if scale == "gpu" else {},
    )


def step(shape, dtype, scale):
    batch, _, _, value_heads, size = shape

    def inputs(device):
        return *tensors(shape, dtype, device), torch.randn(batch, value_heads, size, size, device=device)

    return Comparison(
        name="gated_delta_rule step",
        shape="x".join(map(str, shape)),
        dtype=dtype,
        ours=our_step,
        theirs=their_step,
        inputs=inputs,
        bytes=2 * batch * value_heads * size * size * 4,  # the state
        targets={"share": 0.8, "speedup": 1.0} if scale == "gpu" and batch > 1 else {},
    )
