"""A residual network classifies images as a program, and PyTorch on the CPU classifies them, too.

python examples/resnet50.py                          # on mps or cuda, or simulated where there is neither
python -m metalcore.simulator examples/resnet50.py   # on the simulated mps device
python examples/resnet50.py --full --batch 32 --dtype float16
python examples/resnet50.py --full --weights resnet50.pth   # torchvision's file, whose names the modules have
"""

import argparse
import copy

import torch
from common.device import DEVICE, milliseconds
from common.resnet import ResNet, perturb

import metalcore

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--full", action="store_true", help="ResNet-50: 4 stages of 3, 4, 6 and 3 blocks, 224 x 224 pixels")
parser.add_argument("--batch", type=int, default=1)
parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], default="float32")
parser.add_argument("--weights", help="a file of torchvision's weights; they are random without")
parser.add_argument("--repeats", type=int, default=3, help="how many runs are timed")
arguments = parser.parse_args()
BLOCKS, WIDTH, SIDE, CLASSES = ((3, 4, 6, 3), 64, 224, 1000) if arguments.full else ((1, 1, 1, 1), 8, 32, 100)


def images(count):
    """Disks of several colors and sizes in front of stripes, and some noise."""
    y, x = torch.meshgrid(torch.linspace(-1, 1, SIDE), torch.linspace(-1, 1, SIDE), indexing="ij")
    for index in range(count):
        color, (row, column) = torch.randn(3, 1, 1), torch.rand(2) - 0.5
        disk = ((x - column) ** 2 + (y - row) ** 2 < 0.1 + 0.05 * (index % 5)).float()
        yield color * disk + (1 - disk) * torch.sin(12 * x + index) + 0.1 * torch.randn(3, SIDE, SIDE)


torch.manual_seed(0)
model = ResNet(BLOCKS, WIDTH, CLASSES).eval()
if arguments.weights:
    model.load_state_dict(torch.load(arguments.weights, weights_only=True))
else:
    perturb(model)
batch, dtype = torch.stack(list(images(arguments.batch))), getattr(torch, arguments.dtype)

with torch.no_grad():
    expected = model(batch)
    on_device, x = copy.deepcopy(model).to(DEVICE, dtype), batch.to(DEVICE, dtype)
    program = metalcore.compile(on_device, (x,))
    logits = program(x).float().cpu()
    eager_time = milliseconds(lambda: on_device(x), arguments.repeats)
program_time = milliseconds(lambda: program(x), arguments.repeats)

print(program.report())
print(f"\n{'class':>8} {'program':>9} {'PyTorch, CPU':>14}   (the first image's five)")
for number in logits[0].topk(5).indices.tolist():
    print(f"{number:8} {logits[0, number]:9.4f} {expected[0, number]:14.4f}")
correlation = torch.corrcoef(torch.stack([expected.flatten(), logits.flatten()]))[0, 1].item()
print(f"\nPearson's r: {correlation:.8f}")
print(f"{arguments.dtype}, batch of {arguments.batch}, on {DEVICE}: {program_time:.1f} ms as a program, ", end="")
print(f"{eager_time:.1f} ms with PyTorch's operators one by one")
if dtype is torch.float32:
    assert correlation > 0.9999 and torch.equal(expected.topk(5).indices, logits.topk(5).indices)
else:
    assert correlation > 0.99
