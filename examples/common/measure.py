"""What the training examples share: a text, and a comparison of PyTorch's kernels with metalcore's."""

import contextlib
import time
from pathlib import Path

import torch

from metalcore.integrations import transformers as metalcore_transformers

from .device import DEVICE

__all__ = ["DEVICE", "Meter", "compare", "rows_of_text"]

TEXT = Path(__file__).parents[1] / "data" / "gettysburg.txt"


def rows_of_text(length):
    """Returns the text as rows of `length` bytes, whose labels are the bytes themselves."""
    tokens = torch.tensor(list(TEXT.read_bytes()))
    rows = tokens[: len(tokens) // length * length].view(-1, length)
    return [{"input_ids": row, "labels": row} for row in rows]


class Meter:
    """Counts what is trained on, and the time for it. The first step is left out, in which kernels are compiled."""

    def __init__(self):
        self.losses, self.count, self.begin = [], 0, None

    def step(self, count, loss):
        """Ends a step on `count` tokens or images."""
        torch.accelerator.synchronize()
        self.losses.append(loss.item() if isinstance(loss, torch.Tensor) else float(loss))
        if self.begin is None:
            self.begin = time.perf_counter()
        else:
            self.count += count
        self.end = time.perf_counter()

    def rate(self):
        return self.count / (self.end - self.begin)


def compare(train, unit):
    """Calls train(meter) with PyTorch's kernels and with metalcore's, and prints speeds, memory and losses."""
    print(f"{'':10} {unit + '/s':>12} {'peak memory':>14} {'first loss':>12} {'last loss':>12}")
    losses = []
    for name, kernels in (("PyTorch", contextlib.nullcontext), ("metalcore", metalcore_transformers.patch)):
        torch.accelerator.reset_peak_memory_stats()
        meter = Meter()
        with kernels():
            train(meter)
        peak = torch.accelerator.max_memory_allocated() / 2**20
        first, last = meter.losses[0], meter.losses[-1]
        print(f"{name:10} {meter.rate():12.0f} {peak:10.1f} MiB {first:12.4f} {last:12.4f}")
        losses.append(meter.losses)
    for ours, theirs in zip(*losses):
        assert abs(ours - theirs) <= 1e-3 * abs(theirs), "the losses differ"
