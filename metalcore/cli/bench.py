"""python -m metalcore bench: compares metalcore with PyTorch by the package benchmarks, which a source checkout has and
an installed metalcore has not. Python finds it where the command runs in the checkout's folder."""

from __future__ import annotations

import argparse

from . import devices


def add_parser(commands):
    parser = commands.add_parser(
        "bench",
        help="run the benchmarks of a source checkout, in its folder",
        description="Times metalcore against PyTorch's own ops, in turns in one process. Prints tables; writes them "
        "with all samples as JSON, Markdown, HTML and (where matplotlib is installed) plots.",
        epilog="example: python -m metalcore bench softmax rms_norm --filter 'forward bfloat16'",
    )
    parser.add_argument("family", nargs="*", help="families to run; the default is every family")
    parser.add_argument("--list", action="store_true", help="print the families, or the cases of those named, and stop")
    parser.add_argument("--filter", metavar="TEXT", help="only cases with these words in family, name, shape and dtype")
    parser.add_argument("--model", metavar="NAME", help="only cases of this model (decode has llama-3-8b, llama-1b …)")
    devices.add_option(parser)
    parser.add_argument(
        "--rounds", type=_positive, help="samples of either side (31; 3 with --quick); slow cases take fewer"
    )
    parser.add_argument("--quick", action="store_true", help="tiny inputs and few rounds: shows that every case runs")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs: host time counts in every case")
    parser.add_argument(
        "--threads", type=_positive, default=1, help="with --device simulator: threads of either side (1)"
    )
    parser.add_argument("--commit", help="the commit to write into the results, where git cannot tell it")
    parser.add_argument("--out", metavar="DIR", help="the folder for the files (build/benchmarks)")
    parser.add_argument(
        "--report",
        nargs="+",
        metavar="JSON",
        help="measure nothing: print and write the reports of a JSON file, or of several runs of one "
        "machine together, beside it or in --out",
    )
    parser.set_defaults(run=run)


def _positive(word):
    if not (word.isascii() and word.isdigit() and 1 <= len(word) <= 6 and int(word)):
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 to 999999, not {word!r}")
    return int(word)


def run(arguments):
    try:
        from benchmarks import harness
    except ImportError as error:
        if error.name not in ("benchmarks", "benchmarks.harness"):
            raise
        raise ValueError(
            "the benchmarks are no part of the installed package: run the command in the folder of a source checkout, "
            "which has them in benchmarks/"
        ) from None
    if arguments.model:
        arguments.filter = f"{arguments.filter or ''} {arguments.model}"
    return harness.main(arguments)
