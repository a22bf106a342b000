"""Seconds that `import metalcore` takes in a new process after `import torch`, which is shown beside it."""

import statistics
import subprocess
import sys

from _timing import options

SCRIPT = """
import time
begin = time.perf_counter()
import torch
torch_done = time.perf_counter()
import metalcore
print(torch_done - begin, time.perf_counter() - torch_done)
"""

arguments = options(__doc__)
runs = [[float(word) for word in subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True,
                                                check=True).stdout.split()]
        for _ in range(3 if arguments.quick else 11)]
for name, times in zip(("import torch", "import metalcore"), zip(*runs)):
    print(f"{name:<18} {statistics.median(times):.3f} s (from {min(times):.3f} to {max(times):.3f} s)")
