"""Steps of SGD, Lion, Muon and SOAP, and clipping of gradients, against torch.optim and torch.nn.utils.

Lion is compared with torch.optim.AdamW's fused step, as PyTorch has none. SOAP is compared with itself, where it goes
through the parameters one by one and calls torch.linalg.qr for each block: a step that renews all bases, and one that
renews none.
"""

import functools

import torch

import metalcore
from metalcore.optim.soap import _Reference

from ...harness.case import Comparison, family, size_text

# (number of parameters, shape)
LISTS = {
    "gpu": [(8, (4096, 4096)), (1000, (64, 64))],
    "simulator": [(1000, (4, 4)), (64, (64, 64)), (8, (512, 512)), (4, (1024, 1024))],
    "quick": [(3, (8, 8))],
}


# What metalcore keeps of 16-bit parameters, by the name of the case.
STATES = {
    "": {},
    "state as torch's, ": {"state_dtype": None},
    "stochastic rounding, ": {"state_dtype": None, "stochastic_rounding": 1},
}


@family
def adamw(scale):
    """Times a step of optim.AdamW on many parameters, against torch.optim.AdamW's fused and foreach steps.

    metalcore keeps the moments of 16-bit parameters in float32 unless state_dtype says otherwise, and torch keeps them
    in 16 bits. The bytes, and with them the limit, are those of metalcore's step.
    """
    comparisons = []
    for count, shape in LISTS[scale]:
        for dtype in (torch.float32, torch.bfloat16):
            comparisons += [adamw_case(count, shape, dtype, against) for against in ("fused", "foreach")]
            if scale == "gpu":
                comparisons.append(adamw_case(count, shape, dtype, "fused", captured=True))
        comparisons += [adamw_case(count, shape, torch.bfloat16, "fused", states) for states in STATES if states]
        comparisons += [adamw_8bit_case(count, shape, dtype) for dtype in (torch.float32, torch.bfloat16)]
    return comparisons


def adamw_case(count, shape, dtype, against, states="", captured=False):
    """Returns the case of a step as a training loop calls it, with the host's work. A captured one has the GPU's work
    alone."""
    elements = count * torch.Size(shape).numel()
    options = {"capturable": True} if captured else {}
    state_bytes = dtype.itemsize if states else 4
    # Both do the same work where the states have one dtype: PyTorch keeps the moments of 16-bit parameters in 16 bits.
    same = against == "fused" and dtype.itemsize == state_bytes and "stochastic" not in states
    return Comparison(
        name=f"adamw, {states}{'captured, ' * captured}against {against}",
        shape=f"{count} of {size_text(shape)}",
        dtype=dtype,
        inputs=functools.partial(parameters, count, shape, dtype),
        bind=bind,
        ours=functools.partial(metalcore.optim.AdamW, **STATES[states], **options),
        theirs=functools.partial(torch.optim.AdamW, **{against: True}, **options),
        # A step reads the parameter, the gradient and two moments, and writes all of them except the gradient.
        bytes=elements * (3 * dtype.itemsize + 4 * state_bytes),
        graph=captured,
        targets={"speedup": 1.0} if same else {},
    )


def adamw_8bit_case(count, shape, dtype):
    """Returns the case of a step with moments of 8 bits, against PyTorch's with moments of the parameters' dtype."""
    elements = count * torch.Size(shape).numel()
    return Comparison(
        name="adamw, states of 8 bits, against fused",
        shape=f"{count} of {size_text(shape)}",
        dtype=dtype,
        inputs=functools.partial(parameters, count, shape, dtype),
        bind=bind,
        ours=functools.partial(metalcore.optim.AdamW8bit, min_8bit_size=0),
        theirs=functools.partial(torch.optim.AdamW, fused=True),
        bytes=elements * (3 * dtype.itemsize + 4),
        graph=False,
    )


def parameters(count, shape, dtype, device):
    parameters = tuple(torch.nn.Parameter(torch.randn(shape, device=device).to(dtype)) for _ in range(count))
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return parameters


def bind(optimizer, *parameters):
    return optimizer(parameters).step


WIDTH, LAYERS = 768, 12
GPT2 = [(50257, WIDTH), (1024, WIDTH)]
GPT2 += LAYERS * [(WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)]
MODELS = {
    "gpu": {"GPT-2 small": GPT2},
    "simulator": {"2 layers of 32": [(32, 96), (32, 32), (32, 128), (128, 32)] * 2},
    "quick": {"3 of 8x8": [(8, 8)] * 3},
}


