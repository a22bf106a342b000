"""A Llama with random weights, trained with FSDP2, metalcore's kernels and its optimizer.

    torchrun --nproc-per-node 2 examples/train_fsdp.py                                  # NVIDIA GPUs, through NCCL
    METALCORE_SIMULATOR=1 torchrun --nproc-per-node 2 examples/train_fsdp.py            # simulated devices
    torchrun --nproc-per-node 8 examples/train_fsdp.py --hidden 2048 --layers 16 --vocabulary 128256 --length 4096

--checkpoint saves the state at the end by torch.distributed.checkpoint, and goes on from there if it is there already,
also with another number of ranks.
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import metalcore
import metalcore.integrations.transformers as integration

if "RANK" not in os.environ:  # without torchrun: one rank
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
if not torch.cuda.is_available() and not torch.backends.mps.is_available():
    import metalcore.simulator

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--hidden", type=int, default=64)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--vocabulary", type=int, default=256)
parser.add_argument("--length", type=int, default=64)
parser.add_argument("--batch", type=int, default=2, help="rows of a rank")
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--bfloat16", action="store_true", help="products and exchange in bfloat16")
parser.add_argument("--torch", action="store_true", help="PyTorch's own ops, to compare with")
parser.add_argument("--checkpoint", type=Path)
arguments = parser.parse_args()
DEVICE = "cuda" if torch.cuda.is_available() else "mps"


def main():
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cuda:nccl,cpu:gloo" if DEVICE == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if not arguments.torch:
        integration.patch()
        metalcore.enable_pytorch_overrides()
    torch.manual_seed(0)
    heads = max(2, arguments.hidden // 64)
    config = LlamaConfig(
        vocab_size=arguments.vocabulary,
        hidden_size=arguments.hidden,
        intermediate_size=arguments.hidden * 4,
        num_hidden_layers=arguments.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4),
        max_position_embeddings=arguments.length,
    )
    model = LlamaForCausalLM(config).to(DEVICE).train()
    policy = MixedPrecisionPolicy(torch.bfloat16 if arguments.bfloat16 else None, torch.float32)
    mesh = init_device_mesh(DEVICE, (world,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    kind = torch.optim.AdamW if arguments.torch else metalcore.optim.AdamW
    optimizer = kind(model.parameters(), lr=1e-3)
    if arguments.checkpoint and arguments.checkpoint.exists():
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
        dcp.load(state, checkpoint_id=str(arguments.checkpoint))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    generator = torch.Generator().manual_seed(rank)
    shape = (arguments.batch, arguments.length)
    for step in range(arguments.steps):
        start = time.perf_counter()
        ids = torch.randint(arguments.vocabulary, shape, generator=generator).to(DEVICE)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total)
        mean = total.item() / world  # the host waits
        seconds = time.perf_counter() - start
        if rank == 0:
            speed = world * ids.numel() / seconds
            print(f"step {step}: loss {mean:.4f}, {speed:.0f} tokens/s", flush=True)
    if arguments.checkpoint:
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
        dcp.save(state, checkpoint_id=str(arguments.checkpoint))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
