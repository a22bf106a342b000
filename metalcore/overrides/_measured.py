"""What `python -m metalcore tune` measured of the overrides on this machine, from its file."""

from __future__ import annotations

from collections.abc import Iterable

from ..tuning.loading import wanted
from ._gains import Measured

__all__ = ["measured"]


def measured(devices: Iterable[str]) -> dict[str, Measured]:
    """Returns the gains of overrides, by type of device; none for one that nobody measured."""
    if not wanted():
        return {}
    from ..tuning import store

    return {device: store.gains(device) for device in devices}
