"""A small Llama with all of metalcore's patches and overrides, trained by several ranks and by one."""

import contextlib

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import metalcore
import metalcore.integrations.transformers as integration

SIZES = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    pad_token_id=0,
)
BATCH, LENGTH = 4, 16


def llama(device="mps"):
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).to(device).train()


@contextlib.contextmanager
def accelerated():
    with integration.patch(), metalcore.enable_pytorch_overrides():
        yield


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(3, SIZES["vocab_size"], (BATCH, LENGTH), generator=generator, device="cpu")


def ddp(model, mesh, **options):
    return torch.nn.parallel.DistributedDataParallel(model, **options)


def fsdp(model, mesh, **options):
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def tensor_parallel(model, mesh):
    plan = {}
    for layer in range(SIZES["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            plan[at + name] = ColwiseParallel()
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            plan[at + name] = RowwiseParallel()
    return parallelize_module(model, mesh, plan)


def sequence_parallel(model, mesh):
    """The embedding by rows, the stream between the layers by tokens, and the logits by classes."""
    hidden = PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": Shard(1)}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
    )
    plan = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    for layer in range(SIZES["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        plan[at + "input_layernorm"] = plan[at + "post_attention_layernorm"] = SequenceParallel()
        plan[at + "self_attn"] = hidden
        plan[at + "mlp"] = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            plan[at + name] = ColwiseParallel()
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            plan[at + name] = RowwiseParallel(output_layouts=Shard(1))
    return parallelize_module(model, mesh, plan)


def wrapped(kind, world):
    """The model, and which part of each batch this rank has: its number and how many there are."""
    rank = dist.get_rank()
    if kind == "tp x fsdp":
        mesh = init_device_mesh("mps", (2, world // 2), mesh_dim_names=("dp", "tp"))
        return fsdp(tensor_parallel(llama(), mesh["tp"]), mesh["dp"]), mesh["dp"].get_local_rank(), 2
    mesh = init_device_mesh("mps", (world,))
    if kind == "tp":
        return tensor_parallel(llama(), mesh), 0, 1
    if kind == "sequence":
        return sequence_parallel(llama(), mesh), 0, 1
    if kind == "offload":
        model = fsdp(llama("cpu"), mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    elif kind == "mixed":
        model = fsdp(llama(), mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    else:
        model = {"ddp": ddp, "fsdp": fsdp}[kind](llama(), mesh)
    return model, rank, world


def losses(model, optimizer, steps, part=0, parts=1, sequence=False, accumulate=1, checkpointing=False, first=0):
    if checkpointing:
        getattr(model, "module", model).gradient_checkpointing_enable({"use_reentrant": False})
    positions = torch.arange(LENGTH, device="mps")[None]
    found = []
    for step in range(first, first + steps):
        rows = batch(step).chunk(parts)[part].to("mps")
        total = 0.0
        for ids in rows.chunk(accumulate):
            if sequence:  # the embedding's length is a shard's
                logits = model(input_ids=ids, position_ids=positions).logits[:, :-1]
                loss = metalcore.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).full_tensor()
            else:
                loss = model(input_ids=ids, labels=ids).loss
            (loss / accumulate).backward()
            total += loss.detach() / accumulate
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if parts > 1:
            dist.all_reduce(total)
            total /= dist.get_world_size()
        found.append(float(total))
    return found


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-1, momentum=0.9),
    "lion": lambda p: metalcore.optim.Lion(p, lr=1e-3),
    "soap": lambda p: metalcore.optim.SOAP(p, lr=1e-2, precondition_frequency=2, max_precond_dim=16),
}


def train(kind, steps, optimizer="adamw", **options):
    """The losses of several ranks, and those of one that has all rows."""
    with accelerated():
        model, part, parts = wrapped(kind, dist.get_world_size())
        made = OPTIMIZERS[optimizer](model.parameters())
        found = losses(model, made, steps, part, parts, kind == "sequence", **options)
        model = llama()
        alone = losses(model, OPTIMIZERS[optimizer](model.parameters()), steps, **options)
    return found, alone


def checkpoint(folder, first, steps, save):
    """Loads what an earlier group has saved, if it has, trains, and saves. Returns the losses."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    with accelerated():
        model, part, parts = wrapped("fsdp", dist.get_world_size())
        optimizer = metalcore.optim.AdamW(model.parameters(), lr=1e-2)
        if not save[0]:
            state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
            dcp.load(state, checkpoint_id=folder)
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        found = losses(model, optimizer, steps, part, parts, first=first)
        if save[1]:
            state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
            dcp.save(state, checkpoint_id=folder)
    return found


def alone(steps):
    """The losses of one rank that trains without interruption."""
    with accelerated():
        model = llama()
        return losses(model, metalcore.optim.AdamW(model.parameters(), lr=1e-2), steps)


__all__ = ["alone", "checkpoint", "distribute_tensor", "train"]
