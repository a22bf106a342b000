"""SOAP, with the blocks of one shape of all parameters computed together."""

from __future__ import annotations

import math

import torch
from torch.optim.adamw import adamw

from .. import linalg
from .._core.registry import Op, Sample, register
from .._core.routing import on_cuda
from .._core.tensors import beside, is_dtensor, local, whole
from ._multi_tensor import MultiTensor, steps_of

__all__ = ["SOAP", "Blocks"]

_SIDES = ("left", "right")


class SOAP(MultiTensor, torch.optim.Optimizer):  # pyright: ignore[reportIncompatibleMethodOverride]
    """SOAP: Adam in the eigenbases of Shampoo's preconditioners, with decoupled weight decay.

    A parameter of two or more dimensions is a matrix, whose rows are its first dimension. Sides that are longer than
    `max_precond_dim` are divided into equal blocks. Each m x n block has the means L and R of G Gᵀ and Gᵀ G, and
    orthogonal matrices P and Q near their eigenvectors, with which Adam runs on Pᵀ G Q:

        param = param * (1 - lr * weight_decay) - lr * sqrt(1 - beta2^t) / (1 - beta1^t) * P N Qᵀ
        N     = (Pᵀ mean(G) Q) / (sqrt(mean((Pᵀ G Q)²)) + eps)

    Every `precondition_frequency` steps a step of power iteration and a QR decomposition renew P and Q. At a
    parameter's first step, eigendecompositions make them, and the parameter does not move, as in the authors' code.
    Parameters of fewer dimensions are updated by AdamW, with the same options.

    All blocks of one shape, of all parameters of a group, are one batch: of torch.bmm, and of `metalcore.linalg.qr` and
    `eigh`. The state is float32, or float64 for parameters of that dtype. Of a parameter that is a DTensor, each rank
    has some of the blocks and their state: gradients are gathered for the step, and updates from their owners.

    Args:
        params: parameters, named parameters or groups of them: of any floating-point dtype and strides, on any device.
            Gradients are dense and may have another dtype.
        lr: a float or a 1-element tensor, which the host reads.
        betas: of the means of gradients, and of their squares in the eigenbasis.
        shampoo_beta: of the means L and R; None is the second of `betas`.
        eps, weight_decay: as above.
        precondition_frequency: how many steps a basis stays the same.
        max_precond_dim: the longest side of a block.
        maximize: whether the objective is to grow.

    It has no `foreach` (blocks are always batched), `capturable`, `differentiable` or `fused`: a step counts on the
    host.

    Raises:
        ValueError: a value is out of range.
        RuntimeError: a gradient is sparse or complex; or a CUDA graph captures a step.

    Source: Vyas et al., "SOAP: Improving and Stabilizing Shampoo using Adam", 2024, algorithm 3. Blocks: Anil et al.,
    "Scalable Second Order Optimization for Deep Learning", 2020.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(8, 4, device="mps"))
        >>> weight.grad = torch.ones_like(weight)
        >>> metalcore.optim.SOAP([weight], lr=0.5).step()
        >>> weight.shape
        torch.Size([8, 4])
    """

    state_dtype = torch.float32
    COUNTS_ON_HOST = True
    STATES = ("exp_avg", "exp_avg_sq", *(f"{kind}_{side}" for kind in ("mean", "basis") for side in _SIDES))

    def __init__(
        self,
        params,
        lr=3e-3,
        betas=(0.95, 0.95),
        shampoo_beta=None,
        eps=1e-8,
        weight_decay=0.01,
        precondition_frequency=10,
        max_precond_dim=1024,
        *,
        maximize=False,
    ):
        if isinstance(lr, torch.Tensor) and lr.numel() != 1:
            raise ValueError("Tensor lr must be 1-element")
        for name, value in (("learning rate", lr), ("epsilon value", eps), ("weight_decay value", weight_decay)):
            if not value >= 0.0:
                raise ValueError(f"Invalid {name}: {value}")
        for name, beta in (("betas[0]", betas[0]), ("betas[1]", betas[1]), ("shampoo_beta", shampoo_beta)):
            if beta is not None and not 0.0 <= beta < 1.0:
                raise ValueError(f"Invalid {name}: {beta}")
        for name, value in (
            ("precondition_frequency", precondition_frequency),
            ("max_precond_dim", max_precond_dim),
        ):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, not {value!r}")
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "shampoo_beta": shampoo_beta,
                "eps": eps,
                "weight_decay": weight_decay,
                "precondition_frequency": precondition_frequency,
                "max_precond_dim": max_precond_dim,
                "maximize": maximize,
            },
        )
        self._batches = {}

    def __setstate__(self, state):
        super().__setstate__(state)
        self._batches = {}

    def __getstate__(self):
        return {name: value for name, value in super().__getstate__().items() if name != "_batches"}

    def _restore_states(self, saved):
        ids = [key for group in saved["param_groups"] for key in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for key, p in zip(ids, params):
            for name in self.STATES:
                value = saved["state"].get(key, {}).get(name)
                if value is not None:  # a copy: steps change batches in place
                    self.state[p][name] = value.to(device=p.device, dtype=_wide(p), copy=True)

    def _step_group(self, group):
        matrices, vectors = {}, []
        for p in group["params"]:
            if p.grad is None or p.numel() == 0:
                continue
            if p.grad.is_sparse or p.is_complex():
                raise RuntimeError("SOAP does not support sparse gradients or complex parameters")
            if p.dim() < 2:
                vectors.append(p)
                continue
            state = self.state[p]
            if "step" not in state:
                state["step"] = torch.zeros(())
            blocks = Blocks(p.shape, group["max_precond_dim"], p.device_mesh if is_dtensor(p) else None)
            # Those that have made as many steps share their corrections, and renew their bases together.
            key = p.device, _wide(p), blocks.shape, blocks.mesh, int(state["step"])
            matrices.setdefault(key, []).append((p, blocks))
        if vectors:
            self._step_vectors(group, vectors)
        for (*_, step), members in matrices.items():
            for some in self._divided(members):
                self._step_matrices(group, some, step)

    def _divided(self, members):
        """Returns lists of parameters that are computed together."""
        return [members]

    _qr = staticmethod(linalg.qr)
    _eigh = staticmethod(linalg.eigh)

    def _step_vectors(self, group, params):
        for p in params:
            state = self.state[p]
            if "step" not in state:
                state["step"] = torch.zeros(())
                state["exp_avg"] = torch.zeros_like(p, dtype=_wide(p))
                state["exp_avg_sq"] = torch.zeros_like(p, dtype=_wide(p))
        states = [self.state[p] for p in params]
        wide = [p.to(_wide(p)) for p in params]
        beta1, beta2 = group["betas"]
        adamw(
            wide,
            [p.grad.to(_wide(p)) for p in params],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=float(group["lr"]),
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
            # PyTorch's own choice, also for tensors without memory that stand for some on a GPU
            foreach=all(on_cuda(p) and not is_dtensor(p) for p in params),
        )
        for p, value in zip(params, wide):
            if value is not p:
                p.copy_(value)

    def _step_matrices(self, group, members, step):
        grads = torch.cat([blocks.split(p.grad.to(_wide(p))) for p, blocks in members])
        if group["maximize"]:
            grads = -grads
        batch = self._batch(members, grads)
        beta1, beta2 = group["betas"]
        means = group["shampoo_beta"] if group["shampoo_beta"] is not None else beta2
        left, right = batch["basis_left"], batch["basis_right"]
        if step > 0:
            batch["exp_avg"].lerp_(grads, 1 - beta1)
            projected = left.mT @ grads @ right
            batch["exp_avg_sq"].mul_(beta2).addcmul_(projected, projected, value=1 - beta2)
            correction1, correction2 = 1 - beta1**step, 1 - beta2**step  # the first step has changed neither mean
            denominator = batch["exp_avg_sq"].sqrt().add_(group["eps"])
            update = left @ ((left.mT @ batch["exp_avg"] @ right) / denominator) @ right.mT
            self._move(group, members, update, math.sqrt(correction2) / correction1)
        batch["mean_left"].baddbmm_(grads, grads.mT, beta=means, alpha=1 - means)
        batch["mean_right"].baddbmm_(grads.mT, grads, beta=means, alpha=1 - means)
        if step == 0:
            for side in _SIDES:
                # Descending, as power iteration orders them.
                batch[f"basis_{side}"].copy_(self._eigh(batch[f"mean_{side}"])[1].flip(-1))
        elif step % group["precondition_frequency"] == 0:
            self._renew(batch)
        for p, _ in members:
            self.state[p]["step"] += 1

    def _move(self, group, members, update, size):
        lr = float(group["lr"])
        params = [p for p, _ in members]
        torch._foreach_mul_(params, 1 - lr * group["weight_decay"])  # pyright: ignore[reportPrivateImportUsage]
        counts = [blocks.here for _, blocks in members]
        for (p, blocks), part in zip(members, update.split(counts)):
            p.add_(blocks.join(part, p).to(p.dtype), alpha=-lr * size)

    def _renew(self, batch):
        squares = batch["exp_avg_sq"]
        for side, dim in zip(_SIDES, (-2, -1)):
            basis = batch[f"basis_{side}"]
            product = batch[f"mean_{side}"] @ basis
            # Rayleigh quotients estimate the eigenvalues, whose order the columns keep.
            order = (basis * product).sum(-2).argsort(-1, descending=True)
            columns = order.unsqueeze(-2).expand_as(product)
            basis.copy_(self._qr(product.gather(-1, columns))[0])
            index = order.unsqueeze(-1 if dim == -2 else -2).expand_as(squares)
            squares = squares.gather(dim, index)
        batch["exp_avg_sq"].copy_(squares)

    def _batch(self, members, grads):
        """Returns the states of parameters as batches, of which the entries of each parameter's state are parts.
        Batches stay from step to step, unless the parameters with gradients, or their states, are others."""
        key = tuple(id(p) for p, _ in members)
        cached = self._batches.get(key)
        if cached is not None and all(
            self.state[p].get(name) is part for name, parts in cached[1].items() for (p, _), part in zip(members, parts)
        ):
            return cached[0]
        m, n = grads.shape[-2:]
        sizes = {"exp_avg": (m, n), "exp_avg_sq": (m, n), "mean_left": (m, m), "mean_right": (n, n)}
        sizes |= {"basis_left": (m, m), "basis_right": (n, n)}
        counts, batch, views = [blocks.here for _, blocks in members], {}, {}
        for name, size in sizes.items():
            parts = [self.state[p].get(name) for p, _ in members]
            if all(part is None for part in parts):
                batch[name] = grads.new_zeros((sum(counts), *size))
            else:
                batch[name] = torch.cat([local(part).to(grads) for part in parts])
            parts = batch[name].split(counts)
            views[name] = [blocks.kept(part) for (_, blocks), part in zip(members, parts)]
            for (p, _), part in zip(members, views[name]):
                self.state[p][name] = part
        for other in [other for other in self._batches if set(other) & set(key)]:
            del self._batches[other]
        self._batches[key] = batch, views
        return batch


def _wide(p):
    return torch.float64 if p.dtype is torch.float64 else torch.float32


class _Reference(SOAP):
    """SOAP with one parameter after the other, and with torch.linalg's functions on one block after the other."""

    def _divided(self, members):
        return [[member] for member in members]

    @staticmethod
    def _qr(batch):
        return torch.stack([torch.linalg.qr(matrix)[0] for matrix in batch]), None

    @staticmethod
    def _eigh(batch):
        return None, torch.stack([torch.linalg.eigh(matrix)[1] for matrix in batch])


def _sample(name, **options):
    # The blocks are square, because their first gradients have a definite eigenbasis.
    shapes = ((12, 12), (7, 7), (24, 12), (5,))
    options = {"lr": 1e-2, "precondition_frequency": 1, "max_precond_dim": 12, **options}
    return Sample(name, (*shapes, *shapes), options, terms=2**10, roundings=8)


register(
    Op(
        "soap",
        SOAP,
        reference=_Reference,
        call=steps_of(()),
        operators=("eigh", "qr"),
        backward=False,
        waits=True,
        samples=lambda: (_sample("four parameters"), _sample("decay", weight_decay=0.1, maximize=True)),
    )
)


class Blocks:
    """How a parameter is divided into blocks, none with a side longer than `longest`. Its rows are its first dimension,
    and its columns all others. Blocks have one shape: zeros fill what the last ones lack.

    Attributes:
        shape: of a block.
        count: how many there are.
        mesh: over which they are divided, where the parameter is a DTensor, or None.
        here: how many of them this rank has.
    """

    def __init__(self, size: torch.Size, longest: int, mesh=None):
        self._size, self.mesh = size, mesh
        self._sides = size[0], size[1:].numel()
        self._counts = [-(-side // longest) for side in self._sides]
        self.shape = tuple(-(-side // count) for side, count in zip(self._sides, self._counts))
        self.count = self.here = self._counts[0] * self._counts[1]
        self._owned = None
        if mesh is not None:
            from ..distributed.optim import Owned

            self._owned = Owned(mesh, self.count)
            self.here = self._owned.here

    def split(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns (here, *shape)."""
        blocks = self._split(whole(tensor))
        return blocks if self._owned is None else self._owned.part(blocks)

    def _split(self, tensor):
        matrix = tensor.reshape(self._sides)
        if self.count == 1:
            return matrix.unsqueeze(0)
        (down, across), (m, n) = self._counts, self.shape
        rows, columns = self._sides
        padded = torch.nn.functional.pad(matrix, (0, across * n - columns, 0, down * m - rows))
        return padded.view(down, m, across, n).transpose(1, 2).reshape(self.count, m, n)

    def kept(self, part: torch.Tensor) -> torch.Tensor:
        """Returns blocks in the form in which a state has them."""
        return part if self._owned is None else self._owned.state(part)

    def join(self, part: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        """Returns the tensor that `split` divided, placed as the parameter."""
        if self._owned is None:
            return self._join(part)
        return beside(p, self._join(self._owned.whole(part))).redistribute(p.device_mesh, p.placements)  # pyright: ignore

    def _join(self, blocks):
        (down, across), (m, n) = self._counts, self.shape
        rows, columns = self._sides
        whole = blocks.view(down, across, m, n).transpose(1, 2).reshape(down * m, across * n)
        return whole[:rows, :columns].reshape(self._size)
