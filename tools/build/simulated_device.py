"""The `mps` device on Linux, for the PyTorch at hand."""

from pathlib import Path

import torch

from .front_end import compiler, device_library


def simulated_device(tasks):
    """simulator/_device-….so, where the package is used in place. Wheels have its sources: an isolated build's PyTorch
    is not the one that runs."""
    return [
        tasks.add(
            f"simulator/{device_library.library_name()}",
            [*device_library.sources(), Path(device_library.__file__), device_library.SETUP],
            [torch.__version__, compiler()],
            device_library.build,
        )
    ]
