"""Numbers of 48 bits, and linear algebra refined to a backward error of 1e-13, against float64."""

import functools

import torch

from metalcore.double import Double
from metalcore.linalg import refined

from ...harness.case import Comparison, family, size_text

NAMES = ("add", "mul", "div", "exp", "log", "sin", "matmul")


def peer_device(device):
    """Returns the device where PyTorch has float64: the given one, or else the CPU."""
    return device if device.type == "cuda" else torch.device("cpu")


def numbers(device, shape):
    """Returns two tensors as Doubles, and the same as float64 where PyTorch has it."""
    values = [torch.rand(shape, dtype=torch.float64) + 1 for _ in range(2)]
    return (*(Double(x, device) for x in values), *(x.to(peer_device(device)) for x in values))


def function(name, shape):
    binary = name in ("add", "mul", "div", "matmul")
    arithmetic = {"add": "__add__", "mul": "__mul__", "div": "__truediv__", "matmul": "__matmul__"}.get(name, name)
    count = 2 if binary else 1

    def ours(x, y, *_):
        return getattr(x, arithmetic)(*(x, y)[1:count])

    def theirs(_x, _y, *given):
        return getattr(torch, name)(*given[:count])

    elements = shape[0] * shape[1]
    return Comparison(
        name=name,
        shape=size_text(shape),
        dtype=torch.float64,
        inputs=functools.partial(numbers, shape=shape),
        ours=ours,
        theirs=theirs,
        bytes=8 * elements * (count + 1),
        graph=False,
    )


def system(device, n):
    A = torch.randn(n, n, dtype=torch.float64) / n**0.5 + 2 * torch.eye(n, dtype=torch.float64)
    return A, torch.randn(n, 4, dtype=torch.float64)


def refinement(name, n):
    """Returns a refined function of tensors of the CPU, whose results come back there, and LAPACK."""
    takes = 2 if name in ("solve", "lstsq") else 1

    def inputs(device):
        A, B = system(device, n)
        return device, *((A + A.mT,) if name == "eigh" else (A, B)[:takes])

    def ours(device, *given):
        return getattr(refined, name)(*given, device=device)

    def theirs(device, *given):
        return getattr(torch.linalg, name)(*given)

    return Comparison(
        name=f"refined.{name}",
        shape=size_text((n, n)),
        dtype=torch.float64,
        inputs=inputs,
        ours=ours,
        theirs=theirs,
        graph=False,
    )


@family
def double(scale):
    """Times functions of 48 bits and refined linear algebra, against float64 on the GPU or else on the CPU."""
    shapes = {"gpu": (4096, 4096), "simulator": (64, 64), "quick": (4, 4)}
    orders = {"gpu": (1024, 4096), "simulator": (64,), "quick": (4,)}
    comparisons = [function(name, shapes[scale]) for name in NAMES]
    for n in orders[scale]:
        comparisons += [
            refinement(name, n) for name in ("solve", "inv", "lstsq", "qr", *(("eigh", "svd") if n < 4096 else ()))
        ]
    return comparisons
