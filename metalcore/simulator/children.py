"""Gives child processes the simulated device through their environment, whatever starts them.

`import torch` calls the entry points of the group `torch.backends`, and metalcore's entry point loads the device where
METALCORE_SIMULATOR=1 (metalcore_autoload.py). This is PyTorch's own way to find backends: processes that never import
torch start as before, and it does not collide with a sitecustomize of the environment.
TORCH_DEVICE_BACKEND_AUTOLOAD=0 turns it off, as for other backends.
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
    sys.path += ours  # multiprocessing hands it to the children that it spawns
