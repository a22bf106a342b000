"""Values that `python -m metalcore tune` measured on this machine: they are read before the first plan for a device.

METALCORE_TUNING=0 leaves them out: plans are then those for the GPU's family.
"""

from __future__ import annotations

import threading

from .. import _C
from .._core.environment import switched_on
from ..mac_kernels import lacking, this_release

__all__ = ["wanted"]

_lock = threading.RLock()
_asked: set[str] = set()


def wanted() -> bool:
    """Returns whether this process uses measured values."""
    return switched_on("METALCORE_TUNING", default=True)


def _load(device_type):
    """The extension calls it from any thread. All wait for the first of them."""
    with _lock:
        if device_type not in _asked and wanted():
            _asked.add(device_type)
            from . import store

            if store.files(device_type):
                store.load(device_type)


_C.set_measured_loader(_load)
_C.set_lacking("mps", lacking(this_release()))
