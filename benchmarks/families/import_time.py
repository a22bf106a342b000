"""What `import metalcore` takes in a new process after `import torch`, which is shown beside it."""

import functools

from ..harness.case import Sampled, Samples
from ..harness.process import python

SCRIPT = """
import time
begin = time.perf_counter()
import torch
torch_done = time.perf_counter()
import metalcore
print(torch_done - begin, time.perf_counter() - torch_done)
"""
ROUNDS = {"gpu": 5, "simulator": 11, "quick": 1}


def cases(scale):
    times = functools.lru_cache(import_seconds)
    return [
        Sampled(name=f"import {name}", sample=lambda run, side=side: Samples(ours=times(ROUNDS[scale])[side]))
        for side, name in enumerate(("torch", "metalcore"))
    ]


def import_seconds(rounds):
    """Seconds of `import torch` and of `import metalcore`, a list each."""
    runs = [python("-c", SCRIPT).split() for _ in range(rounds)]
    return [[float(run[side]) for run in runs] for side in range(2)]
