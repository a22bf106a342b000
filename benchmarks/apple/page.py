"""Writes docs/apple.md, estimates of ops on eight chips beside those of other projects' kernels for the same job:

python -m benchmarks.apple.page --mlx DIR --ggml DIR --pytorch DIR [--only WORD]
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import metalcore
import metalcore.simulator
from metalcore.estimates import CountedLibrary, Estimate, chips, counting
from metalcore.estimates.figures import LEAST_ROWS, MOST, fitted
from metalcore.estimates.model import RANGES
from metalcore.estimates.picture import time_text

from ..peers.ggml import GGML
from ..peers.mlx import MLX
from ..peers.published import Launch
from ..peers.pytorch import PyTorch
from .__main__ import OUT
from .workloads import Workloads, empty

PAGE = Path(__file__).parents[2] / "docs" / "apple.md"
SLOWER = "Estimated slower than another project's kernel by more than a tenth: "
BEGIN, END = "<!-- estimates -->", "<!-- end of estimates -->"
# What is known of measurements that estimates miss: a pattern of chip and kernel, and the reason.
REASONS = (
    ("linear float32 102400x256", "an early release of MLX; a later one on an M3 took 0.7 times as long"),
    ("m3-(pro|max) MLX relu", "an early release of MLX; the same benchmark's sigmoid took half of it on an M3 Max"),
    ("m4(-pro)? MLX matmul", "not known; repeats on one chip lie 1.6 apart"),
    ("128 heads 4096x64", "not known; 16384 tokens took 8.3 times as long, and do 16 times as much"),
)
CHIPS = ("m1", "m1-max", "m2", "m2-ultra", "m3-max", "m4", "m4-max", "m5")


@dataclass(frozen=True)
class Job:
    """What is estimated: a call of ours, and for the same job a launch of another project's, or of PyTorch."""

    name: str
    ours: Callable
    theirs: Launch | Sequence[Launch] | None = None
    project: str = ""
    whole: int = 0  # so that results are there where kernels' work depends on them
    pytorch: Launch | None = None

    @property
    def peers(self):
        """Projects with their launches."""
        found = ((self.project, self.theirs), ("PyTorch", self.pytorch))
        return [(project, launches) for project, launches in found if launches is not None]


