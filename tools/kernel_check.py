"""Whether metalcore.msl.check, which is as strict as Apple's compiler, accepts the built-in kernels:

    python -m tools.kernel_check                    # all kernels; exit status 1 where it finds something
    python -m tools.kernel_check linalg gemm/gemm   # the files whose path below kernels/ begins so
    python -m tools.kernel_check --record           # those that changed since kernel_check.json; it then has them

To check all takes two minutes of a core, and the same text gives the same findings. So kernel_check.json has, by file,
a digest of the text and of the rules when there was no finding; the tests check the files whose digest differs, and a
few of the others.
"""

import argparse
import functools
import re
import sys
from pathlib import Path

from metalcore.msl import cache
from metalcore.msl.check import check, clang
from metalcore.msl.runtime.host import predefined_macros

from . import register_gate
from .build.families import with_includes
from .register_gate import KERNELS, families

RECORD = Path(__file__).with_suffix(".json")  # {file of kernels: digest() when there was no finding}
MSL = Path(cache.__file__).parent


def findings(family):
    """Returns what is wrong with a file of kernels, a list of findings."""
    path = KERNELS / f"{family}.metal"
    text = path.read_text(encoding="utf-8")
    std = "metal4.0" if "<metal_tensor>" in text else "metal3.1"
    return check(text, filename=str(path), include_dirs=[path.parent, KERNELS], std=std)


def recorded():
    """Returns {file of kernels: its digest when there was no finding}."""
    return register_gate.recorded(RECORD)


def digest(family):
    """Returns a digest of all that decides what is found in a file of kernels."""
    texts = [_text(path) for path in with_includes(KERNELS / f"{family}.metal", KERNELS)]
    return cache.digest(*texts, _rules())[:16]


@functools.cache
def _text(path):
    return path.read_text(encoding="utf-8")


@functools.cache
def _rules():
    """Returns a digest of the check, of what reads programs for it, and of Clang's version."""
    paths = [path for folder in ("check", "language") for path in sorted((MSL / folder).rglob("*"))]
    version = re.findall(r"__clang_major__ \d+", predefined_macros(clang.find_clang(), "c"))
    return cache.digest(*(_text(path) for path in paths if path.suffix in (".py", ".h")), *version)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prefixes", nargs="*", default=[""])
    parser.add_argument("--record", action="store_true", help="check the files that changed, and record the right ones")
    options = parser.parse_args(arguments)
    record, wrong = recorded(), 0
    for family in families(options.prefixes):
        if options.record and record.get(family) == digest(family):
            continue
        faults = findings(family)
        print(family, *faults, sep="\n", flush=True)
        wrong += bool(faults)
        if not faults:
            record[family] = digest(family)
    if options.record:
        register_gate.write_record(record, RECORD)
    print(f"{wrong} files have findings")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
