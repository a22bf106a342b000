"""The command line: `python -m metalcore info`, `ops`, `explain`, `estimate`, `op`, `bench`, `generate`, `check`,
`selftest`, `doctor`, `golden`, `gguf`, `program`, `tune` and `cflags`.

Each command is a module with `add_parser(subparsers)`, which names the function that runs it. Exit status: 0; 1 if a
benchmark or a check failed; 2, with a line on stderr, for a request that cannot be met; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import platform
import sys

import torch

from .._system import __version__
from . import (
    bench,
    cflags,
    check,
    doctor,
    estimate,
    explain,
    generate,
    gguf,
    golden,
    info,
    op,
    ops,
    program,
    selftest,
    tune,
)

__all__ = ["main"]

COMMANDS = (
    info,
    ops,
    explain,
    estimate,
    op,
    bench,
    generate,
    check,
    selftest,
    doctor,
    golden,
    gguf,
    program,
    tune,
    cflags,
)


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(prog="metalcore", description="PyTorch ops written as Metal kernels.")
    parser.add_argument(
        "--version",
        action="version",
        version=f"metalcore {__version__}, PyTorch {torch.__version__}, Python {platform.python_version()}",
    )
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    for module in COMMANDS:
        module.add_parser(commands)
    arguments, arguments.more = parser.parse_known_args(argv)
    if arguments.more and not getattr(arguments, "takes_more", False):
        parser.error(f"unrecognized arguments: {' '.join(arguments.more)}")
    try:
        return arguments.run(arguments) or 0
    except BrokenPipeError:  # | head
        return 0
    except OSError as error:  # a file that is not there, or cannot be read
        return _refuse(arguments, f"{error.filename}: {error.strerror}" if error.filename else error)
    except (OverflowError, MemoryError) as error:
        return _refuse(arguments, f"a number is too large: {error}" if str(error) else "a size is too large for memory")
    except (ValueError, TypeError, RuntimeError) as error:
        return _refuse(arguments, error)
    except KeyboardInterrupt:
        return 130


def _refuse(arguments, reason):
    message = str(reason).removeprefix("metalcore: ").removeprefix(f"{arguments.command}: ")
    print(f"metalcore {arguments.command}: {message}", file=sys.stderr)
    return 2
