"""Processes that run checks together, as the ranks of a group of gloo, each with a simulated device of its own.

    ranks.run(2, "losses.vocabulary", reduction="mean")    # checks/losses.py: vocabulary(reduction) in two ranks

The processes stay for all tests. A group lives as long as a check.
"""

import importlib
import itertools
import multiprocessing
import os
import sys
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

HERE = Path(__file__).parent
LIMIT = 90  # seconds for a check


class Ranks:
    def __init__(self, count):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["preload"])
        self._pipes, self._processes, self._number = [], [], itertools.count()
        self._folder = tempfile.TemporaryDirectory()
        for rank in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, count, check, /, **options):
        """What the check returns, for each rank. An error of one rank fails."""
        # A file of its own for each group: a rank that leaves the last one may still remove its file.
        store = Path(self._folder.name) / str(next(self._number))
        for pipe in self._pipes[:count]:
            pipe.send((count, str(store), check, options))
        found = []
        for rank, pipe in enumerate(self._pipes[:count]):
            assert pipe.poll(LIMIT), f"rank {rank} of {check} did not answer in {LIMIT} s"
            try:
                found.append(pipe.recv())
            except (EOFError, ConnectionResetError):
                found.append(("it has died", None))
        errors = [f"rank {rank} of {check}:\n{error}" for rank, (error, _) in enumerate(found) if error]
        assert not errors, "\n".join(errors)
        return [value for _, value in found]

    def stop(self):
        for pipe, process in zip(self._pipes, self._processes):
            pipe.close()
            process.join(2)
            if process.is_alive():
                process.kill()
        self._folder.cleanup()


def serve(rank, pipe):
    sys.path.insert(0, str(HERE))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    while True:
        try:
            count, store, check, options = pipe.recv()
        except (EOFError, ConnectionResetError):
            return
        module, name = check.split(".")
        try:
            dist.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=count, timeout=timedelta(seconds=60)
            )
            torch.manual_seed(0)
            value = getattr(importlib.import_module(f"checks.{module}"), name)(**options)
            if dist.is_initialized():
                dist.barrier()
            answer = None, value
        except BaseException:
            answer = traceback.format_exc(), None
        if dist.is_initialized():
            dist.destroy_process_group()
        pipe.send(answer)
