"""A step of optim.AdamW on many parameters, against torch.optim.AdamW's fused and foreach steps.

metalcore keeps the moments of 16-bit parameters in float32 unless state_dtype says otherwise, and torch keeps them in
16 bits. The bytes, and with them the limit, are those of metalcore's step.
"""

import functools

import torch

import metalcore

from ...harness.case import Comparison, size_text

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


def cases(scale):
    found = []
    for count, shape in LISTS[scale]:
        for dtype in (torch.float32, torch.bfloat16):
            found += [case(count, shape, dtype, against) for against in ("fused", "foreach")]
            if scale == "gpu":
                found.append(case(count, shape, dtype, "fused", captured=True))
        found += [case(count, shape, torch.bfloat16, "fused", states) for states in STATES if states]
    return found


def case(count, shape, dtype, against, states="", captured=False):
    """A step as a training loop calls it, with the host's work. A captured one has the GPU's work alone."""
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


def parameters(count, shape, dtype, device):
    found = tuple(torch.nn.Parameter(torch.randn(shape, device=device).to(dtype)) for _ in range(count))
    for parameter in found:
        parameter.grad = torch.randn_like(parameter)
    return found


def bind(optimizer, *parameters):
    return optimizer(parameters).step
