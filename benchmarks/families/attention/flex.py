"""FlexAttention: functions of scores and masks by blocks, against PyTorch's compiled function.

PyTorch's side is torch.compile's own compiler on `cuda`, and its composition of operators elsewhere. An operation is
one of the products of a query and a key that see each other: two forward and seven with the gradients. Blocks of the
mask have 128 queries and keys.
"""

import functools

import torch
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.attention.flex_attention import flex_attention as of_torch

import metalcore

from ...harness.case import Comparison, family, forward_backward, size_text

# (batch, heads, length, head size), and the window and the length of documents.
SHAPES = {
    "gpu": [((1, 16, 8192, 128), 1024, 1000)],
    "simulator": [((1, 2, 256, 64), 64, 100)],
    "quick": [((1, 1, 32, 16), 8, 10)],
}


def causal(window, documents):
    return None, lambda b, h, q, k: q >= k


def sliding_window(window, documents):
    return None, lambda b, h, q, k: (q >= k) & (q - k < window)


def packed(window, documents):
    return None, lambda b, h, q, k: (documents[q] == documents[k]) & (q >= k)


def soft_cap(window, documents):
    return (lambda score, b, h, q, k: 20 * torch.tanh(score / 20)), causal(window, documents)[1]


def everything(window, documents):
    return None, None


CASES = {"causal": causal, "window": sliding_window, "documents": packed, "soft cap": soft_cap, "no mask": everything}


@family
def flex(scale):
    return [
        case(name, make, *shape, dtype, with_gradients)
        for with_gradients in ((False, True) if scale == "gpu" else (False,))  # PyTorch has no derivative on the CPU
        for shape in SHAPES[scale]
        for name, make in CASES.items()
        for dtype in ((torch.bfloat16,) if scale == "gpu" else (torch.float32,))
    ]


def case(name, make, shape, window, length_of_documents, dtype, with_gradients):
    batch, heads, length, size = shape
    at = torch.arange(length)
    seen = make(window, at // length_of_documents)[1]
    pairs = length**2 if seen is None else int(seen(0, 0, at[:, None], at).sum())

    def side(function):
        """Returns the function with the mask and what it captures, which the first call makes on its device."""
        made = {}

        def call(q, k, v):
            if q.device not in made:
                score, mask = make(window, at.to(q.device) // length_of_documents)
                if mask is not None:
                    mask = create_block_mask(mask, None, None, length, length, device=q.device)
                made[q.device] = score, mask
            return function(q, k, v, *made[q.device])

        return call

    def theirs(*arguments):
        return compiled()(*arguments) if arguments[0].is_cuda else of_torch(*arguments)

    return Comparison(
        name=f"flex {'forward+backward' if with_gradients else 'forward'}, {name}",
        shape=size_text(shape),
        dtype=dtype,
        ours=side(metalcore.flex_attention),
        theirs=side(theirs),
        bind=forward_backward if with_gradients else functools.partial,
        inputs=lambda device: tuple(torch.randn(shape, device=device).to(dtype) for _ in range(3)),
        bytes=(8 if with_gradients else 4) * batch * heads * length * size * dtype.itemsize,
        flops=(14 if with_gradients else 4) * batch * heads * pairs * size,
        targets={"speedup": 0.4 if with_gradients else 0.5} if dtype == torch.bfloat16 else {},
        peak="matmul_float32" if dtype == torch.float32 else "matmul_bfloat16",
    )


@functools.cache
def compiled():
    return torch.compile(of_torch, dynamic=False)
