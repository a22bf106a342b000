"""Models as captured programs: ResNet-50, and a token of Qwen2.5-1.5B, against eager PyTorch and Inductor.

Inductor has CUDA graphs. Eager PyTorch pays the host for each operator, which is part of its time. "all fusions" has
metalcore's products and convolutions too, which programs take by name alone. A token is the step after a prompt with a
static cache of keys and values, by transformers' model with random weights.
"""

import functools

import torch

import metalcore
import metalcore.programs

from ..harness.case import Comparison
from ..harness.compiled import AGAINST, inductor

# Blocks of each stage, width, pixels of a side, batches.
IMAGES = {
    "gpu": ((3, 4, 6, 3), 64, 224, (1, 32)),
    "simulator": ((3, 4, 6, 3), 8, 32, (1, 2)),
    "quick": ((1, 1, 1, 1), 8, 32, (1,)),
}
# Shape, places in the cache, the place of the token, dtype.
TOKENS = {
    "gpu": ("1.5B", 640, 512, torch.bfloat16),
    "simulator": ("tiny", 64, 32, torch.float32),
    "quick": ("tiny", 16, 8, torch.float32),
}
FUSIONS = {"": None, ", all fusions": [*(pattern.name for pattern in metalcore.programs.PATTERNS), "pointwise"]}


def cases(scale):
    sides = [(fusions, against) for fusions in FUSIONS for against in AGAINST[scale]]
    found = [
        images(scale, batch, dtype, *side)
        for batch in IMAGES[scale][-1]
        for dtype in (torch.float32, torch.float16)
        for side in sides
    ]
    return found + [token(scale, *side) for side in sides]


def images(scale, batch, dtype, fusions, against):
    blocks, width, side, _ = IMAGES[scale]
    # cuDNN has its fast kernels of 16 bits for channels_last.
    memory_format = torch.contiguous_format if dtype is torch.float32 else torch.channels_last

    def inputs(device):
        from examples.common.resnet import ResNet, perturb

        model = ResNet(blocks, width, 1000).eval().requires_grad_(False)
        perturb(model)
        x = torch.randn(batch, 3, side, side)
        return tuple(value.to(device, dtype, memory_format=memory_format) for value in (model, x))

    targets = {}
    if against == "eager" and batch == 1 and not fusions:
        targets = {"speedup": 2.0}
    elif against == "eager" and batch == 32 and dtype is torch.float16:
        targets = {"speedup": 0.5}
    return case(f"resnet50{fusions}", f"{batch}x3x{side}x{side}", dtype, fusions, against, inputs, targets)


def token(scale, fusions, against):
    shape, length, place, dtype = TOKENS[scale]

    def inputs(device):
        from transformers import Qwen2ForCausalLM

        from examples.common.qwen import Step, config

        with torch.device(device):
            model = Qwen2ForCausalLM(config(shape, length)).to(dtype).eval().requires_grad_(False)
            return Step(model, length), torch.zeros(1, 1, dtype=torch.int64), torch.tensor(place)

    targets = {"speedup": 3.0 if against == "eager" else 0.7}
    return case(f"token of qwen2.5-{shape}{fusions}", f"after {place}", dtype, fusions, against, inputs, targets)


def case(name, shape, dtype, fusions, against, inputs, targets):
    return Comparison(
        name=f"{name}, against {against}",
        shape=shape,
        dtype=dtype,
        inputs=inputs,
        bind=lambda make, *values: make(*values),
        ours=functools.partial(captured, FUSIONS[fusions]),
        theirs=functools.partial if against == "eager" else with_graphs,
        graph=False,
        targets=targets,
    )


def captured(fusions, model, *inputs):
    program = metalcore.compile(model, inputs, fusions=fusions)
    replay = program.capture(*inputs, segments=inputs[0].device.type == "mps")
    return functools.partial(replay, *replay.inputs)


def with_graphs(model, *inputs):
    compiled = inductor(model, mode="reduce-overhead")

    def call():
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(*inputs)

    for _ in range(3):  # compiled, run once more, and recorded
        call()
    return call