# The longest sides of SOAP's blocks; 1024 is its default.
BLOCKS = {"gpu": (1024, 256), "simulator": (1024,), "quick": (1024,)}


@family
def optim(scale):
    comparisons = []
    for count, shape in LISTS[scale]:
        for dtype in (torch.float32, torch.bfloat16):
            comparisons += [step(count, shape, dtype, *optimizer) for optimizer in OPTIMIZERS]
            comparisons += [clip(count, shape, dtype, name, limit) for name, limit in CLIPS]
    for name, shapes in MODELS[scale].items():
        comparisons.append(muon(name, shapes))
        comparisons += [soap(name, shapes, every, longest) for every in (True, False) for longest in BLOCKS[scale]]
    return comparisons


# name, ours, theirs, elements that a step reads and writes
OPTIMIZERS = (
    (
        "sgd, momentum",
        functools.partial(metalcore.optim.SGD, lr=1e-3, momentum=0.9),
        functools.partial(torch.optim.SGD, lr=1e-3, momentum=0.9, fused=True),
        5,
    ),
    (
        "lion, against AdamW",
        functools.partial(metalcore.optim.Lion, state_dtype=None),
        functools.partial(torch.optim.AdamW, fused=True),
        5,
    ),
)


def step(count, shape, dtype, name, ours, theirs, moves):
    return Comparison(
        name=name,
        shape=f"{count} of {size_text(shape)}",
        dtype=dtype,
        inputs=functools.partial(parameters, count, shape, dtype),
        bind=bind,
        ours=ours,
        theirs=theirs,
        bytes=moves * count * torch.Size(shape).numel() * dtype.itemsize,
        graph=False,
        targets={"speedup": 1.0} if name.startswith("sgd") else {},
    )


# A limit that is met scales nothing; with the other one, each step scales the gradients by almost one.
CLIPS = (("norm, below the limit", 1e30), ("norm, clipped", 0.0), ("value", 1.0))


def clip(count, shape, dtype, name, limit):
    function = "clip_grad_value_" if name == "value" else "clip_grad_norm_"
    moves = {"norm, below the limit": 1, "norm, clipped": 3, "value": 2}[name]
    return Comparison(
        name=f"clip by {name}",
        shape=f"{count} of {size_text(shape)}",
        dtype=dtype,
        inputs=functools.partial(parameters, count, shape, dtype),
        bind=lambda clip, *parameters: lambda: clip(parameters, limit),
        ours=getattr(metalcore.optim, function),
        theirs=getattr(torch.nn.utils, function),
        bytes=moves * count * torch.Size(shape).numel() * dtype.itemsize,
        graph=False,
        targets={"speedup": 1.0},
    )


def model(shapes, dtype, device):
    parameters = tuple(torch.nn.Parameter(torch.randn(shape, device=device).to(dtype)) for shape in shapes)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return parameters


def muon(name, shapes):
    return Comparison(
        name="muon",
        shape=name,
        dtype=torch.float32,
        inputs=functools.partial(model, [shape for shape in shapes if max(shape) < 10000], torch.float32),
        bind=bind,
        ours=metalcore.optim.Muon,
        theirs=torch.optim.Muon,
        graph=False,
        targets={"speedup": 1.0},
    )


def soap(name, shapes, every, longest):
    return Comparison(
        name=f"soap, blocks to {longest}, {'renewing' if every else 'keeping'} bases, against a loop of torch.linalg",
        shape=name,
        dtype=torch.float32,
        inputs=functools.partial(model, shapes, torch.float32),
        bind=functools.partial(bind_soap, every, longest),
        ours=metalcore.optim.SOAP,
        theirs=_Reference,
        graph=False,
        targets={"speedup": 5.0} if every else {},
    )


def bind_soap(every, longest, optimizer, *parameters):
    made = optimizer(parameters, precondition_frequency=1 if every else 10**9, max_precond_dim=longest)
    # The first step's eigendecompositions are not measured, and any orthogonal bases will do.
    made._eigh = lambda batch: (None, torch.linalg.qr(torch.randn_like(batch[0]))[0].expand_as(batch))
    made.step()
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return made.step
