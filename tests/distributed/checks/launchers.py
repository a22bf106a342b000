"""accelerate, transformers' Trainer and examples/distributed_svd.py in processes with the environment that torchrun
gives them."""

import contextlib
import os
import runpy
import sys
import tempfile
import warnings
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from checks.training import BATCH, accelerated, batch, llama

RATE = 0.1
SVD = Path(__file__).parents[3] / "examples" / "distributed_svd.py"


@contextlib.contextmanager
def _launched(**more):
    """As torchrun launches, with accelerate as it is when it has just been imported."""
    from accelerate.state import AcceleratorState, GradientState

    rank, count = str(dist.get_rank()), str(dist.get_world_size())
    given = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": count,
        "LOCAL_WORLD_SIZE": count,
        "MASTER_ADDR": "localhost",
    }
    with mock.patch.dict(os.environ, given | more):
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        try:
            yield
        finally:
            AcceleratorState._reset_state(True)
            GradientState._reset_state()


ON_MPS = {"ACCELERATE_TORCH_DEVICE": "mps"}


def warned():
    """(ranks, device, warnings) of accelerate's state as it is by itself, and with the CPU for what is exchanged."""
    from accelerate.state import PartialState

    found = []
    for cpu in (False, True):
        with _launched(**ON_MPS), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            state = PartialState(cpu=cpu)
            told = [each for each in caught if "would train by itself" in str(each.message)]
            found.append((state.num_processes, state.device.type, len(told)))
    return found


def _rows(steps):
    return torch.cat([batch(step) for step in range(steps)])


def _alone(steps):
    model, found = llama(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(steps):
        ids = batch(step).to("mps")
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found, model.lm_head.weight.detach().cpu()


def _compared(found, model, steps):
    """The largest difference of losses and of a weight from those of one rank."""
    losses, weight = _alone(steps)
    difference = (model.lm_head.weight.detach().cpu() - weight).abs().max().item()
    return max(abs(a - b) for a, b in zip(found, losses, strict=True)), difference


def by_accelerate(steps):
    from accelerate import Accelerator, PartialState

    with _launched(**ON_MPS), accelerated():
        PartialState(cpu=True)
        accelerator, model = Accelerator(), llama("cpu")
        loader = DataLoader(_rows(steps), batch_size=BATCH // dist.get_world_size())
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        wrapped, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        found = []
        for ids in loader:
            assert ids.device.type == "mps"
            loss = wrapped(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            found.append(accelerator.gather(loss.detach()[None]).mean().item())
        accelerator.wait_for_everyone()
        return _compared(found, accelerator.unwrap_model(wrapped), steps)


def by_trainer(steps):
    from transformers import Trainer, TrainingArguments

    with _launched(**ON_MPS), accelerated(), tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            use_cpu=True,
            per_device_train_batch_size=BATCH // dist.get_world_size(),
            max_steps=steps,
            learning_rate=RATE,
            lr_scheduler_type="constant",
            optim="sgd",
            max_grad_norm=0.0,
            train_sampling_strategy="sequential",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        rows = [{"input_ids": row, "labels": row} for row in _rows(steps)]
        trainer = Trainer(llama("cpu"), arguments, train_dataset=rows)
        trainer.train()
        found = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return _compared(found, trainer.accelerator.unwrap_model(trainer.model), steps)


def svd(folder, *, fail_at=None):
    sys.argv = [str(SVD), "--data", folder, "--matrices", "52", "--shard", "8", "--size", "9", "6"]
    sys.argv += [] if fail_at is None else ["--fail-at", str(fail_at)]
    runpy.run_path(str(SVD), run_name="__main__")
