"""Singular value decompositions of a million small matrices, shared out over the ranks of torchrun.

    torchrun --nproc-per-node 2 examples/distributed_svd.py --data /data/svd --matrices 1000000
    METALCORE_SIMULATOR=1 torchrun --nproc-per-node 2 examples/distributed_svd.py    # on simulated devices

The matrices lie in shards of safetensors, which are made where they are missing, and are mapped into memory. A group of
shards, one batch, is a DTensor whose batch dimension is sharded over the ranks, so that the decomposition needs no
communication. Each rank writes its part of the results under a temporary name and renames it, so that a part is whole
or not there. After a crash the same command does what is missing: a batch is done when all its parts are there.

A rank that dies makes the others fail within --timeout seconds. --fail-at N kills rank 1 before batch N, to try it.
"""

import argparse
import json
import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import metalcore
import metalcore.distributed

if "RANK" not in os.environ:  # without torchrun: one rank
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
if not torch.cuda.is_available() and not torch.backends.mps.is_available():
    import metalcore.simulator

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--data", type=Path, default=Path("build/distributed_svd"))
parser.add_argument("--matrices", type=int, default=512)
parser.add_argument("--size", type=int, nargs=2, default=(16, 12), metavar=("ROWS", "COLUMNS"))
parser.add_argument("--shard", type=int, default=64, help="matrices in a file of input")
parser.add_argument("--batch", type=int, default=2, help="files of input in a batch")
parser.add_argument("--timeout", type=float, default=60, help="seconds to wait for another rank")
parser.add_argument("--fail-at", type=int, help="the batch before which rank 1 is killed")
arguments = parser.parse_args()

DEVICE = "cuda" if torch.cuda.is_available() else "mps"


def atomically(path, tensors):
    """Writes a file that is either whole or not there."""
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    save_file(tensors, temporary)
    temporary.rename(path)


def inputs(rank, world):
    """Returns the files of matrices. Each rank makes some of those that are missing."""
    folder = arguments.data / "input"
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for index, first in enumerate(range(0, arguments.matrices, arguments.shard)):
        path = folder / f"{index:06}.safetensors"
        files.append(path)
        if index % world == rank and not path.exists():
            count = min(arguments.shard, arguments.matrices - first)
            generator = torch.Generator().manual_seed(index)
            atomically(path, {"A": torch.randn(count, *arguments.size, generator=generator)})
    dist.barrier()
    return files


def read(files, mesh):
    """Returns the matrices of the files as a DTensor. A rank maps the files and copies its own part to the device."""
    maps = [safe_open(path, "pt").get_slice("A") for path in files]
    lengths = [each.get_shape()[0] for each in maps]
    total, rank, world = sum(lengths), mesh.get_local_rank(), mesh.size()
    share = -(-total // world)  # as Shard(0) divides it
    begin, end, start, parts = min(rank * share, total), min((rank + 1) * share, total), 0, []
    for each, length in zip(maps, lengths):
        lower, upper = max(begin - start, 0), min(end - start, length)
        if lower < upper:
            parts.append(each[lower:upper])
        start += length
    shape = torch.Size((total, *arguments.size))
    local = torch.cat(parts).to(DEVICE) if parts else torch.empty(0, *arguments.size, device=DEVICE)
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=local.stride())


def main():
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    backend = "cuda:nccl,cpu:gloo" if DEVICE == "cuda" else "gloo"
    if not dist.is_initialized():
        dist.init_process_group(backend, timeout=timedelta(seconds=arguments.timeout))
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(DEVICE, (world,))
    files = inputs(rank, world)
    results = arguments.data / f"results-of-{world}"
    results.mkdir(parents=True, exist_ok=True)
    batches = [files[first : first + arguments.batch] for first in range(0, len(files), arguments.batch)]

    def part(number, of):
        return results / f"{number:06}-{of}.safetensors"

    done = [all(part(number, of).exists() for of in range(world)) for number in range(len(batches))]
    dist.barrier()  # before a rank writes
    earlier, start, error = sum(done), time.perf_counter(), 0.0
    for number, names in enumerate(batches):
        if done[number]:
            continue
        if number == arguments.fail_at and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        A = read(names, mesh)
        U, S, Vh = metalcore.svd(A, full_matrices=False)
        local = {name: tensor.to_local().cpu().contiguous() for name, tensor in (("U", U), ("S", S), ("Vh", Vh))}
        if len(local["S"]):
            difference = (local["U"] * local["S"][:, None]) @ local["Vh"] - A.to_local().cpu()
            error = max(error, float(difference.abs().max()))
        atomically(part(number, rank), local)
        dist.barrier()  # no rank runs ahead of one that has died
        if rank == 0:
            print(f"batch {number + 1} of {len(batches)}", flush=True)
    errors = [None] * world
    dist.all_gather_object(errors, error)
    if rank == 0:
        seconds = time.perf_counter() - start
        count = arguments.matrices * (len(batches) - earlier) / len(batches)
        report = {
            "matrices": arguments.matrices,
            "ranks": world,
            "batches": len(batches),
            "batches done before": earlier,
            "seconds": round(seconds, 3),
            "matrices per second": round(count / seconds, 1),
            "largest error": max(errors),
        }
        (results / "report.json").write_text(json.dumps(report, indent=2) + "\n")
        print(json.dumps(report, indent=2))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
