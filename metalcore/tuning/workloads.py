"""The calls that are timed for each tuning table: sizes around every boundary that a field may move.

A table needs no more than its calls. search.py finds which of them a field's values concern, by their plans.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from .._core.registry import OPS, Sample
from ..quant._types import packed_sample
from ..recording import on_meta

__all__ = ["Scale", "Workload", "all_workloads", "workloads"]


@dataclass(frozen=True)
class Scale:
    """How large the calls are.

    Attributes:
        elements: a batch has about so many, which fills the device.
        most: a batch has at most so many matrices, since PyTorch takes some of them one by one.
        largest: the largest size of a single matrix.
        longest: the longest of many rows.
        steps: the sizes between two powers of two, and the power itself.
    """

    elements: int
    most: int
    largest: int
    longest: int
    steps: int


QUICK = Scale(elements=2**21, most=1024, largest=1024, longest=32768, steps=1)
FULL = Scale(elements=2**24, most=4096, largest=2048, longest=65536, steps=2)
SIMULATED = Scale(elements=2**12, most=1024, largest=128, longest=1024, steps=1)


@dataclass(frozen=True)
class Workload:
    """A call of an op.

    Attributes:
        op: the op's name.
        sample: its arguments.
        size, batch: of its matrices or rows, in the terms of tuning rows.
        backward: whether it is the op's derivative that is called.
    """

    op: str
    sample: Sample
    size: int
    batch: int
    backward: bool = False

    def __str__(self):
        return f"{self.op}{' backward' * self.backward} {'x'.join(map(str, self.sample.shapes[0]))}"

    def text(self) -> str:
        """Returns the op with all shapes, which tells a call from others."""
        shapes = ("x".join(map(str, shape)) for shape in self.sample.shapes)
        return " ".join([f"{self.op}{' backward' * self.backward}", *shapes])

    def call(self, device_type: str) -> Callable[[], object]:
        """Returns a call without arguments, whose inputs are on the device."""
        op, sample = OPS[self.op], self.sample
        tensors = sample.make(device_type, torch.float32)
        if self.backward:
            tensors = [tensor.requires_grad_() for tensor in tensors]
            outputs = [output for output in op.compute(sample, tensors) if output.requires_grad]
            grads = [torch.ones_like(output) for output in outputs]
            return lambda: torch.autograd.grad(outputs, tensors, grads, retain_graph=True)
        arguments = sample.arguments(*tensors)
        return torch.no_grad()(functools.partial(op.call, op.function, *arguments, **sample.options))

    def plan(self, device_type: str) -> int:
        """Returns a hash of what the call would run, as the tuning in use has it. Equal plans take equal time."""
        op, sample = OPS[self.op], self.sample
        with on_meta(device_type) as recorder:
            tensors = [torch.empty(shape, device="meta") for shape in sample.shapes]
            if self.backward:
                tensors = [tensor.requires_grad_() for tensor in tensors]
                outputs = [output for output in op.compute(sample, tensors) if output.requires_grad]
                torch.autograd.backward(outputs, [torch.empty_like(output) for output in outputs])
            else:
                with torch.no_grad():
                    op.call(op.function, *sample.arguments(*tensors), **sample.options)
        recording = recorder.recording
        variants = tuple(plan.variant for plan in recording.plans)
        return hash((variants, recording.dispatches, recording.torch_steps))


def all_workloads(scale: Scale) -> list[Workload]:
    """Returns the calls for all tables."""
    return [workload for table in _TABLES.values() for workload in table(scale)]


def workloads(table: str, scale: Scale) -> list[Workload]:
    """Returns the calls for a table."""
    return list(_TABLES[table](scale))


def _sizes(scale, lowest, highest):
    """Yields sizes from `lowest` to `highest`, powers of two and steps in between."""
    size = lowest
    while size <= highest:
        for step in range(scale.steps):
            if (between := size + size * step // scale.steps) <= highest:
                yield between
        size *= 2


def _squares(scale, *ops, lowest=4, batched_to=256, single_from=32):
    """Batches that fill the device, a few matrices, and single ones. `ops` are names, or pairs with the columns of a
    second argument."""
    for op in ops:
        name, *columns = (op,) if isinstance(op, str) else op
        template = OPS[name].samples()[0]

        def workload(n, batch, name=name, columns=columns, template=template):
            shapes = ((batch, n, n), *((batch, n, k) for k in columns))
            return Workload(name, replace(template, shapes=shapes), n, batch)

        for n in _sizes(scale, lowest, min(batched_to, scale.largest)):
            if (batch := min(scale.most, scale.elements // n**2)) > 16:
                yield workload(n, batch)
        for batch, fraction in ((8, 2), (1, 1)):
            for n in _sizes(scale, single_from, scale.largest // fraction):
                yield workload(n, batch)


def _row_lengths(scale):
    """Yields rows of every length that a kernel may take, in numbers that fill the device, and a few long ones."""

    def softmax(rows, length):
        return Sample("", ((rows, length),), {"dim": -1})

    def rms_norm(rows, length):
        return Sample("", ((rows, length), (length,)), arguments=lambda x, weight: (x, (length,), weight, 1e-6))

    shapes = [
        *((max(1, scale.elements // length), length) for length in _sizes(scale, 4, scale.longest)),
        *((rows, scale.elements // share) for rows, share in ((1, 32), (4, 16))),
    ]
    for sample in (softmax, rms_norm):
        for backward in (False, True):
            for rows, length in shapes:
                yield Workload(sample.__name__, sample(rows, length), length, rows, backward)


def _tall(scale):
    """Yields single matrices and batches with many more rows than columns."""
    template = OPS["qr"].samples()[0]
    for n in (8, 32, 64, 128):
        for times in (8, 64):
            if (m := n * times) <= 16 * scale.largest:
                for batch in {1, max(1, scale.elements // (m * n))}:
                    yield Workload("qr", replace(template, shapes=((batch, m, n),)), n, batch)


def _jacobi(scale) -> Iterator[Workload]:
    yield from _squares(scale, "svd", "eigh")


def _eig(scale) -> Iterator[Workload]:
    yield from _squares(scale, "eig")


def _lu(scale):
    yield from _squares(scale, "lu_factor", ("solve", 1), ("lu_solve", 4))


def _ldl(scale):
    yield from _squares(scale, "ldl_factor_ex")


def _qr(scale):
    yield from _squares(scale, "qr", "geqrf", "householder_product", ("ormqr", 32), lowest=8)
    yield from _tall(scale)


def _triangular(scale):
    yield from _squares(scale, ("solve_triangular", 1), ("solve_triangular", 64), lowest=16)


def _cholesky(scale):
    yield from _squares(scale, "cholesky")


def _syrk(scale):
    yield from _squares(scale, "syrk", lowest=16)


def _tridiagonalize(scale):
    yield from _squares(scale, "eigh", lowest=256)


def _optim(scale):
    template = OPS["adamw"].samples()[0]
    count = 8
    shape = (max(4, scale.elements // count // 64), 64)
    yield Workload("adamw", replace(template, shapes=(shape,) * 2 * count), shape[0] * 64, count)


def _decode(scale):
    """Yields one query of 8 heads, and as many keys of 2 as a batch of others has elements, and fewer."""
    for keys in _sizes(scale, 64, scale.elements // 32):
        shapes = ((1, 8, 1, 64), (1, 2, keys, 64), (1, 2, keys, 64))
        yield Workload("scaled_dot_product_attention", Sample("", shapes, {"enable_gqa": True}), keys, 1)


def _attention(scale):
    """Yields causal training of a few heads, of sizes that kernels differ for."""
    for size in (64, 96, 128, 256):
        for rows in _sizes(scale, 64, min(4096, scale.elements // 64)):
            sample = Sample("", ((1, 4, rows, size),) * 3, {"is_causal": True})
            for backward in (False, True):
                yield Workload("scaled_dot_product_attention", sample, size, rows, backward)


def _gemm(scale):
    """Yields few and many rows, times square matrices."""
    for length in _sizes(scale, 64, scale.largest):
        for rows in (2, 6, 12, 24, 40):
            yield Workload("matmul", Sample("", ((rows, length), (length, length))), length, rows)


def _joined(scale):
    """Yields one row, times a square matrix and a long one."""
    for length in _sizes(scale, 64, scale.largest):
        for outputs in (length, 4 * length):
            yield Workload("joined_linear", Sample("", ((1, length), (outputs, length))), length, outputs)


def _quant(scale):
    """Yields few and many rows, and packed weights with as many rows as columns or other numbers of them."""

    def workload(rows, outputs, length):
        def arguments(x):
            return x, packed_sample("Q4_K", outputs, length, device=x.device)

        return Workload("quantized_linear", Sample("", ((rows, length),), {"type": "Q4_K"}, arguments), length, rows)

    for length in _sizes(scale, 256, max(256, scale.largest)):
        for outputs in (length // 4, length, 4 * length):
            for rows in (1, 4, 16):
                yield workload(rows, outputs, length)


def _parallelism(scale):
    """Ops that split their work into about as many threadgroups as fill a GPU."""
    yield from (workload for workload in _row_lengths(scale) if workload.batch <= 4)
    yield from _squares(scale, "qr", "svd", lowest=scale.largest, single_from=min(256, scale.largest))


_TABLES: dict[str, Callable[[Scale], Iterator[Workload]]] = {
    "parallelism": _parallelism,
    "attention": _attention,
    "attention_decode": _decode,
    "gemm": _gemm,
    "joined_linear": _joined,
    "rows": _row_lengths,
    "cholesky": _cholesky,
    "eig": _eig,
    "jacobi": _jacobi,
    "ldl_factor": _ldl,
    "lu": _lu,
    "norm": _row_lengths,
    "optim": _optim,
    "qr": _qr,
    "quant": _quant,
    "syrk": _syrk,
    "triangular": _triangular,
    "tridiagonalize": _tridiagonalize,
}
