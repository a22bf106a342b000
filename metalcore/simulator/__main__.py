"""Runs a program on the simulated MPS device as the Python interpreter would run it.

    python -m metalcore.simulator script.py [argument ...]
    python -m metalcore.simulator -m module [argument ...]
    python -m metalcore.simulator -c code   [argument ...]

Processes that the program starts have the device as well, unless METALCORE_SIMULATOR=0 is in their environment.
"""

import os
import runpy
import sys
import types

from .device import reach_children


def run_code(code):
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(code, "<string>", "exec"), module.__dict__)


def main(arguments):
    option = arguments[0] if arguments else ""
    needed = 2 if option in ("-c", "-m") else 1
    if len(arguments) < needed or (option.startswith("-") and needed == 1):
        print((__doc__ or "").strip(), file=sys.stderr)
        return 0 if option in ("-h", "--help") else 2
    reach_children()
    if option == "-c":
        sys.argv = ["-c", *arguments[2:]]
        run_code(arguments[1])
    elif option == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path[0] = os.path.dirname(os.path.realpath(option))
        runpy.run_path(option, run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
