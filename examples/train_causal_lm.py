"""A small Llama learns a text byte by byte with HuggingFace's Trainer, with PyTorch's kernels and with metalcore's.

python examples/train_causal_lm.py                          # on mps or cuda, or simulated where there is neither
python -m metalcore.simulator examples/train_causal_lm.py   # on the simulated mps device
python examples/train_causal_lm.py --hidden 512 --layers 8 --length 512 --steps 100
"""

import argparse
import tempfile

import torch
from common.measure import compare, rows_of_text
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--hidden", type=int, default=64)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--length", type=int, default=64)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--steps", type=int, default=5)
arguments = parser.parse_args()


class Steps(TrainerCallback):
    def __init__(self, meter):
        self.meter = meter

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.meter.step(arguments.batch * arguments.length, logs["loss"])


def train(meter):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=arguments.hidden,
        intermediate_size=arguments.hidden * 8 // 3,
        num_hidden_layers=arguments.layers,
        num_attention_heads=max(2, arguments.hidden // 64),
        max_position_embeddings=arguments.length,
    )
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            output_dir=folder,
            max_steps=arguments.steps,
            per_device_train_batch_size=arguments.batch,
            learning_rate=1e-3,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = Trainer(
            model=LlamaForCausalLM(config),
            args=options,
            train_dataset=rows_of_text(arguments.length),
            callbacks=[Steps(meter)],
        )
        trainer.pop_callback("PrinterCallback")
        trainer.train()


compare(train, "tokens")
