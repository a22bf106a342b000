"""Every op once, forward and backward: for tests about where and how ops run, not about their numbers.

for case in CASES.values():
    made = case.make("cuda")
    results = made.run()         # outputs and gradients
    made.refill(seed=1)          # other numbers in the same tensors
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

import metalcore


@dataclass(frozen=True)
class Case:
    call: Callable  # tensors -> a tensor or a tuple of tensors
    shapes: tuple
    backward: bool = True

    def make(self, device, dtype=torch.float32, seed=0):
        return Made(self, device, dtype, seed)


class Made:
    """A case with its tensors."""

    def __init__(self, case, device, dtype, seed):
        self.case = case
        self.leaves = [
            torch.empty(shape, device=device, dtype=dtype, requires_grad=case.backward) for shape in case.shapes
        ]
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


def _dominant(a):
    """Matrices whose LU factorization and inverses hardly amplify errors."""
    return a + 2 * a.shape[-1] ** 0.5 * torch.eye(a.shape[-1], device=a.device, dtype=a.dtype)


def _lu_solve(a, b):
    LU, pivots, _ = metalcore.lu_factor_ex(_dominant(a))  # for lu_factor the host waits
    return metalcore.lu_solve(LU, pivots, b)


def _triangular(a, b):
    n = a.shape[-1]
    return metalcore.solve_triangular(a / n**0.5 / 2 + torch.eye(n, device=a.device, dtype=a.dtype), b, upper=False)


def _lstsq(a, b):
    return metalcore.lstsq(a, b)[:2]


def _adamw(*params):
    """A step from zero moments, with the parameters themselves as gradients; gives the new parameters."""
    new = [param.clone() for param in params]
    moments = [[torch.zeros_like(param, dtype=torch.float32) for param in params] for _ in range(3)]
    steps = [torch.zeros((), device=param.device) for param in params]
    torch.ops.metalcore.adamw_(
        new, list(params), *moments, steps, lr=1e-2, beta1=0.9, beta2=0.999, weight_decay=0.1, eps=1e-8, maximize=False
    )
    return tuple(new + steps)


def _cholesky(a):
    """The factor of a well-conditioned matrix made of `a`; cholesky_ex, for the host does not wait."""
    n = a.shape[-1]
    return metalcore.cholesky_ex(metalcore.linalg.syrk(a, torch.eye(n, device=a.device, dtype=a.dtype), alpha=1 / n)).L


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
    "cholesky, small": Case(_cholesky, ((200, 16, 16),)),
    "cholesky, of a threadgroup": Case(_cholesky, ((20, 100, 100),)),
    "cholesky, in panels": Case(_cholesky, ((2, 200, 200),)),
    "cholesky_solve": Case(lambda a, b: metalcore.cholesky_solve(b, _cholesky(a)), ((20, 40, 40), (20, 40, 3))),
    "syrk": Case(lambda a, c: metalcore.linalg.syrk(a, c, alpha=0.1), ((3, 150, 40), (150, 150))),
    "svdvals": Case(metalcore.svdvals, ((200, 16, 12),)),
    "svd, small": Case(lambda a: metalcore.svd(a, False).S, ((200, 16, 12),)),
    "svd, of a threadgroup": Case(lambda a: metalcore.svd(a, False).S, ((5, 40, 36),)),
    "svd, after QR": Case(lambda a: metalcore.svd(a, False).S, ((20, 100, 10),)),
    "svd, blocked": Case(metalcore.svdvals, ((2, 150, 150),)),
    "eigh, small": Case(lambda a: metalcore.eigh(a).eigenvalues, ((200, 12, 12),)),
    "eigh, of a threadgroup": Case(lambda a: metalcore.eigh(a).eigenvalues, ((5, 40, 40),)),
    "eigh, blocked": Case(metalcore.eigvalsh, ((2, 150, 150),)),
    "eigvalsh": Case(metalcore.eigvalsh, ((200, 12, 12),)),
    "pinv": Case(metalcore.pinv, ((200, 16, 12),)),
    "lu, small": Case(lambda a: metalcore.lu(a)[1:], ((200, 16, 12),)),
    "lu, of a threadgroup": Case(lambda a: metalcore.lu(a)[1:], ((20, 60, 60),)),
    "lu, blocked": Case(lambda a: metalcore.lu_factor_ex(_dominant(a))[0], ((2, 200, 200),)),
    "solve, small": Case(lambda a, b: metalcore.solve_ex(_dominant(a), b)[0], ((300, 12, 12), (300, 12, 5))),
    "solve, of a threadgroup": Case(lambda a, b: metalcore.solve_ex(_dominant(a), b)[0], ((20, 70, 70), (20, 70, 1))),
    "solve, blocked": Case(lambda a, b: metalcore.solve_ex(_dominant(a), b)[0], ((2, 200, 200), (2, 200, 9))),
    "lu_solve": Case(_lu_solve, ((50, 20, 20), (50, 20, 3))),
    "inv": Case(lambda a: metalcore.inv_ex(_dominant(a))[0], ((3000, 3, 3),)),
    "det": Case(lambda a: metalcore.det(a / 8), ((40, 30, 30),)),
    "slogdet": Case(lambda a: metalcore.slogdet(_dominant(a))[1], ((40, 30, 30),)),
    "solve_triangular, small": Case(_triangular, ((300, 12, 12), (300, 12, 5))),
    "solve_triangular, a vector": Case(_triangular, ((5, 100, 100), (5, 100, 1))),
    "solve_triangular, of a threadgroup": Case(_triangular, ((20, 100, 100), (20, 100, 40))),
    "solve_triangular, blocked": Case(_triangular, ((2, 300, 300), (2, 300, 70))),
    "lstsq": Case(_lstsq, ((20, 40, 12), (20, 40, 3))),
    "geqrf": Case(lambda a: tuple(metalcore.geqrf(a)), ((2, 300, 200),), backward=False),
    # Nearly orthogonal: tau is one, and v little more than its one.
    "householder_product": Case(
        lambda a: metalcore.householder_product(a / 16, torch.ones_like(a[..., 0, :])), ((3, 200, 20),)
    ),
    "ormqr": Case(lambda a, c: metalcore.ormqr(a / 16, torch.ones_like(a[..., 0, :]), c), ((3, 200, 20), (3, 200, 30))),
    "adamw": Case(_adamw, ((300, 257), (5,), (70, 3)), backward=False),
}
