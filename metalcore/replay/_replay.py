"""What replays of every kind tell about themselves."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ..recording import Recording

__all__ = ["Replay"]


class Replay:
    """A recorded run of a function, which run() repeats.

    Attributes:
        recording: metalcore's dispatches, to read.
        names: PyTorch's operators that run between recorded parts, in their order.
        segments: how many recorded parts there are.
        arena_bytes, peak_bytes: the size of the memory that intermediate results and scratch memory share, and the most
            of it that is in use at once.
        own_bytes: the size that they would have without sharing.
        owned: the keys of the storages that a run writes and that are the replay's.
        memory: for each of the recording's buffers its first byte in the arena, or the storage that it is. A CUDA graph
            has none.
    """

    recording: Recording
    names: Sequence[str] = ()
    segments = 1
    arena_bytes = peak_bytes = own_bytes = 0
    owned: Collection[int] = ()
    memory: Sequence[int | torch.UntypedStorage] = ()

    def run(self) -> None:
        raise NotImplementedError

    def bind(self, inputs: Sequence[Tensor]) -> None:
        """Has the next runs use these tensors in the inputs' places."""
        raise NotImplementedError

    def lines(self) -> list[str]:
        """Returns what runs, and where intermediate results live."""
        parts = f"{len(self.recording.dispatches)} dispatches of metalcore in {self.segments} recorded parts"
        arena = f"arena: {self.arena_bytes} bytes for intermediate results of {self.own_bytes} bytes"
        return [
            f"{parts}; {len(self.names)} calls of PyTorch's operators between them",
            f"{arena}, of which at most {self.peak_bytes} are in use at once",
            *self.recording.lines(),
        ]
