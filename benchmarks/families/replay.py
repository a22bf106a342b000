"""What the host pays for a replay of 300 dispatches, against the same calls one by one.

On the simulated device the kernels run within the call, so that both sides have their time too.
"""

import contextlib
import functools

import torch

import metalcore

from ..harness.case import Sampled, Samples
from .call_overhead import host_seconds, method

DISPATCHES = 300
WIDTHS = {"gpu": 1024, "simulator": 16, "quick": 16}
MOST_SECONDS = 20e-6  # of the host, by the design of replays


def cases(scale):
    for name, options in (("replay", {}), ("replay, inputs bound", {"bind": True})):
        yield Sampled(
            name=name,
            shape=f"{DISPATCHES} dispatches",
            dtype=torch.float32,
            targets={"seconds": MOST_SECONDS} if not options else {},
            sample=functools.partial(compare, scale, options),
        )


def chain(x):
    for _ in range(DISPATCHES):
        x = metalcore.silu(x)
    return x


def compare(scale, options, run):
    device = run.device
    with device.session(), torch.no_grad():
        x = torch.randn(WIDTHS[scale], device=device.ours)
        replay = metalcore.capture(chain, x, **options)
        inputs = replay.inputs or (x,)
        sides = [(contextlib.nullcontext, call) for call in (lambda: replay(*inputs), lambda: chain(x))]
        (ours, theirs), calls = host_seconds(run, sides, scale)
    return Samples(ours=ours, theirs=theirs, method=method(device), calls=calls)
