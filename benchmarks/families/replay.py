"""What the host pays for a replay of 300 dispatches, against the same calls one by one.

On the simulated device the kernels run within the call, so that both sides have their time too.
"""

import contextlib
import functools

import torch

import metalcore

from ..harness.case import Sampled, Samples, family
from .call_overhead import host_seconds, method

DISPATCHES = 300
WIDTHS = {"gpu": 1024, "simulator": 16, "quick": 16}
MOST_SECONDS = 20e-6  # of the host, by the design of replays


def chain(x):
    for _ in range(DISPATCHES):
        x = metalcore.silu(x)
    return x


def mixed(x):
    for _ in range(DISPATCHES // 3):
        x = metalcore.silu(metalcore.softmax(metalcore.rms_norm(x, x.shape), -1))
    return x


# Function; options of the capture; whether a call's tensor is the replay's own, which needs no copy.
REPLAYS = {
    "replay": (chain, {}, True),
    "replay, inputs copied": (chain, {}, False),
    "replay, inputs bound": (chain, {"bind": True}, False),
    "replay of rms_norm, softmax, silu": (mixed, {}, True),
}


@family
def replay(scale):
    for name, (function, options, own) in REPLAYS.items():
        yield Sampled(
            name=name,
            shape=f"{DISPATCHES} dispatches",
            dtype=torch.float32,
            targets={"seconds": MOST_SECONDS} if own else {},
            sample=functools.partial(compare, scale, function, options, own),
        )


def compare(scale, function, options, own, run):
    device = run.device
    with device.session(), torch.no_grad():
        x = torch.randn(WIDTHS[scale], device=device.ours)
        replay = metalcore.capture(function, x, **options)
        inputs = replay.inputs if own else (x,)
        sides = [(contextlib.nullcontext, call) for call in (lambda: replay(*inputs), lambda: function(x))]
        (ours, theirs), calls = host_seconds(run, sides, scale)
    return Samples(ours=ours, theirs=theirs, method=method(device), calls=calls)
