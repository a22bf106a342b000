"""Loads the simulated device when PyTorch is imported, where METALCORE_SIMULATOR=1 is in the environment.

PyTorch calls load() at the end of `import torch`, because it is an entry point of the group `torch.backends`. It is a
module by itself so that a process without the variable imports nothing more of metalcore.
"""

import os


def load():
    if os.environ.get("METALCORE_SIMULATOR") == "1":
        import metalcore.simulator  # noqa: F401
