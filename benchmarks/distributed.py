"""Weak scaling on several NVIDIA GPUs of one host, through NCCL.

    torchrun --nproc-per-node 2 -m benchmarks.distributed            # qr, svd, eigh; then FSDP2 training
    torchrun --nproc-per-node 2 -m benchmarks.distributed --ops      # linear algebra alone
    torchrun --nproc-per-node 2 -m benchmarks.distributed --train

Linear algebra: rank 0 alone on a batch, then every rank on such a batch, all at once, as a DTensor whose batch is
sharded. The scaling is the number of ranks times the first time over the second. Training: tokens per second of a Llama
of 1B parameters with FSDP2 in bfloat16, with PyTorch's own ops and with metalcore's, in turns.
"""

import argparse
import json
import os
import statistics
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

import metalcore
import metalcore.distributed

# A call takes milliseconds, beside which the host's time for a DTensor (50 to 100 µs) is small.
CASES = {"qr": (1048576, 16, 16), "svd": (65536, 32, 32), "eigh": (131072, 32, 32)}


def seconds(call, repeats):
    """Returns the median time of a call, of the slowest rank that takes part."""
    call()
    seconds_of_calls = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        seconds_of_calls.append(time.perf_counter() - start)
    return statistics.median(seconds_of_calls)


def slowest(value):
    tensor = torch.tensor(value, device="cuda")
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.item()


def linear_algebra(mesh, repeats):
    rows, world = [], mesh.size()
    for name, shape in CASES.items():
        A = torch.randn(shape, device="cuda")
        A = A + A.mT if name == "eigh" else A
        function = getattr(metalcore, name)
        alone = seconds(lambda: function(A), repeats) if dist.get_rank() == 0 else 0.0
        dist.barrier()
        sharded = DTensor.from_local(A, mesh, [Shard(0)], run_check=False)
        together = slowest(seconds(lambda: function(sharded), repeats))
        alone = slowest(alone)
        rows.append({"op": name, "shape": shape, "alone": alone, "all": together, "scaling": world * alone / together})
    return rows


def model_of(mesh, layers):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        tie_word_embeddings=True,
    )
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).train()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def tokens_per_second(mesh, ours, layers, batch, length, repeats):
    model = model_of(mesh, layers)
    kind = metalcore.optim.AdamW if ours else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=1e-4, **({} if ours else {"fused": True}))
    ids = torch.randint(128256, (batch, length), device="cuda")

    def step():
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return mesh.size() * ids.numel() / slowest(seconds(step, repeats))


def training(mesh, layers, batch, length, repeats):
    import metalcore.integrations.transformers as integration

    times = {"torch": [], "metalcore": []}
    for _ in range(2):
        times["torch"].append(tokens_per_second(mesh, False, layers, batch, length, repeats))
        with integration.patch(), metalcore.enable_pytorch_overrides():
            times["metalcore"].append(tokens_per_second(mesh, True, layers, batch, length, repeats))
    best = {name: max(values) for name, values in times.items()}
    return {**best, "ratio": best["metalcore"] / best["torch"]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", action="store_true")
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=10)
    arguments = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cuda:nccl,cpu:gloo")
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    both = not (arguments.ops or arguments.train)
    report = {"gpu": torch.cuda.get_device_name(), "ranks": mesh.size(), "torch": torch.__version__}
    if both or arguments.ops:
        report["linear algebra"] = linear_algebra(mesh, arguments.repeats)
    if both or arguments.train:
        sizes = arguments.layers, arguments.batch, arguments.length, arguments.repeats
        report["training, tokens/s"] = training(mesh, *sizes)
    if dist.get_rank() == 0:
        print(json.dumps(report, indent=2))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
