"""What programs are compared with: PyTorch's operators one by one, and Inductor where there is a GPU."""

from __future__ import annotations

import torch

AGAINST = {"gpu": ("eager", "Inductor"), "simulator": ("eager",), "quick": ("eager",)}


def inductor(function, **options):
    """torch.compile's own compiler, for one set of shapes. It forgets what it compiled for other cases."""
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, dynamic=False, **options)


def made_once(make):
    """The function that make(*inputs) returns. It is made by the first call, for all inputs that take turns."""
    made = []

    def call(*inputs):
        if not made:
            made.append(make(*inputs))
        return made[0](*inputs)

    return call
