"""Loads the simulated device when PyTorch is imported, where METALCORE_SIMULATOR=1 is in the environment.

PyTorch calls load() at the end of `import torch`, because it is an entry point of the group `torch.backends`. It is a
module by itself so that a process without the variable imports nothing more of metalcore.
"""

import os

_OFF = ("", "0", "off", "no", "false")  # as in metalcore._core.environment


def load():
    if os.environ.get("METALCORE_SIMULATOR", "").lower() in _OFF:
        return
    from metalcore._core.environment import switched_on

    if switched_on("METALCORE_SIMULATOR"):  # or it raises
        import metalcore.simulator  # noqa: F401
