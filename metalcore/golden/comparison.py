"""Computes recorded cases again on a device, and compares."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from .._core.registry import OPS
from . import values
from .artifact import Artifact, block_of, kept, load, parts
from .selection import CASES, Case, cases

__all__ = ["Comparison", "compare", "draw"]


class Comparison(NamedTuple):
    """How far a device's results of a case are from the recorded ones.

    Attributes:
        name: the case's name.
        op: the op's name.
        error: the largest error in units of the tolerance: at most 1 is right. It is infinite where a shape, a dtype or
            a NaN differs.
        where: the tensor and the element (or the block of elements) with the largest error.
        problem: why nothing could be compared, or "".
    """

    name: str
    op: str
    error: float
    where: str
    problem: str = ""

    @property
    def right(self) -> bool:
        return not self.problem and self.error <= 1


def compare(folder: Path, device: str, takes: Callable[[Case], bool] = lambda case: True) -> Iterator[Comparison]:
    """Compares a device with the artifacts in a folder, in the order of their names.

    Args:
        device: PyTorch's name of it.
        takes: whether to compare a case. All artifacts without a case are reported.

    Raises:
        ValueError: the folder has no artifact.
    """
    cases_by_name = {case.name: case for op in OPS.values() for case in cases(op, CASES)}
    folders = sorted(path for path in folder.iterdir() if path.is_dir())
    if not folders:
        raise ValueError(f"{folder} has no artifacts")
    for path in folders:
        case = cases_by_name.get(path.name)
        if case and not takes(case):
            continue
        artifact = load(path)
        op = str(artifact.meta.get("op", path.name))
        if case is None:
            yield Comparison(path.name, op, math.inf, "", "this version of metalcore has no such case")
            continue
        try:
            yield _compare(case, artifact, device)
        except Exception as error:  # an op that fails is what is looked for
            yield Comparison(path.name, op, math.inf, "", f"{type(error).__name__}: {error}")


def _compare(case: Case, artifact: Artifact, device: str) -> Comparison:
    meta = artifact.meta
    inputs, results = parts(case, device, meta["seed"])
    if values.digest(inputs) != meta["inputs"]:
        return Comparison(artifact.name, case.op.name, math.inf, "", "the inputs differ from the recorded ones")
    signature = [(entry["part"], entry["dtype"], entry["shape"]) for entry in meta["tensors"]]
    ours = [(part, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for part, tensor in results]
    if signature != ours:
        return Comparison(artifact.name, case.op.name, math.inf, "", f"results are {ours}, recorded were {signature}")
    worst, where = 0.0, ""
    for number, (entry, recorded, (part, tensor)) in enumerate(zip(meta["tensors"], artifact.tensors, results)):
        errors = _errors(kept(tensor), recorded, entry["tolerance"], block_of(tensor, recorded.numel()))
        if errors.numel() and float(errors.max()) >= worst:
            worst, index = float(errors.max()), int(errors.argmax())
            where = f"{part} {number}, {_place(index, tensor, errors.numel())}"
    return Comparison(artifact.name, case.op.name, worst, where)


# The chance that rounding errors of random signs add up to more than this times the root of their number is 3e-8.
_DEVIATIONS = 6


def _errors(ours, recorded, tolerance, block):
    """Computes errors in units of the tolerance, of numbers that are made of `block` elements each. Equal infinities
    and two NaNs are no error."""
    allowed = tolerance * (1 if block == 1 else min(block, _DEVIATIONS * block**0.5))
    same = (ours == recorded) | (ours.isnan() & recorded.isnan())
    errors = ((ours - recorded).abs() / allowed).nan_to_num(nan=math.inf, posinf=math.inf)
    return torch.where(same, torch.zeros_like(errors), errors)


def _place(index, tensor, numbers):
    block = block_of(tensor, numbers)
    first = (index if block == 1 else index % (numbers // 2)) * block

    def element(flat):
        return "(" + ", ".join(str(int(i)) for i in torch.unravel_index(torch.tensor(flat), tensor.shape)) + ")"

    if block == 1:
        return f"element {element(first)}"
    return f"elements {element(first)} to {element(min(first + block, tensor.numel()) - 1)}"


_LEAST, _MOST = 1e-4, 1e2


def draw(comparisons: Sequence[Comparison], path: Path) -> bool:
    """Writes a PNG, and returns False where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    ops = sorted({comparison.op for comparison in comparisons}, reverse=True)
    figure = Figure(figsize=(8, 1.2 + 0.2 * len(ops)), layout="constrained")
    axes = figure.add_subplot()
    for right, color, label in ((True, "tab:blue", "right"), (False, "tab:red", "wrong")):
        chosen = [comparison for comparison in comparisons if comparison.right == right]
        axes.scatter(
            [min(max(comparison.error, _LEAST), _MOST) for comparison in chosen],
            [ops.index(comparison.op) for comparison in chosen],
            s=12,
            color=color,
            label=f"{label}: {len(chosen)}",
        )
    axes.axvline(1, color="black", linewidth=1)
    axes.set(xscale="log", xlim=(_LEAST / 2, _MOST * 2), xlabel="largest error, in units of the tolerance")
    axes.set_yticks(range(len(ops)), ops, fontsize=7)
    axes.legend(loc="lower right", fontsize=7)
    figure.savefig(path, dpi=120)
    return True
