"""What the host pays for a call: ops on 16 elements, against PyTorch's ops and, on NVIDIA GPUs, a bare launch."""

import statistics

import torch
import torch.nn.functional as F

import metalcore

from ..harness.case import Sampled, Samples
from ..harness.launch import bare_launch

# The calls of a sample: fewer on a GPU than its queue holds, so that the host never waits for it.
CALLS = {"gpu": 500, "simulator": 2000, "quick": 20}
OVERHEAD = 10e-6
FORWARD = {
    "silu": (lambda x, w: metalcore.silu(x), lambda x, w: F.silu(x)),
    "gelu": (lambda x, w: metalcore.gelu(x), lambda x, w: F.gelu(x)),
    "softmax": (lambda x, w: metalcore.softmax(x, -1), lambda x, w: F.softmax(x, -1)),
    "rms_norm": (lambda x, w: metalcore.rms_norm(x, (16,), w), lambda x, w: F.rms_norm(x, (16,), w)),
    "ops.silu (no routing)": (lambda x, w: torch.ops.metalcore.silu(x), lambda x, w: torch.ops.aten.silu(x)),
}


def cases(scale):
    calls = CALLS[scale]
    found = [
        Sampled(name=name, sample=lambda run, sides=sides: compare(run, *sides, calls), targets={"overhead": OVERHEAD})
        for name, sides in FORWARD.items()
    ]
    found.append(
        Sampled(
            name="silu that requires grad", sample=lambda run: compare(run, *FORWARD["silu"], calls, requires_grad=True)
        )
    )
    found.append(
        Sampled(name="F.silu, overridden", sample=lambda run: overridden(run, calls), targets={"overhead": OVERHEAD})
    )
    if scale == "gpu":
        found.append(Sampled(name="bare launch", sample=lambda run: launch(run, calls)))
    return found


def compare(run, ours, theirs, calls, requires_grad=False):
    device = run.device
    with device.session(), torch.set_grad_enabled(requires_grad):
        x, weight = torch.randn(1, 16, requires_grad=requires_grad), torch.randn(16)
        sides = [
            (function, x.detach().to(where).requires_grad_(requires_grad), weight.to(where))
            for function, where in ((ours, device.ours), (theirs, device.theirs))
        ]
        times = host_seconds(run, [lambda f=f, x=x, w=w: f(x, w) for f, x, w in sides], calls)
        overhead = statistics.median(times[0]) - launch_seconds(run, calls) if device.name == "cuda" else None
        return Samples(ours=times[0], theirs=times[1], method=method(device), calls=calls, overhead=overhead)


def overridden(run, calls):
    with metalcore.enable_pytorch_overrides("silu"):
        found = compare(run, lambda x, w: F.silu(x), lambda x, w: x, calls)
    return Samples(ours=found.ours, method=found.method, calls=calls, overhead=found.overhead)


def launch(run, calls):
    with run.device.session():
        return Samples(ours=launch_times(run, calls), method=method(run.device), calls=calls)


def launch_times(run, calls):
    launched, refused = host_seconds(run, bare_launch(), calls)
    return [a - b for a, b in zip(launched, refused)]


def launch_seconds(run, calls):
    return statistics.median(launch_times(run, calls))


def host_seconds(run, sides, calls):
    """Seconds of the host per call, a list per side, in turns. What the device does meanwhile does not count."""
    device = run.device
    times = [[] for _ in sides]
    for round_ in range(-1, run.rounds):  # the first warms up
        for call, found in zip(sides, times):
            device.synchronize()
            begin = device.clock()
            for _ in range(calls):
                call()
            seconds = device.clock() - begin
            if round_ >= 0:
                found.append(seconds / calls)
    device.synchronize()
    return times


def method(device):
    return "host's time" if device.scale == "gpu" else device.method
