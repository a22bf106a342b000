"""Chains of pointwise operations as one generated kernel, against PyTorch's operators one by one and Inductor."""

import torch
import torch.nn.functional as F

import metalcore

from ..harness.case import Comparison, size_text
from ..harness.compiled import AGAINST, inductor, made_once

# Function; its tensors (x has all elements, r one for each column); how many results it has.
CHAINS = {
    "gelu(x*a + b)*1.5 + r": (lambda x, a, b, r: F.gelu(x * a + b) * 1.5 + r, "xrrr", 1),
    "silu(x)*y + z": (lambda x, y, z: F.silu(x) * y + z, "xxx", 1),
    "clamp(tanh(x*a + b))*sigmoid(y)": (
        lambda x, a, b, y: torch.tanh(x * a + b).clamp(-0.9, 0.9) * torch.sigmoid(y),
        "xrrx",
        1,
    ),
    "relu(x*a + y)": (lambda x, a, y: F.relu(x * a + y), "xrx", 1),
    "x*y + 1 and exp(-x*x)": (lambda x, y: (x * y + 1, torch.exp(-(x * x))), "xx", 2),
    "x.t()*a + y": (lambda x, a, y: x.t() * a + y, "xrx", 1),
}
SHAPES = {"gpu": [(4096, 4096), (65536, 1024)], "simulator": [(64, 64), (256, 256)], "quick": [(8, 8)]}


class Chain(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *tensors):
        return self.function(*tensors)


def cases(scale):
    return [
        case(name, shape, dtype, against)
        for name in CHAINS
        for shape in SHAPES[scale]
        for dtype in (torch.float32, torch.bfloat16)
        for against in AGAINST[scale]
        if ".t()" not in name or shape[0] == shape[1]
    ]


def case(name, shape, dtype, against):
    function, kinds, results = CHAINS[name]
    elements = (kinds.count("x") + results) * torch.Size(shape).numel() + kinds.count("r") * shape[1]
    return Comparison(
        name=f"{name}, against {against}",
        shape=size_text(shape),
        dtype=dtype,
        inputs=lambda device: tuple(
            torch.randn(shape if kind == "x" else shape[1], device=device).to(dtype) for kind in kinds
        ),
        ours=made_once(lambda *tensors: metalcore.compile(Chain(function), tensors)),
        theirs=function if against == "eager" else made_once(lambda *tensors: inductor(function)),
        bytes=elements * dtype.itemsize,
        targets={"share": 0.9} if against == "eager" else {},
    )
