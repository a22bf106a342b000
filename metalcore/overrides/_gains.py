"""How much faster overrides were than what they replace, which decides whether they are on by default."""

from __future__ import annotations

__all__ = ["GAINS", "LEAST", "by_default", "gain"]

# PyTorch's time over ours, by type of device: the geometric mean of the cases of the op in benchmarks/results, forward
# and backward, of all dtypes. The figures of `cuda` are from one H100. Nobody has measured an Apple GPU.
GAINS: dict[str, dict[str, float]] = {
    "cuda": {
        "silu": 1.05,
        "gelu": 1.01,
        "softmax": 1.58,
        "log_softmax": 1.2,
        "rms_norm": 1.52,
        "adamw": 1.52,
        "solve_triangular": 2.01,
        "qr": 38.76,
        "cholesky": 2.79,
        "lu_factor": 2.16,
        "lu_solve": 2.47,
        "solve": 2.6,
        "inv": 3.12,
        "det": 3.82,
        "slogdet": 3.36,
        "eigh": 8.83,
        "svd": 25.33,
    },
}
LEAST = 0.95  # below, PyTorch's own is on: means differ by a few per cent from run to run


def gain(name: str, device: str) -> float | None:
    """PyTorch's time over ours, or None where it was not measured."""
    return GAINS.get(device, {}).get(name)


def by_default(name: str, devices: tuple[str, ...]) -> bool:
    """Whether an override is on without having been asked for by name: unless it was measured to be slower on all
    devices that are there."""
    found = [gain(name, device) for device in devices]
    return not found or any(each is None or each >= LEAST for each in found)