def jobs(mlx, ggml, pytorch):
    """Returns the rows of the page."""
    a, b, half = empty(2048, 2048), empty(2048, 2048), empty(2048, 2048, dtype=torch.float16)
    peer, packed_peer, work = MLX(mlx), GGML(ggml), Workloads(mlx, ggml)
    type_q4k = metalcore.quant.type_of("Q4_K")
    packed = torch.zeros(14336, 4096 // 256 * type_q4k.nbytes, dtype=torch.uint8, device="mps")
    row, wide, weight = empty(1, 4096), torch.zeros(4096, 4096, device="mps"), torch.ones(4096, device="mps")
    long = torch.zeros(4096, 8192, device="mps")
    query, kept = empty(1, 32, 1, 128, dtype=torch.float16), empty(1, 32, 4096, 128, dtype=torch.float16)
    small, middle = torch.randn(4096, 32, 32, device="mps"), torch.randn(64, 128, 128, device="mps")
    definite = small @ small.mT + 32 * torch.eye(32, device="mps")
    [softmax] = [launch for _, launch in work.softmax(4096, 8192).steps]
    q, k = empty(1, 8, 1024, 64, dtype=torch.float16), empty(1, 8, 1024, 64, dtype=torch.float16)
    some = 2_000_000_000
    return [
        Job(
            "`matmul` 2048×2048×2048, float32",
            lambda: metalcore.matmul(a, b),
            peer.matmul("nn", 0, a, b).launches[0],
            "MLX",
            pytorch=PyTorch(pytorch).matmul(a, b),
        ),
        Job(
            "`matmul` 2048×2048×2048, float16",
            lambda: metalcore.matmul(half, half),
            peer.matmul("nn", 0, half, half).launches[0],
            "MLX",
        ),
        Job(
            "`quantized_linear` Q4_K, 14336×4096, 1 row",
            lambda: metalcore.quantized_linear(row, packed, "Q4_K"),
            packed_peer.matvec("Q4_K", packed, row).launches[0],
            "ggml",
        ),
        Job("`softmax` 4096×8192", lambda: metalcore.softmax(long, -1), softmax, "MLX"),
        Job("`rms_norm` 4096×4096", lambda: metalcore.rms_norm(wide, (4096,), weight), work.rms_norm(4096), "MLX"),
        Job("`silu` 4096×4096", lambda: metalcore.silu(wide)),
        Job(
            "attention 8 heads, 1024×64, float16",
            lambda: metalcore.scaled_dot_product_attention(q, k, k),
            peer.attention(False, q, k, k).launches[0],
            "MLX",
        ),
        Job(
            "attention 32 heads, 1 query, 4096 keys, 128 wide, float16",
            lambda: metalcore.scaled_dot_product_attention(query, kept, kept),
            peer.decode(query, kept, kept).launches,
            "MLX",
        ),
        Job("`qr` 4096 of 32×32", lambda: metalcore.qr(small), whole=some),
        Job("`qr` 64 of 128×128", lambda: metalcore.qr(middle), whole=some),
        Job("`cholesky` 4096 of 32×32", lambda: metalcore.cholesky(definite), whole=some),
    ]


def counted_by_chip(job):
    """Returns what the job's kernels do, by chip: plans differ."""
    found = {}
    for name in CHIPS:
        chip = chips.find(name)
        with counting(
            family=chip.family, cores=chip.cores, events=1_000_000, whole=job.whole, registers=True
        ) as counts:
            job.ours()
        found[name] = list(counts)
    return found


def counted_of(launches):
    with counting(events=1_000_000, registers=True) as counts:
        for launch in (launches,) if isinstance(launches, Launch) else launches:
            launch.by(CountedLibrary)()
    return list(counts)


def cell(counted, name):
    estimate = Estimate(chips.find(name), counted)
    if estimate.seconds is None:
        return "none"
    return f"{time_text(estimate.seconds)} ({time_text(estimate.low)} to {time_text(estimate.high)})"


def rows(job):
    """Returns the job's rows of the table, and where it is estimated slower than another project's kernel."""
    ours = counted_by_chip(job)
    out = [f"| {job.name} | {' | '.join(cell(ours[name], name) for name in CHIPS)} |"]
    slower = []
    for project, launches in job.peers:
        theirs = counted_of(launches)
        out.append(f"| … {project}'s | {' | '.join(cell(theirs, name) for name in CHIPS)} |")
        for name in CHIPS:
            first, second = (Estimate(chips.find(name), c) for c in (ours[name], theirs))
            if first.seconds and second.seconds and first.seconds > 1.1 * second.seconds:
                slower.append(f"{job.name} on {name}: {first.seconds / second.seconds:.1f} times {project}'s")
    return out, slower


def kept(job, text):
    """Returns what the page has of a job, as rows() gives it."""
    begin = text.index(f"| {job.name} |")
    lines = text[begin:].split("\n")
    count = next(i for i, line in enumerate(lines) if i > 0 and not line.startswith("| … "))
    entries = re.search(f"^{re.escape(SLOWER)}(.*)\\.$", text, flags=re.M)[1].split("; ")
    return lines[:count], [entry for entry in entries if entry.startswith(f"{job.name} on ")]


def table(options, text):
    """Returns the lines of the table of estimates. `text` is the page as it is."""
    out = [f"| estimated | {' | '.join(CHIPS)} |", "|---" * (len(CHIPS) + 1) + "|"]
    slower = []
    for job in jobs(options.mlx, options.ggml, options.pytorch):
        lines, entries = rows(job) if options.only in job.name else kept(job, text)
        out += lines
        slower += entries
    return [*out, "", SLOWER + ("; ".join(slower) or "none") + "."]


def held_out_lines():
    """Returns how far estimates lie off measurements that the model was not fitted to, and which ones they miss."""
    content = json.loads(OUT.read_text(encoding="utf-8"))
    out = ["| kind of kernel | held-out measurements | half within | nine in ten within | part within 40% |"]
    out.append("|---|---|---|---|---|")
    for kind, entry in content["held_out"].items():
        out.append(
            f"| {kind} | {entry['rows']} | {entry['median']:.0%} | {entry['ninth']:.0%} | {entry['within40']:.0%} |"
        )
    out += ["", "| missed by more than 40% | measured | estimated | why |", "|---|---|---|---|"]
    for chip, cores, what, seconds, estimate, doubt in content["misses"]:
        known = doubt or next((why for pattern, why in REASONS if re.search(pattern, f"{chip} {what}")), "not known")
        out.append(f"| {what}, {chip} with {cores} cores | {time_text(seconds)} | {time_text(estimate)} | {known} |")
    return out


def model_lines():
    """Returns what the model's numbers are, and how far it was wrong."""
    parameters, errors = fitted()
    out = ["| kind of kernel | measured | half within | nine in ten within | |", "|---|---|---|---|---|"]
    for kind, entry in sorted(errors.items()):
        usable = entry["rows"] >= LEAST_ROWS and entry["ninth"] <= MOST
        out.append(
            f"| {kind} | {entry['rows']} | {entry['median']:.0%} | {entry['ninth']:.0%} "
            f"| {'' if usable else 'no figure is given'} |"
        )
    out += ["", "| number of the model | fitted | range | source |", "|---|---|---|---|"]
    for name, value in parameters._asdict().items():
        low, high, source = RANGES[name]
        out.append(f"| {name} | {value:.3g} | {low:g} to {high:g} | {source} |")
    return out


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.apple.page", description=__doc__.split("\n")[0])
    parser.add_argument("--mlx", required=True, help="a checkout of ml-explore/mlx")
    parser.add_argument("--ggml", required=True, help="a checkout of ggml-org/ggml or llama.cpp")
    parser.add_argument("--pytorch", required=True, help="a checkout of pytorch/pytorch")
    parser.add_argument("--only", default="", help="estimate ops with this word in their row, and keep the other rows")
    options = parser.parse_args()
    text = PAGE.read_text(encoding="utf-8")
    lines = [BEGIN, "", *held_out_lines(), "", *model_lines(), "", *table(options, text), "", END]
    PAGE.write_text(re.sub(f"{BEGIN}.*?{END}", lambda _: "\n".join(lines), text, flags=re.S), encoding="utf-8")


if __name__ == "__main__":
    main()
