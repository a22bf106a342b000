"""The first call of each kernel family in a new process: compiled with an empty cache, then loaded from the cache.

The time ends when the call's result is there. The process has used the device before, and its first family (silu) also
loads the compiler. On the simulated device the built-in kernels are compiled already, and only compile_shader compiles.
"""

import functools
import json
import sys
import tempfile
import time

import torch

from ..harness.case import Sampled, Samples, family
from ..harness.machine import python

ROUNDS = {"gpu": 3, "simulator": 3, "quick": 1}
TARGETS = {"empty cache": {"seconds": 3.0}, "cached": {"seconds": 0.05}}
SOURCE = "kernel void twice(device float* x, uint i [[thread_position_in_grid]]) { x[i] *= 2.0f; }"


def first_uses(device):
    """Returns {name: the call}. It is made late, since nothing may use metalcore before it is timed."""
    import metalcore

    x, w = torch.randn(64, 1024, device=device), torch.randn(1024, device=device)
    batch, matrices, tall = (torch.randn(shape, device=device) for shape in ((8, 32, 32), (2, 128, 128), (4000, 36)))
    p = torch.nn.Parameter(torch.randn(64, device=device))
    p.grad, _ = torch.randn_like(p), torch.zeros_like(p)  # PyTorch loads its own kernels when they are first used
    optimizer = metalcore.optim.AdamW([p])
    return {
        "silu": lambda: metalcore.silu(x),
        "softmax": lambda: metalcore.softmax(x, -1),
        "rms_norm": lambda: metalcore.rms_norm(x, (1024,), w),
        "adamw": optimizer.step,
        "qr 8x32x32": lambda: metalcore.qr(batch),
        "qr 2x128x128": lambda: metalcore.qr(matrices),
        "qr 4000x36": lambda: metalcore.qr(tall),
        "compile_shader": lambda: metalcore.compile_shader(SOURCE).twice(w),
    }


NAMES = ("silu", "softmax", "rms_norm", "adamw", "qr 8x32x32", "qr 2x128x128", "qr 4000x36", "compile_shader")


@family
def compile(scale):
    times = functools.lru_cache(process_times)
    return [
        Sampled(
            name=f"{name}, {state}",
            targets=TARGETS[state],
            sample=lambda run, name=name, state=state: samples(
                [found[name] for found in times(run.device.name, ROUNDS[scale])[state]]
            ),
        )
        for state in TARGETS
        for name in NAMES
    ]


def samples(found):
    """Returns the Samples of a list of seconds. The first one that is the text of an error is raised."""
    for error in found:
        if isinstance(error, str):
            raise RuntimeError(error)
    return Samples(ours=found)


def process_times(device, rounds):
    """Returns {state: [{name: seconds, or the text of an error} for each round]}. A round is a process with an empty
    cache, and a second one after it."""
    times = {state: [] for state in TARGETS}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as cache:
            for state in TARGETS:
                try:
                    printed = python("-m", "benchmarks.families.startup", device, METALCORE_CACHE_DIR=cache)
                    times[state].append(json.loads(printed))
                except RuntimeError as error:
                    times[state].append(dict.fromkeys(NAMES, str(error)))
    return times


def main(name):
    """Prints the seconds of each first use, or its error, as JSON."""
    if name == "simulator":
        import metalcore.simulator  # noqa: F401
    device = torch.device("mps" if name == "simulator" else name)
    synchronize = torch.mps.synchronize if device.type == "mps" else torch.cuda.synchronize
    times = {}
    for use, call in first_uses(device).items():
        synchronize()
        begin = time.perf_counter()
        try:
            call()
            synchronize()
            times[use] = time.perf_counter() - begin
        except Exception as error:
            times[use] = f"{type(error).__name__}: {error}"
    print(json.dumps(times))


IMPORT = """
import time
begin = time.perf_counter()
import torch
torch_done = time.perf_counter()
import metalcore
print(torch_done - begin, time.perf_counter() - torch_done)
"""
IMPORTS = {"gpu": 5, "simulator": 11, "quick": 1}


@family
def import_time(scale):
    """Times `import metalcore` in a new process after `import torch`, which is shown beside it."""
    times = functools.lru_cache(import_seconds)
    return [
        Sampled(name=f"import {name}", sample=lambda run, side=side: Samples(ours=times(IMPORTS[scale])[side]))
        for side, name in enumerate(("torch", "metalcore"))
    ]


def import_seconds(rounds):
    """Seconds of `import torch` and of `import metalcore`, a list each."""
    runs = [python("-c", IMPORT).split() for _ in range(rounds)]
    return [[float(run[side]) for run in runs] for side in range(2)]


if __name__ == "__main__":
    main(sys.argv[1])
