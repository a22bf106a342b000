"""capture(): one run of a function, recorded, to be run again with other inputs. A function is refused where a replay
would not do the same."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..overrides.libraries.patches import as_captured
from ..recording import planned_for_another
from ._graph import Graph
from ._inputs import Inputs
from ._loop import Loop
from ._tape import CaptureError, Tape, key_of, refuse_host_work, tensors_in

__all__ = ["Capture", "capture", "device_of", "record"]

_INDUCTOR = "torch._inductor.output_code"


@contextlib.contextmanager
def _inductor_refused(what: str) -> Iterator[None]:
    """Makes a graph that Inductor, torch.compile's default backend, compiled raise CaptureError inside the block
    instead of running: it launches kernels without PyTorch's dispatcher, where no tape sees them."""
    before = sys.modules.get(_INDUCTOR)
    if before is None:  # nothing has been compiled by it
        yield
        return

    def refuse(*_):
        raise CaptureError(
            f"{what}: what Inductor compiled (torch.compile without backend=) cannot be recorded, since it launches "
            'its kernels by itself. torch.compile(f, backend="metalcore") can, and so can a program: '
            "metalcore.compile() and program.capture()"
        )

    graph = before.CompiledFxGraph
    call, graph.__call__ = graph.__call__, refuse
    try:
        yield
    finally:
        graph.__call__ = call


def device_of(tensors: Iterable[Tensor]) -> torch.device:
    """Returns where a function runs: on the device of the first tensor that is on one, or else on that of this
    machine."""
    for tensor in tensors:
        if tensor.device.type != "cpu":
            return tensor.device
    return torch.device("cuda" if torch.cuda.is_available() else "mps")


def record(
    what: str, function: Callable[..., Any], inputs: Sequence[Tensor], *, bind: bool, segments: bool
) -> tuple[Any, Loop | Graph]:
    """Runs a function once, and returns its result, with detached tensors, and its replay, which writes that result."""
    device = device_of(inputs)
    if device.type == "cuda" and not bind:
        with as_captured():
            return Graph.record(what, function, inputs)
    tape = Tape()
    try:
        with as_captured(), _inductor_refused(what):
            result = _detached(tape.record(device.type, lambda: function(*inputs)))
        _refuse(what, tape, bind, segments)
        return result, Loop(tape, inputs, _on_device(result))
    finally:
        tape.forget()


def _detached(result):
    return tree_map_only(Tensor, Tensor.detach, result)


def _on_device(result):
    """Returns the tensors of a result that are on a device, one for each storage."""
    return list({key_of(tensor): tensor for tensor in tensors_in(result) if not tensor.is_cpu}.values())


def _refuse(what, tape, bind, segments):
    refuse_host_work(what, tape)
    names = ", ".join(dict.fromkeys(tape.names))
    if names and not segments:
        raise CaptureError(
            f"{what}: PyTorch does a part of the work, which cannot be recorded on {tape.device}: {names}. "
            "segments=True calls these operators between the recorded parts"
        )
    if names and bind:
        raise CaptureError(f"{what}: bind=True needs a function of metalcore's ops alone; PyTorch does {names}")


