"""Every op once, forward and backward: for tests about where and how ops run, not about their numbers.

    for case in CASES.values():
        made = case.make("cuda")
        results = made.run()         # outputs and gradients
        made.refill(seed=1)          # other numbers in the same tensors
"""

from dataclasses import dataclass
from typing import Callable

import torch

import metalcore


@dataclass(frozen=True)
class Case:
    call: Callable                      # tensors -> a tensor or a tuple of tensors
    shapes: tuple
    backward: bool = True

    def make(self, device, dtype=torch.float32, seed=0):
        return Made(self, device, dtype, seed)


class Made:
    """A case with its tensors."""

    def __init__(self, case, device, dtype, seed):
        self.case = case
        self.leaves = [torch.empty(shape, device=device, dtype=dtype, requires_grad=case.backward)
                       for shape in case.shapes]
        self.refill(seed)
        self.directions = [_random(output.shape, index).to(output) for index, output in enumerate(self.forward())]

    def refill(self, seed):
        with torch.no_grad():
            for leaf, value in zip(self.leaves, self.values(seed)):
                leaf.copy_(value)

    def values(self, seed):
        """What refill(seed) puts into the leaves, on their device."""
        return [_random(leaf.shape, 100 * seed + i).to(leaf.detach()) for i, leaf in enumerate(self.leaves)]

    def forward(self):
        found = self.case.call(*self.leaves)
        return [found] if isinstance(found, torch.Tensor) else list(found)

    def run(self):
        """The outputs and, of random linear functions of them, the gradients."""
        outputs = self.forward()
        if not self.case.backward:
            return outputs
        gradients = torch.autograd.grad(outputs, self.leaves, self.directions)
        return [*(output.detach() for output in outputs), *gradients]


def _random(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _adamw(*params):
    """A step from zero moments, with the parameters themselves as gradients; gives the new parameters."""
    new = [param.clone() for param in params]
    moments = [[torch.zeros_like(param, dtype=torch.float32) for param in params] for _ in range(3)]
    steps = [torch.zeros((), device=param.device) for param in params]
    torch.ops.metalcore.adamw_(new, list(params), *moments, steps, lr=1e-2, beta1=0.9, beta2=0.999, weight_decay=0.1,
                               eps=1e-8, maximize=False)
    return tuple(new + steps)


ROWS = (300, 1000)

CASES = {
    "silu": Case(metalcore.silu, (ROWS,)),
    "gelu": Case(metalcore.gelu, (ROWS,)),
    "gelu tanh": Case(lambda x: metalcore.gelu(x, "tanh"), (ROWS,)),
    "gelu, strided": Case(lambda x: metalcore.gelu(x.mT[::2]), (ROWS,)),
    "softmax": Case(lambda x: metalcore.softmax(x, -1), (ROWS,)),
    "softmax of columns": Case(lambda x: metalcore.softmax(x, 1), ((40, 20, 300),)),
    "log_softmax": Case(lambda x: metalcore.log_softmax(x, -1), (ROWS,)),
    "rms_norm": Case(lambda x, w: metalcore.rms_norm(x, (1000,), w), (ROWS, (1000,))),
    "rms_norm, short rows": Case(lambda x, w: metalcore.rms_norm(x, (24,), w), ((5000, 24), (24,))),
    "rms_norm, long rows": Case(lambda x, w: metalcore.rms_norm(x, (20000,), w), ((20, 20000), (20000,))),
    "add_rms_norm": Case(lambda x, r, w: metalcore.add_rms_norm(x, r, w), (ROWS, ROWS, (1000,))),
    "qr, small": Case(lambda a: metalcore.qr(a), ((200, 16, 12),)),
    "qr, of a threadgroup": Case(lambda a: metalcore.qr(a), ((20, 100, 40),)),
    "qr, tall": Case(lambda a: metalcore.qr(a), ((3, 2500, 20),)),
    "qr, blocked": Case(lambda a: metalcore.qr(a), ((2, 300, 200),)),
    "svdvals": Case(metalcore.svdvals, ((200, 16, 12),)),
    "svd, small": Case(lambda a: metalcore.svd(a, False).S, ((200, 16, 12),)),
    "svd, of a threadgroup": Case(lambda a: metalcore.svd(a, False).S, ((5, 40, 36),)),
    "svd, after QR": Case(lambda a: metalcore.svd(a, False).S, ((20, 100, 10),)),
    "eigh, small": Case(lambda a: metalcore.eigh(a).eigenvalues, ((200, 12, 12),)),
    "eigh, of a threadgroup": Case(lambda a: metalcore.eigh(a).eigenvalues, ((5, 40, 40),)),
    "eigvalsh": Case(metalcore.eigvalsh, ((200, 12, 12),)),
    "pinv": Case(metalcore.pinv, ((200, 16, 12),)),
    "adamw": Case(_adamw, ((300, 257), (5,), (70, 3)), backward=False),
}
