"""How long selftest takes on the slowest Mac that is supported, an M1 with 7 GPU cores, by estimates.

The GPU's part is the cost model's (csrc/gpu/cost.h) for each sample's dispatches. Nobody has measured the rest on a
Mac. The constants below are assumptions, and the report says what each part really took.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from metalcore._core import accuracy
from metalcore._core.registry import OPS, Op, Sample
from metalcore.recording import on_meta

MOST_SECONDS = 120

# Metal's compiler: the front end for a family's program, and then each of its kernels down to the GPU's instructions.
PROGRAM_SECONDS = 0.25
KERNEL_SECONDS = 0.04
# The host: a call of an op with its share of PyTorch's own work, and a wait for the GPU.
CALL_SECONDS = 100e-6
WAIT_SECONDS = 500e-6
# A check computes results and gradients twice, on the GPU and in float64 on the CPU, from tensors that it makes. The
# CPU takes this long for each element of the tensors, sums of products included, and this long for each check.
ELEMENT_SECONDS = 50e-9
CHECK_SECONDS = 10e-3
CHECK_CALLS, CHECK_WAITS = 6, 6


def estimate(kernels: Mapping[str, str], calls_timed: int, ops: Collection[Op] | None = None) -> dict[str, float]:
    """Returns the seconds of each part.

    Args:
        kernels: {name of a kernel: its family}, of all that Metal compiles.
        calls_timed: how many calls of an op are timed, and as many of PyTorch's.
        ops: the default is all.
    """
    ops = OPS.values() if ops is None else ops
    samples = [(op, sample) for op in ops for sample in op.samples() if sample.elements]
    checks = sum(len(op.dtypes) for op, _ in samples) + len(ops)  # golden artifacts are a check of each op
    seconds = {id(sample): device_seconds(op, sample) for op, sample in samples}
    gpu = sum(len(op.dtypes) * seconds[id(sample)] for op, sample in samples)
    timed = sum(max(seconds[id(sample)] for other, sample in samples if other is op) for op in ops)
    elements = sum(len(op.dtypes) * sample.elements for op, sample in samples)
    return {
        "compiling": PROGRAM_SECONDS * len(set(kernels.values())) + KERNEL_SECONDS * len(kernels),
        "checks": gpu
        + checks * (CHECK_SECONDS + CHECK_CALLS * CALL_SECONDS + CHECK_WAITS * WAIT_SECONDS)
        + elements * ELEMENT_SECONDS,
        "times": 2 * calls_timed * (timed + len(ops) * (CALL_SECONDS + WAIT_SECONDS)),
    }


def device_seconds(op: Op, sample: Sample) -> float:
    """Returns the cost model's time for the results and the gradients of a sample. Nothing runs."""
    dtype = max(op.dtypes, key=lambda dtype: dtype.itemsize)
    with on_meta("mps") as recorder:
        accuracy.evaluate(op, sample, [tensor.to("meta") for tensor in sample.make("cpu", dtype)])
    return sum(dispatch.seconds for dispatch in recorder.recording.dispatches)