class Capture:
    """A captured function: called with tensors like its examples, it does what it did, on their values.

    Attributes:
        kernels: the names of metalcore's kernels, in the order in which they run.
        segments: how many recorded parts there are: one, or as many as PyTorch's operators leave.
        torch_operators: the names of PyTorch's operators that run between them, in their order. (A CUDA graph holds
            PyTorch's kernels itself.)
        arena_bytes: the size of the memory that intermediate results and scratch memory share.
        own_bytes: the size that they would have without sharing.
        peak_bytes: the most of it that is in use at once.
        replay: what repeats the recorded run.
        result: what that run returned.

    Example:
        >>> replay = metalcore.capture(metalcore.silu, torch.ones(4, device="mps"))
        >>> replay(torch.zeros(4, device="mps")).tolist()
        [0.0, 0.0, 0.0, 0.0]
    """

    def __init__(self, function, examples, *, warmup, bind, clone_outputs, segments):
        what = f"capture of {getattr(function, '__name__', type(function).__name__)}"
        if isinstance(warmup, bool) or not isinstance(warmup, int) or warmup < 0:
            raise ValueError(f"{what}: warmup must be a number of runs, not {warmup!r}")
        self._what, self._clone, self._lock = what, clone_outputs, threading.Lock()
        self._function, self._planned_for_another = function, planned_for_another.is_set()
        with torch.inference_mode(False):  # later calls may be outside of it, where they could not copy their inputs
            self._inputs = Inputs(what, examples, bind)
            own = self._inputs.tensors
            for _ in range(warmup):
                function(*own)
                self._inputs.copy(examples)
            versions = [tensor._version for tensor in own]
            self.result, self.replay = record(what, function, own, bind=bind, segments=segments)
        if not bind and (written := self._inputs.written(examples, versions)):
            raise CaptureError(
                f"{what}: it writes into {' and '.join(f'input {i}' for i in written)}. A replay on copies of its "
                "inputs would leave the caller's tensors as they are: bind=True has it use these"
            )
        if bind:
            if {key_of(tensor) for tensor in own} & {key_of(tensor) for tensor in tensors_in(self.result)}:
                raise CaptureError(f"{what}: with bind=True it must not return an input")
        for name in ("segments", "arena_bytes", "own_bytes", "peak_bytes"):
            setattr(self, name, getattr(self.replay, name))
        self.kernels = self.replay.recording.kernels
        self.torch_operators = tuple(self.replay.names)

    def __call__(self, *inputs: Tensor) -> Any:
        self._inputs.check(inputs)
        with self._lock:  # inputs, intermediate results and results are the capture's own
            if self._inputs.bind:
                self._inputs.check_apart(inputs, self.replay.owned)
                self.replay.bind(inputs)
            else:
                self._inputs.copy(inputs)
            if planned_for_another.is_set() and not self._planned_for_another:  # the replay has this GPU's plans
                with as_captured():
                    return _detached(self._function(*(inputs if self._inputs.bind else self._inputs.tensors)))
            self.replay.run()
            return tree_map_only(Tensor, Tensor.clone, self.result) if self._clone else self.result

    def __reduce__(self):
        raise TypeError(f"{self._what}: it cannot be copied or pickled, since its memory is part of it: capture again")

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors that a replay reads, which may be filled in place and given as inputs, so that nothing is copied.
        With bind=True there are none."""
        return () if self._inputs.bind else tuple(self._inputs.tensors)

    @property
    def examples(self) -> tuple[Tensor, ...]:
        """The tensors on which the function was recorded."""
        return tuple(self._inputs.tensors)

    def __str__(self):
        return "\n".join(self.replay.lines())


def capture(
    function: Callable[..., Any],
    *examples: Tensor,
    warmup: int = 2,
    bind: bool = False,
    clone_outputs: bool = False,
    segments: bool = False,
) -> Capture:
    """Records what a function submits to the GPU, and returns a callable that submits it again.

    The function runs `warmup` + 1 times, for real, with copies of the examples; the last run is recorded. What Python
    did then is decided for good: branches, shapes, numbers. A replay costs the host one call of C++, or of
    cudaGraphLaunch. It neither allocates, nor looks kernels up, nor packs arguments.

    - On `mps`, real or simulated, metalcore's dispatches are one list that goes to PyTorch's encoder. PyTorch's own
      operators cannot be recorded there: those that compute or copy are refused, with their names. Views, and empty
      tensors, are none. With `segments`, PyTorch's operators are called between the recorded parts, with the same
      tensors each time; random ones draw new numbers then.
    - On `cuda` the function becomes a CUDA graph, with PyTorch's operators. With `bind`, metalcore's launches are
      repeated without a graph.

    Tensors that the function reaches in other ways than as arguments (parameters, buffers, caches) are kept and used
    where they are: an update in place is seen, another tensor in their place is not. Gradients that the function
    leaves in `.grad` are written again at each replay. Results have no graph of autograd: capture forward and backward
    together.

    Args:
        function: is called with the examples.
        examples: tensors on one device. Later calls need tensors of the same shapes, dtypes and device.
        warmup: runs before the recorded one, which compile kernels and make optimizers' states.
        bind: the tensors of a call take the places of the examples, without a copy: then they also need the same
            strides, the same place within 16 bytes, and memory of their own, and what the function writes into its
            arguments it writes into them. Without it a call's tensors are copied.
        clone_outputs: returns copies. Without it, results are the capture's own tensors: the next replay overwrites
            them.
        segments: lets PyTorch's operators run between recorded parts.

    Raises:
        CaptureError: the function does what a replay could not repeat: PyTorch's operators (without `segments`), a
            value that the host reads (.item() and the like), a step that an optimizer counts on the host, a write into
            a copied input.
        ValueError, TypeError: by the capture or by a call, where inputs do not fit, before anything runs.

    Example:
        >>> replay = metalcore.capture(lambda x: metalcore.relu(metalcore.silu(x)), torch.ones(2, 4, device="mps"))
        >>> replay(torch.zeros(2, 4, device="mps")).sum().item()
        0.0
    """
    return Capture(function, examples, warmup=warmup, bind=bind, clone_outputs=clone_outputs, segments=segments)
