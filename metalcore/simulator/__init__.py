"""`import metalcore.simulator` makes torch.device("mps") work on Linux, without a Mac.

PyTorch's operators run their CPU kernels on the device's memory; metalcore's operators run their Metal kernels,
compiled for the CPU. Import it before the first backward(). `python -m metalcore.simulator script.py` runs a script
unchanged. With METALCORE_SIMULATOR=1 in the environment, PyTorch loads the device, in child processes too.

The import raises RuntimeError and leaves the process as it was where a real MPS backend or another accelerator is
present.
`checking()` (or METALCORE_CHECK=1) makes kernels report their faults as KernelError. METALCORE_COUNT=m1 (or another
GPU, or a path that ends in .json) counts what kernels do, and reports it at the end.
"""

import os as _os

from . import device
from .errors import KernelError, checking

__all__ = ["KernelError", "checking"]

device.install()
if _wanted := _os.environ.get("METALCORE_COUNT"):
    from ..estimates.process import begin as _begin

    _begin(_wanted)
