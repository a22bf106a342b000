"""Training ops against Liger-Kernel's (Triton, NVIDIA GPUs), forward and backward.

Memory's limit is that of the passes over the result's size that an op needs. Losses count what they need beyond their
inputs, which stands behind their names. Liger's functions write gradients over their inputs, so each side has tensors
of its own.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import metalcore

from ..harness.case import size_text
from . import training
from .comparison import LIMITS, exact, peer_case

SHAPES = {"gpu": [(4096, 4096), (32768, 1024)], "simulator": [(64, 1024)], "quick": [(16, 512)]}
# Rows, columns of the hidden states, classes.
LOSS_SHAPES = {
    "gpu": [(4096, 4096, 32000), (4096, 4096, 128256)],
    "simulator": [(64, 64, 1000)],
    "quick": [(16, 64, 1000)],
}
HEAD = 128


@dataclass(frozen=True)
class Op:
    """Each letter of `leaves` and `rest` is a kind of tensor (see `tensor`); leaves have gradients."""

    ours: object
    liger: str
    torch: object
    leaves: str
    rest: str
    # Passes over the memory of `rows` x `columns` numbers, forward and backward.
    passes: tuple[float, float]


def layer_norm(function):
    return lambda x, weight, bias: function(x, weight.shape, weight, bias, 1e-5)


def rms_norm(function):
    return lambda x, weight: function(x, weight.shape, weight, 1e-6)


def torch_rope(q, k, cos, sin):
    def rotated(x):
        first, second = x.chunk(2, -1)
        return x * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]

    return rotated(q), rotated(k)


OPS = {
    "swiglu": Op(metalcore.swiglu, "liger_swiglu", lambda a, b: F.silu(a) * b, "xx", "", (3, 5)),
    "geglu": Op(
        functools.partial(metalcore.geglu, approximate="tanh"),
        "liger_geglu",
        lambda a, b: F.gelu(a, approximate="tanh") * b,
        "xx",
        "",
        (3, 5),
    ),
    "rope": Op(metalcore.rope, "liger_rope", torch_rope, "qk", "cs", (2.5, 2.5)),
    "layer_norm": Op(layer_norm(metalcore.layer_norm), "liger_layer_norm", layer_norm(F.layer_norm), "xwb", "", (2, 3)),
    "rms_norm": Op(rms_norm(metalcore.rms_norm), "liger_rms_norm", rms_norm(F.rms_norm), "xw", "", (2, 3)),
}
# What Liger's functions take after the tensors.
LIGER_OPTIONS = {"layer_norm": (1e-5,), "rms_norm": (1e-6,)}
LOSSES = {
    "cross_entropy": F.cross_entropy,
    "fused_linear_cross_entropy": lambda x, weight, target: F.cross_entropy(F.linear(x, weight), target),
}


def cases(options, scale):
    functions = liger("liger_kernel.transformers.functional")
    comparisons = []
    for shape in SHAPES[scale]:
        for name in OPS:
            for dtype in (torch.bfloat16, torch.float32):
                comparisons += [op_case(functions, name, kind, shape, dtype) for kind in ("forward", "backward")]
    for shape in LOSS_SHAPES[scale]:
        comparisons += [loss_case(functions, name, shape) for name in LOSSES]
    return comparisons + training.cases(scale, liger("liger_kernel.transformers"))


def liger(module):
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"liger: {error}; Liger-Kernel (pip install liger-kernel) and Triton have to be installed"
        ) from None


def tensor(kind, rows, columns, dtype, device):
    """Returns a random tensor: x, weight, bias; q and k as (batch, heads, tokens, 128), where q has `columns` numbers
    for each of `rows` tokens, and k a quarter of them; cosines and sines."""
    batch = max(1, rows // 4096)
    if kind == "x":
        return torch.randn(rows, columns, device=device).to(dtype)
    if kind in "wb":
        return (0.1 * torch.randn(columns, device=device) + (kind == "w")).to(dtype)
    if kind in "qk":
        heads = columns // HEAD if kind == "q" else max(1, columns // HEAD // 4)
        return torch.randn(batch, rows // batch, heads, HEAD, device=device).to(dtype).transpose(1, 2)
    angles = torch.arange(rows // batch)[:, None] * 10000 ** (-torch.arange(0, HEAD, 2) / HEAD)
    angles = torch.cat((angles, angles), -1)[None]
    return (angles.cos() if kind == "c" else angles.sin()).to(dtype).to(device)


def flat(outputs):
    return tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)


def side(kind, leaves, rest, function):
    """Returns a side whose inputs are so many leaves, so many other tensors, and the gradients of the results."""

    def make(*inputs):
        own = [tensor.clone() for tensor in inputs]
        variables = [tensor.requires_grad_() for tensor in own[:leaves]]
        others, grads = own[leaves : leaves + rest], own[leaves + rest :] or None

        def forward():  # a layer's inputs are no leaves, and Liger's rope writes into them
            return flat(function(*(variable.view_as(variable) for variable in variables), *others))

        def without_grad():
            with torch.no_grad():
                return forward()

        def both():
            outputs = forward()
            return (*(output.detach() for output in outputs), *torch.autograd.grad(outputs, variables, grads))

        if kind == "forward":
            return without_grad
        if kind == "forward+backward":
            return both
        outputs = forward()
        return lambda: torch.autograd.grad(outputs, variables, grads, retain_graph=True)

    return make


def exact_side(make):
    """Returns the results of a side in float64."""
    return lambda *inputs: make(*map(exact, inputs))()


def op_case(functions, name, kind, shape, dtype):
    op, (rows, columns) = OPS[name], shape
    of_liger, options = getattr(functions, op.liger), LIGER_OPTIONS.get(name, ())

    def inputs(device):
        tensors = tuple(tensor(letter, rows, columns, dtype, device) for letter in op.leaves + op.rest)
        results = tensors[: 2 if name == "rope" else 1]  # an op's results have the shapes of its first inputs
        return *tensors, *map(torch.randn_like, results)

    made = functools.partial(side, kind, len(op.leaves), len(op.rest))
    return peer_case(
        name=f"{name} {kind}, Liger",
        shape=size_text(shape),
        dtype=dtype,
        inputs=inputs,
        ours=made(op.ours),
        theirs=made(lambda *tensors: of_liger(*tensors, *options)),
        bytes=int(op.passes[kind == "backward"] * rows * columns) * dtype.itemsize,
        reference=exact_side(made(op.torch)),
        limit=LIMITS[dtype],
    )


def loss_case(functions, name, shape, dtype=torch.bfloat16):
    rows, depth, classes = shape
    fused = name == "fused_linear_cross_entropy"
    made = functools.partial(side, "forward+backward", 2 if fused else 1, 1)
    ours, theirs = made(getattr(metalcore, name)), made(getattr(functions, f"liger_{name}"))

    def inputs(device):
        target = torch.randint(classes, (rows,), device=device)
        if not fused:
            return torch.randn(rows, classes, device=device).to(dtype), target
        weight = 0.02 * torch.randn(classes, depth, device=device)
        return torch.randn(rows, depth, device=device).to(dtype), weight.to(dtype), target

    return peer_case(
        name=f"{name}, Liger",
        shape=size_text((rows, classes)),
        dtype=dtype,
        inputs=inputs,
        ours=ours,
        theirs=theirs,
        bytes=0 if fused else 3 * rows * classes * dtype.itemsize,
        flops=6 * rows * depth * classes if fused else 0,
        peak="matmul_bfloat16",
        graph=False,  # Liger's losses wait for the host
        variant=functools.partial(peaks, ours, theirs),
        reference=exact_side(made(LOSSES[name])),
        limit=LIMITS[dtype],
    )


def peaks(ours, theirs, *inputs):
    """Returns what a call of either side needs beyond what is there before, on a GPU that counts it."""
    if not inputs[0].is_cuda:
        return ""
    gibibytes = []
    for make in (ours, theirs):
        call = make(*inputs)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        gibibytes.append((torch.cuda.max_memory_allocated() - before) / 2**30)
    return "{:.2f} GiB, Liger {:.2f}".format(*gibibytes)
