"""A small vision transformer learns which quarter of an image is bright, with PyTorch's kernels and with metalcore's.

python examples/train_vit.py                          # on mps or cuda, or simulated where there is neither
python -m metalcore.simulator examples/train_vit.py   # on the simulated mps device
python examples/train_vit.py --hidden 384 --layers 12 --batch 64 --steps 100
"""

import argparse

import torch
from common.measure import DEVICE, compare
from transformers import ViTConfig, ViTForImageClassification

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--hidden", type=int, default=64)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--steps", type=int, default=5)
arguments = parser.parse_args()
SIDE = 32


def batch():
    labels = torch.randint(0, 4, (arguments.batch,))
    images = torch.randn(arguments.batch, 3, SIDE, SIDE) / 4
    for image, label in zip(images, labels.tolist()):
        row, column = (SIDE // 2 * place for place in divmod(label, 2))
        image[:, row : row + SIDE // 2, column : column + SIDE // 2] += 1
    return images.to(DEVICE), labels.to(DEVICE)


def train(meter):
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=SIDE,
        patch_size=4,
        num_labels=4,
        hidden_size=arguments.hidden,
        intermediate_size=4 * arguments.hidden,
        num_hidden_layers=arguments.layers,
        num_attention_heads=max(2, arguments.hidden // 64),
    )
    model = ViTForImageClassification(config).to(DEVICE).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(arguments.steps):
        images, labels = batch()
        loss = model(images, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        meter.step(len(images), loss)


compare(train, "images")
