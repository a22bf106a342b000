"""What the benchmarks share: options, alternating measurement, and the table.

Both sides of a comparison are run in turns in the same process, so that whatever else the machine does falls on both.
With one thread, time is the process's CPU time: on a busy machine the longer of two calls is interrupted more often, and
wall-clock time would hold that against it. A figure is the median over the rounds, with the quartiles of the ratio as its
spread.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time

import torch


def options(description):
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="small inputs and few rounds")
    parser.add_argument("--threads", type=int, default=1, help="threads for either side (1)")
    parser.add_argument("--rounds", type=int, help="rounds of either side (31; 5 with --quick)")
    arguments = parser.parse_args()
    arguments.rounds = arguments.rounds or (5 if arguments.quick else 31)
    return arguments


def start(arguments):
    """Imports metalcore and a device, sets the threads, says what is measured where; returns the device."""
    import metalcore

    torch.set_num_threads(arguments.threads)
    simulated = not torch.backends.mps.is_available()
    if simulated:
        import metalcore.simulator

        metalcore._C.simulator_set_num_threads(arguments.threads)
    cpu_time = simulated and arguments.threads == 1
    Timer.clock = time.process_time if cpu_time else time.perf_counter
    print(f"metalcore {metalcore.__version__}, torch {torch.__version__}, {platform.machine()}, "
          f"{'simulated' if simulated else 'real'} mps, {arguments.threads} thread(s), {arguments.rounds} rounds, "
          f"{'CPU' if cpu_time else 'wall-clock'} time")
    return torch.device("mps")


class Timer:
    clock = staticmethod(time.perf_counter)


def alternate(ours, theirs, rounds, calls=1):
    """Seconds of a call of either side, one list each, after a warm-up of both."""
    ours(), theirs()
    times = [], []
    for round_ in range(rounds):
        for side in ((0, 1), (1, 0))[round_ % 2]:
            call = (ours, theirs)[side]
            synchronize()
            begin = Timer.clock()
            for _ in range(calls):
                call()
            synchronize()
            times[side].append((Timer.clock() - begin) / calls)
    return times


def synchronize():
    torch.mps.synchronize()


class Table:
    """Prints one row per comparison; `columns` name what tells the rows apart."""

    def __init__(self, *columns, theirs="PyTorch CPU", unit="ms"):
        self.scale = {"ms": 1e3, "us": 1e6, "s": 1}[unit]
        self.widths = [22, 10, 16][:len(columns)]
        self._print([*columns, f"metalcore {unit}", f"{theirs} {unit}", "ratio (quartiles)"])

    def row(self, *labels, times):
        ours, theirs = (statistics.median(side) * self.scale for side in times)
        ratios = sorted(a / b for a, b in zip(*times))
        low, high = ratios[len(ratios) // 4], ratios[(3 * len(ratios)) // 4]
        self._print([*map(str, labels), f"{ours:.3f}", f"{theirs:.3f}", f"{ours / theirs:.2f} ({low:.2f}-{high:.2f})"])

    def _print(self, cells):
        labels = "  ".join(f"{cell:<{width}}" for cell, width in zip(cells, self.widths))
        figures = "  ".join(f"{cell:>18}" for cell in cells[len(self.widths):])
        print(f"{labels}  {figures}", flush=True)
