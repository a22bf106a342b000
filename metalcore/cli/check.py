"""python -m metalcore check: whether Apple's compiler would take Metal programs."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def add_parser(commands):
    parser = commands.add_parser(
        "check",
        help="check Metal programs as strictly as Apple's compiler; needs Clang 15",
        description="Prints what Apple's compiler would refuse in Metal programs, as "
        "FILE:LINE: error: … [rule]; exits with 1 if there is anything. "
        "Needs Clang 15 or newer.",
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="file.metal")
    parser.add_argument(
        "-I", dest="include_dirs", action="append", default=[], metavar="DIRECTORY", help="look for #include there"
    )
    parser.add_argument(
        "-D", dest="defines", action="append", default=[], metavar="NAME[=VALUE]", help="define a macro"
    )
    parser.add_argument(
        "--lenient",
        action="store_true",
        help="leave out findings that Apple's compiler accepts: literals without a type, implicit conversion of float "
        "to half, recursion, pointers to functions, more than 32 KiB of threadgroup variables, newer C++ than C++14 "
        "that it warns about",
    )
    parser.add_argument(
        "--std",
        default="metal3.1",
        help="the version of MSL: metal3.1 (default, as metalcore compiles on a Mac), metal3.2, metal4.0 or metal4.1",
    )
    parser.set_defaults(run=run)


def run(arguments):
    from metalcore.msl.check import check

    for directory in arguments.include_dirs:
        if not os.path.isdir(directory):
            raise ValueError(f"-I {directory}: no such directory")
    defines = [" ".join((define + "=1").split("=")[:2]) for define in arguments.defines]
    broken = 0
    for path in arguments.files:
        findings = check(
            path.read_text(),
            filename=os.fspath(path),
            include_dirs=arguments.include_dirs,
            defines=defines,
            strict=not arguments.lenient,
            std=arguments.std,
        )
        for finding in findings:
            print(finding)
        broken += bool(findings)
    print(f"{len(arguments.files) - broken} of {len(arguments.files)} programs have no findings", file=sys.stderr)
    return 1 if broken else 0
