"""The device of an example: mps or cuda, or the simulated mps device where there is neither."""

import time

import torch

if not (torch.backends.mps.is_available() or torch.cuda.is_available()):
    import metalcore.simulator  # noqa: F401

DEVICE = "mps" if torch.backends.mps.is_available() else "cuda"


def milliseconds(function, repeats):
    """Returns the time of one of several calls. A call before them is not counted."""
    function()
    torch.accelerator.synchronize()
    begin = time.perf_counter()
    for _ in range(repeats):
        function()
    torch.accelerator.synchronize()
    return (time.perf_counter() - begin) / repeats * 1e3
