"""Times metalcore against kernels that other projects publish, on an NVIDIA GPU, and checks the results of both.

    python -m benchmarks.peers gemm --mlx ~/mlx
    python -m benchmarks.peers attention --mlx ~/mlx --ggml ~/llama.cpp --filter "decode bfloat16"
    python -m benchmarks.peers affine --mlx ~/mlx --filter "4 bits"
    python -m benchmarks.peers quant --ggml ~/llama.cpp --type Q4_K
    python -m benchmarks.peers liger --filter "rms_norm backward"

Each argument of a path names a checkout, from which sources are read; nothing is downloaded. --compile compiles the
peers' kernels for NVIDIA GPUs without one.
"""

from __future__ import annotations

import argparse
import sys

import torch

from metalcore.cli import devices

from ..harness import run as harness
from . import affine, attention, gemm, liger, quant
from .published import Launches, compile_all

PARTS = {"gemm": gemm, "affine": affine, "attention": attention, "quant": quant, "liger": liger}
CAPABILITY = 90  # that --compile takes where there is no GPU


def parser():
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_subparsers(dest="part", metavar="part", required=True)
    for name, module in PARTS.items():
        part = parts.add_parser(name, help=module.__doc__.splitlines()[0], description=module.__doc__)
        part.set_defaults(compile=False)
        if module is not liger:
            module.add_options(part)
            part.add_argument("--compile", action="store_true", help="only compile the peers' kernels, by NVRTC")
        part.add_argument("--filter", metavar="TEXT", help="only cases with these words in name, shape and dtype")
        part.add_argument("--quick", action="store_true", help="tiny inputs and few rounds: shows that every case runs")
        devices.add_option(part)
        part.add_argument("--rounds", type=int, help="samples of either side (31; 3 with --quick)")
        part.add_argument("--commit", help="the commit to write into the results, where git cannot tell it")
        part.add_argument("--out", metavar="DIR", help="the folder for the files (build/benchmarks)")
        part.set_defaults(threads=1, eager=False)
    return parser


def launches(cases, device):
    """Yields the launches of the peers' kernels. A case's tensors are gone when the next one is bound."""
    for _, case in cases:
        call = case.bind(case.theirs, *case.inputs(device))
        if isinstance(call, Launches):
            yield from call.launches


def main(arguments=None):
    options = parser().parse_args(arguments)
    try:
        run = harness.begin(options)
        device = run.device
        device.theirs = device.ours  # peers' kernels run where ours do
        quick = options.quick or (options.compile and device.name != "cuda")
        cases = PARTS[options.part].cases(options, harness.scale(device.scale, quick))
        family = f"peers_{options.part}"
        chosen = harness.matching([(family, case) for case in cases], options.filter)
        if options.part != "liger" and (options.compile or device.name == "cuda"):
            major, minor = torch.cuda.get_device_capability() if device.name == "cuda" else divmod(CAPABILITY, 10)
            problems = compile_all(launches(chosen, device.ours), 10 * major + minor, harness.say)
            for problem in problems:
                harness.say(problem)
            if options.compile:
                return int(bool(problems))
        return harness.measure_all(chosen, run, options, [family], against="peer")
    except (ValueError, RuntimeError) as error:
        print(f"benchmarks.peers: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
