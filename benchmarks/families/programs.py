"""Models as captured programs: ResNet-50, and a token of Qwen2.5-1.5B, against eager PyTorch and Inductor.

Inductor has CUDA graphs. Eager PyTorch pays the host for each operator, which is part of its time. "all fusions" has
metalcore's products and convolutions too, which programs take by name alone. A token is the step after a prompt with a
static cache of keys and values, by transformers' model with random weights.
"""

import functools

import torch
import torch.nn.functional as F

import metalcore
import metalcore.programs

from ..harness.case import Comparison, family, size_text

# Programs are compared with PyTorch's operators one by one, and with Inductor where there is a GPU.
AGAINST = {"gpu": ("eager", "Inductor"), "simulator": ("eager",), "quick": ("eager",)}


def inductor(function, **options):
    """Returns torch.compile's own compiler, for one set of shapes. It forgets what it compiled for other cases."""
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, dynamic=False, **options)


def made_once(make):
    """Returns the function that make(*inputs) returns. It is made by the first call, for all inputs that take turns."""
    calls = []

    def call(*inputs):
        if not calls:
            calls.append(make(*inputs))
        return calls[0](*inputs)

    return call


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


@family
def programs(scale):
    sides = [(fusions, against) for fusions in FUSIONS for against in AGAINST[scale]]
    comparisons = [
        images(scale, batch, dtype, *side)
        for batch in IMAGES[scale][-1]
        for dtype in (torch.float32, torch.float16)
        for side in sides
    ]
    return comparisons + [token(scale, *side) for side in sides]


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


# Function; its tensors (x has all elements, r one for each column); how many results it has.
CHAINS = {
    "gelu(x*a + b)*1.5 + r": (lambda x, a, b, r: F.gelu(x * a + b) * 1.5 + r, "xrrr", 1),
    "silu(x)*y + z": (lambda x, y, z: F.silu(x) * y + z, "xxx", 1),
    "clamp(tanh(x*a + b))*sigmoid(y)": (
        lambda x, a, b, y: torch.tanh(x * a + b).clamp(-0.9, 0.9) * torch.sigmoid(y),
        "xrrx",
        1,
    ),
    "relu(x*a + y)": (lambda x, a, y: F.relu(x * a + y), "xrx", 1),
    "x*y + 1 and exp(-x*x)": (lambda x, y: (x * y + 1, torch.exp(-(x * x))), "xx", 2),
    "x.t()*a + y": (lambda x, a, y: x.t() * a + y, "xrx", 1),
}
CHAIN_SHAPES = {"gpu": [(4096, 4096), (65536, 1024)], "simulator": [(64, 64), (256, 256)], "quick": [(8, 8)]}


class Chain(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *tensors):
        return self.function(*tensors)


@family
def pointwise(scale):
    """Chains of pointwise operations as one generated kernel, against PyTorch's operators one by one and Inductor."""
    return [
        chain_case(name, shape, dtype, against)
        for name in CHAINS
        for shape in CHAIN_SHAPES[scale]
        for dtype in (torch.float32, torch.bfloat16)
        for against in AGAINST[scale]
        if ".t()" not in name or shape[0] == shape[1]
    ]


def chain_case(name, shape, dtype, against):
    function, kinds, results = CHAINS[name]
    elements = (kinds.count("x") + results) * torch.Size(shape).numel() + kinds.count("r") * shape[1]
    return Comparison(
        name=f"{name}, against {against}",
        shape=size_text(shape),
        dtype=dtype,
        inputs=lambda device: tuple(
            torch.randn(shape if kind == "x" else shape[1], device=device).to(dtype) for kind in kinds
        ),
        ours=made_once(lambda *tensors: metalcore.compile(Chain(function), tensors)),
        theirs=function if against == "eager" else made_once(lambda *tensors: inductor(function)),
        bytes=elements * dtype.itemsize,
        targets={"share": 0.9} if against == "eager" else {},
    )


# Shape, rows, tokens of a row, dtype.
BATCHES = {
    "gpu": [("0.5B", 1, 128, torch.bfloat16), ("0.5B", 4, 1024, torch.bfloat16)],
    "simulator": [("tiny", 2, 16, torch.float32)],
    "quick": [("tiny", 1, 8, torch.float32)],
}


@family
def train_step(scale):
    """Times training steps of models of Qwen2's shapes: compile_train_step(), against eager PyTorch and Inductor.

    A step is forward, backward, clipping and AdamW: PyTorch's fused one on its side. metalcore's side is one replay, of
    a model with metalcore's norms, gates, rotations and loss.
    """
    return [step_case(*batch, against) for batch in BATCHES[scale] for against in AGAINST[scale]]


def step_case(shape, rows, length, dtype, against):
    def inputs(device):
        from transformers import Qwen2ForCausalLM

        from examples.common.qwen import config

        with torch.device(device):
            model = Qwen2ForCausalLM(config(shape, length)).to(dtype).train()
            return model, torch.randint(model.config.vocab_size, (rows, length))

    return Comparison(
        name=f"train step of qwen2.5-{shape}, against {against}",
        shape=f"{rows}x{length}",
        dtype=dtype,
        inputs=inputs,
        bind=lambda make, *values: make(*values),
        ours=replayed,
        theirs=functools.partial(ordinary, inductor if against == "Inductor" else lambda function: function),
        graph=False,
    )


def loss_of(model):
    # Without masks of its own, the model would look on the host whether rows are packed, which no replay can do.
    masks = {"full_attention": None}
    return lambda tokens: model(tokens, labels=tokens, attention_mask=masks, use_cache=False).loss


def replayed(model, tokens):
    from metalcore.integrations import transformers as metalcore_transformers

    optimizer = metalcore.optim.AdamW(model.parameters(), lr=1e-4)
    with metalcore_transformers.patch():
        step = metalcore.compile_train_step(loss_of(model), lambda loss: loss, optimizer, tokens, max_norm=1.0)
        for _ in range(3):  # one of the first steps is recorded
            step(tokens)
    return functools.partial(step, tokens)


def ordinary(compiler, model, tokens):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    forward = compiler(loss_of(model))

    def step():
        loss = forward(tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
