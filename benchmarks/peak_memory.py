"""The memory that a loss of a large vocabulary needs beyond its inputs, on an NVIDIA GPU.

    python -m benchmarks.peak_memory

The loss of a linear layer's outputs, forward and backward, by metalcore.fused_linear_cross_entropy and by PyTorch's
linear and cross_entropy: with the logits in bfloat16, and in float32 as transformers' models compute their losses.
"""

import time

import torch
import torch.nn.functional as F

import metalcore

ROWS, DEPTH, CLASSES = 4096, 4096, 128256
CALLS = {
    "metalcore": lambda hidden, weight, target: metalcore.fused_linear_cross_entropy(hidden, weight, target),
    "PyTorch": lambda hidden, weight, target: F.cross_entropy(F.linear(hidden, weight), target),
    "PyTorch, float32 logits": lambda hidden, weight, target: F.cross_entropy(F.linear(hidden, weight).float(), target),
}


def measured(call, leaves, target):
    """Returns GiB beyond what is there before, and seconds, of the second run."""
    peak_and_seconds = 0.0, 0.0
    for _ in range(2):
        for leaf in leaves:
            leaf.grad = None
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before, start = torch.cuda.memory_allocated(), time.perf_counter()
        call(*leaves, target).backward()
        torch.cuda.synchronize()
        peak_and_seconds = (torch.cuda.max_memory_allocated() - before) / 2**30, time.perf_counter() - start
    return peak_and_seconds


def main():
    options = {"device": "cuda", "dtype": torch.bfloat16}
    hidden, weight = torch.randn(ROWS, DEPTH, **options), torch.randn(CLASSES, DEPTH, **options) * 0.02
    target = torch.randint(CLASSES, (ROWS,), device="cuda")
    print(f"hidden {ROWS}x{DEPTH}, {CLASSES} classes, bfloat16, forward and backward; {torch.cuda.get_device_name()}")
    for trained in (True, False):
        print("with the weight's gradient" if trained else "without the weight's gradient")
        for name, call in CALLS.items():
            leaves = hidden.detach().requires_grad_(), weight.detach().requires_grad_(trained)
            memory, seconds = measured(call, leaves, target)
            print(f"  {name:<24} {memory:6.2f} GiB  {seconds * 1e3:7.1f} ms")


if __name__ == "__main__":
    main()
