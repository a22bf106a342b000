"""python -m metalcore.doctor.child [MODULE …]: the process that runs probes. It imports the modules, and answers each
name of a row on its standard input with a line of JSON."""

import importlib
import json
import os
import sys

for module in sys.argv[1:]:
    importlib.import_module(module)

from metalcore.doctor.machine import this_machine  # noqa: E402
from metalcore.doctor.rows import row_of  # noqa: E402
from metalcore.doctor.runner import judge  # noqa: E402


def main():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints does not answer
    machine = this_machine()
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(judge(row_of(line.strip()), machine)._asdict()), file=answers, flush=True)


if __name__ == "__main__":
    main()
