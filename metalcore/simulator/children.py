"""How child processes come to have the simulated device, whatever starts them: by their environment.

`import torch` calls the entry points of the group `torch.backends`, and metalcore's loads the device where
METALCORE_SIMULATOR=1 (metalcore_autoload.py). That is PyTorch's own way to find backends, so nothing is added to the
start of processes that never import torch, and no sitecustomize of an environment is in the way.
TORCH_DEVICE_BACKEND_AUTOLOAD=0 turns it off as it does for other backends.
"""

import os
import sys
from importlib.metadata import entry_points
from pathlib import Path

HERE = Path(__file__).resolve().parent
AUTOLOAD = HERE / "autoload"  # names the entry point, for a checkout that is not installed


def reach():
    """Gives the device to the processes that inherit this one's environment, unless METALCORE_SIMULATOR says 0."""
    os.environ.setdefault("METALCORE_SIMULATOR", "1")
    if any(entry.value == "metalcore_autoload:load" for entry in entry_points(group="torch.backends")):
        return
    before = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    ours = [str(path) for path in (AUTOLOAD, HERE.parents[1]) if str(path) not in before]
    os.environ["PYTHONPATH"] = os.pathsep.join([*before, *ours])
    sys.path += ours  # which multiprocessing hands to the children that it spawns
