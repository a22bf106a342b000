"""Muon, with the matrices of one shape orthogonalized together."""

from __future__ import annotations

import math

import torch
from torch.optim._muon import muon as torch_muon

from .._core.registry import Op, OptimizerOverride, Sample, register
from .._core.tensors import is_dtensor
from ._multi_tensor import MultiTensor, Override, steps_of

__all__ = ["Muon"]

# So many elements of a batch keep a GPU busy. More would only take more memory.
_BATCH = 2**27


class Muon(MultiTensor, torch.optim.Muon):
    """torch.optim.Muon whose Newton-Schulz iterations run on batches: of all parameters of one shape, and those of its
    transpose, at once. torch.optim.Muon multiplies the matrices one by one.

    It has the arguments of `torch.optim.Muon`, and is an instance of it: `lr`, `weight_decay`, `momentum`, `nesterov`,
    `ns_coefficients`, `eps`, `ns_steps`, `adjust_lr_fn`. Parameters are 2-D. Each class loads a state_dict of the
    other.

    Batches hold float32, float16 and bfloat16 parameters on `mps` and `cuda` devices with dense gradients of the same
    dtype. PyTorch's own code updates all others in the same call. Of DTensors, each rank iterates on some of the
    matrices of a batch: their shards go there, and the results back, each by an all-to-all. The iterations are in
    bfloat16 with products by torch.bmm and torch.baddbmm, as in torch. Like torch.optim.Muon it has no `foreach`,
    `capturable`, `differentiable` or `fused`; a learning rate in device memory is read by the host, which waits for it.

    Raises what torch.optim.Muon raises: ValueError for values out of range and for parameters that are not 2-D, and
    RuntimeError for sparse gradients.

    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; Liu et al., "Muon is
    Scalable for LLM Training", 2025.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(8, 4, device="mps"))
        >>> weight.grad = torch.ones_like(weight)
        >>> metalcore.optim.Muon([weight], lr=0.5).step()
        >>> weight.shape
        torch.Size([8, 4])
    """

    def _step_by_kernel(self, group, params, grads):
        self._init_group({**group, "params": params}, [], [], buffers := [])
        lr, momentum = float(group["lr"]), group["momentum"]
        torch._foreach_lerp_(buffers, grads, 1 - momentum)  # pyright: ignore[reportPrivateImportUsage]
        updates = torch._foreach_lerp(grads, buffers, momentum) if group["nesterov"] else buffers  # pyright: ignore[reportPrivateImportUsage]
        torch._foreach_mul_(params, 1 - lr * group["weight_decay"])  # pyright: ignore[reportPrivateImportUsage]
        shapes = {}
        for p, update in zip(params, updates):
            # Shards of a matrix go to other ranks together with those that are placed alike.
            key = (p.shape, p.placements) if is_dtensor(p) else tuple(sorted(p.shape))  # pyright: ignore
            shapes.setdefault(key, []).append((p, update))
        for members in shapes.values():
            few, many = members[0][0].shape
            size = max(1, _BATCH // max(1, few * many))
            for first in range(0, len(members), size):
                self._update(group, lr, members[first : first + size])

    def _update(self, group, lr, members):
        # The products that are squares of the short side are the small ones.
        tall = [p.shape[0] > p.shape[1] for p, _ in members]
        batch = [update.mT if flip else update for (_, update), flip in zip(members, tall)]
        options = group["ns_coefficients"], group["ns_steps"], group["eps"]
        if is_dtensor(members[0][0]):
            from ..distributed.optim import of_whole

            updates = of_whole(lambda whole: _orthogonalized(whole, *options), torch.stack(batch).bfloat16())
        else:
            updates = _orthogonalized(torch.stack(batch).bfloat16(), *options)
        for (p, _), flip, update in zip(members, tall, updates.unbind()):
            p.add_(update.mT if flip else update, alpha=-_adjusted(lr, group["adjust_lr_fn"], *p.shape))

    def _step_by_torch(self, group):
        params, grads, buffers = [], [], []
        has_complex = self._init_group(group, params, grads, buffers)
        names = (
            "lr",
            "weight_decay",
            "momentum",
            "nesterov",
            "ns_coefficients",
            "eps",
            "ns_steps",
            "adjust_lr_fn",
        )
        torch_muon(params, grads, buffers, has_complex=has_complex, **{name: group[name] for name in names})


def _orthogonalized(batch, coefficients, steps, eps):
    """Returns a batch of wide matrices, each replaced by a polynomial of it whose singular values are near one."""
    if steps >= 100:
        raise ValueError("Number of steps must be less than 100 for computational efficiency")
    if len(coefficients) != 3:
        raise ValueError("Coefficients must be a tuple of exactly 3 values")
    a, b, c = coefficients
    X = batch / torch.linalg.vector_norm(batch, dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = torch.bmm(X, X.mT)
        X = torch.baddbmm(X, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), X, beta=a)
    return X


def _adjusted(lr, rule, rows, columns):
    """Returns the learning rate of a matrix, such that updates of all shapes are of one size."""
    if rule is None or rule == "original":
        return lr * math.sqrt(max(1, rows / columns))
    return lr * 0.2 * math.sqrt(max(rows, columns)) if rule == "match_rms_adamw" else lr


class _OverrideMuon(Override, Muon):
    """metalcore.optim.Muon in the place of torch.optim.Muon."""


def _sample(name, **options):
    shapes = ((24, 40), (40, 24), (24, 40), (7, 5))
    # The iterations have 8 bits: with a small learning rate their errors are those of roundings of the parameters.
    options = {"lr": 1e-3, **options}
    return Sample(name, (*shapes, *shapes), options, terms=2**14, roundings=2**6)


register(
    Op(
        "muon",
        Muon,
        namesake="torch.optim.Muon",
        call=steps_of(("momentum_buffer",)),
        override=OptimizerOverride(torch.optim.Muon, _OverrideMuon),
        backward=False,
        waits=True,
        # Values of other sizes would leave more of the error to the iterations than the bound allows.
        edge=lambda: (_sample("one iteration", ns_steps=1), _sample("without momentum", momentum=0.0)),
        samples=lambda: (
            _sample("four parameters"),
            _sample("match_rms_adamw", adjust_lr_fn="match_rms_adamw", momentum=0.8),
        ),
    )
)
