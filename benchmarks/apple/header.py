"""Writes csrc/gpu/slowest_chip.h: figures of the slowest chip, by which the backend bounds command buffers."""

from __future__ import annotations

from pathlib import Path

from metalcore.estimates import chips
from metalcore.estimates.figures import fitted

HEADER = Path(__file__).parents[2] / "csrc" / "gpu" / "slowest_chip.h"
SLOWEST = "m1-7"
LANES = 128  # of a core; each does a product and a sum in a cycle


def text() -> str:
    """Returns the header. Memory's rate is the lower end of the interval in which nine in ten measured kernels lie."""
    chip = chips.find(SLOWEST)
    parameters, errors = fitted()
    flops = chip.cores * LANES * 2 * chip.clock * 1e9
    bytes = chip.bandwidth * 1e9 * parameters.memory / (1 + errors["memory"]["ninth"])
    name = f"an {chip.name.upper()} with {chip.cores} cores"
    return f"""// The slowest GPU that is supported, {name}, as metalcore/estimates has it.
// `python -m benchmarks.apple` writes this file when it fits the model.
#pragma once

#include <cstdint>

namespace metalcore::gpu::slowest_chip {{

constexpr uint32_t kCores = {chip.cores};
constexpr double kFlopsPerSecond = {flops:.4g};
constexpr double kBytesPerSecond = {bytes:.4g};  // as the slowest tenth of measured kernels of their kind reach it
constexpr double kSecondsPerDispatch = {parameters.launch * 1e-6:.4g};

}}  // namespace metalcore::gpu::slowest_chip
"""


def write() -> None:
    HEADER.write_text(text(), encoding="utf-8")


if __name__ == "__main__":
    write()
