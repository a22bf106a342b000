"""The command line: `python -m metalcore info | explain | bench | check | selftest`.

Each command is a module with `add_parser(subparsers)`, which names the function that runs it. Exit status: 0; 1 if a
benchmark or a check failed; 2, with a line on stderr, for a request that cannot be met.
"""

from __future__ import annotations

import argparse
import sys

from . import bench, check, explain, info, selftest

__all__ = ["main"]


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(prog="metalcore", description="PyTorch ops written as Metal kernels.")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    for module in (info, explain, bench, check, selftest):
        module.add_parser(commands)
    arguments = parser.parse_args(argv)
    try:
        return arguments.run(arguments) or 0
    except (ValueError, TypeError, RuntimeError) as error:
        print(f"metalcore {arguments.command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # | head
        return 0
