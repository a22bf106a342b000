"""An artifact on disk: a folder for each case, with meta.json and values.bin.

meta.json has the op, the shapes, dtype and seed of the inputs, their digest, the device and versions that recorded, and
for each tensor its part ("forward" or "gradient"), dtype, shape, tolerance and place in values.bin.

Small tensors are kept whole. Of larger ones two sums of each block of elements are kept. Random signs in the one find
elements that have changed places or signs, and magnitudes in the other find a wrong scale.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._core import accuracy
from .._core.registry import Op
from . import values
from .selection import CASES, Case, cases

__all__ = ["Artifact", "load", "parts", "record"]

FORMAT = 1
DTYPES = "float32", "float16", "bfloat16"
_WHOLE, _BLOCKS = 256, 64  # elements that are kept whole; sums otherwise
_SIGNS = 7_000  # the seed of the signs
_META = "meta.json"
_VALUES = "values.bin"
# JSON that is longer, and values that are more, are no artifact.
_LONGEST_META, _MOST_VALUES = 1 << 20, 1 << 30


class Artifact(NamedTuple):
    """What a device recorded for a case.

    Attributes:
        name: the case's name.
        meta: what meta.json has.
        tensors: what is kept of each tensor in meta["tensors"].
    """

    name: str
    meta: dict[str, Any]
    tensors: list[Tensor]


def kept(tensor: Tensor) -> Tensor:
    """Returns the elements of a small tensor, or the sums of a larger one's blocks, in float64 on the CPU: those with
    signs first, then those of magnitudes."""
    flat = tensor.detach().cpu().double().reshape(-1)
    if flat.numel() <= _WHOLE:
        return flat
    signs = values.normal((flat.numel(),), _SIGNS).sign().double()
    signs[signs == 0] = 1
    block = -(-flat.numel() // _BLOCKS)
    padded = torch.nn.functional.pad(torch.stack([flat * signs, flat.abs()]), (0, -flat.numel() % block))
    return padded.view(2, -1, block).sum(-1).flatten()


def block_of(tensor: Tensor, numbers: int) -> int:
    """Returns how many elements each of the kept numbers is made of."""
    return 1 if tensor.numel() == numbers else -(-tensor.numel() // (numbers // 2))


def parts(case: Case, device: str, seed: int) -> tuple[list[Tensor], list[tuple[str, Tensor]]]:
    """Returns the inputs of a case on the CPU, and its results and gradients on a device, each with the name of its
    part."""
    inputs = values.inputs(case.sample, case.dtype, seed)
    torch.manual_seed(seed)  # some algorithms begin with random numbers
    results = accuracy.evaluate(case.op, case.sample, [x.to(device) for x in inputs], numbers=values.normal)
    return inputs, [(part, tensor) for part, tensors in results.items() for tensor in tensors]


def tolerance(case: Case, part: str, tensor: Tensor) -> float:
    """Returns by how much an element may differ between two devices, each of which may be wrong by the bound that tests
    use (metalcore/_core/accuracy.py). It is relative to the largest finite element. Numbers that a GPU may take for
    zero are equal to it."""
    finite = tensor.detach().double().abs()
    finite = finite[finite.isfinite()]
    largest = float(finite.max()) if finite.numel() else 0.0
    bound = 2 * accuracy.FACTORS[part] * accuracy.bound(case.sample, tensor.dtype)
    return bound * largest + torch.finfo(tensor.dtype).tiny


def record(
    ops: Iterable[Op],
    device: str,
    folder: Path,
    kinds: tuple[str, ...] = CASES,
    dtypes: tuple[str, ...] = DTYPES,
    seed: int = 0,
) -> Iterator[Artifact]:
    """Computes the cases of ops on a device, writes an artifact for each into a folder, and yields it.

    Args:
        device: PyTorch's name of it.
        kinds, dtypes: which cases, of those that the ops have.
        seed: the inputs' seed.
    """
    for op in ops:
        for case in cases(op, kinds):
            if case.dtype_name not in dtypes:
                continue
            artifact = _record(case, device, seed)
            _write(artifact, folder / artifact.name)
            yield artifact


def _record(case, device, seed):
    from .._system import __version__

    inputs, results = parts(case, device, seed)
    meta = {
        "format": FORMAT,
        "op": case.op.name,
        "case": case.kind,
        "sample": case.sample.name,
        "dtype": case.dtype_name,
        "shapes": [list(shape) for shape in case.sample.shapes],
        "options": {name: str(value) for name, value in case.sample.options.items()},
        "seed": seed,
        "inputs": values.digest(inputs),
        "device": device_name(device),
        "versions": {"metalcore": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "tolerance": f"2 (both devices) * {accuracy.FACTORS} * (roundings={case.sample.roundings} * eps(dtype) + 8 * "
        f"sqrt(terms={case.sample.terms}) * eps(float32)) of the largest element, and the least normal number",
        "tensors": [
            {
                "part": part,
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
                "tolerance": tolerance(case, part, tensor.cpu()),
                "numbers": kept(tensor).numel(),
            }
            for part, tensor in results
        ],
    }
    return Artifact(case.name, meta, [kept(tensor) for _, tensor in results])


def device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{device} on {platform.machine()}" + ", simulated" * hasattr(torch._C, "_metalcore_simulates_mps")


def _stored(tensor, entry):
    """Returns the numbers as they are in the file: elements in their own dtype, sums in float32."""
    whole = math.prod(entry["shape"]) <= _WHOLE
    return tensor.to(getattr(torch, entry["dtype"]) if whole else torch.float32)


def _write(artifact, folder):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _META).write_text(json.dumps(artifact.meta, indent=1) + "\n")
    data = (values.memory(_stored(tensor, entry)) for tensor, entry in zip(artifact.tensors, artifact.meta["tensors"]))
    (folder / _VALUES).write_bytes(b"".join(data))


def load(folder: Path) -> Artifact:
    """Reads an artifact.

    Raises:
        ValueError: the files are damaged, or of another format. The message names the folder and what is wrong.
    """
    try:
        return _load(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{folder} is no golden artifact: {type(error).__name__}: {error}") from None


_FLOATS = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}


def _load(folder):
    meta = json.loads(_read(folder / _META, _LONGEST_META))
    if meta["format"] != FORMAT:
        raise ValueError(f"format {meta['format']}, and this version reads {FORMAT}")
    data = _read(folder / _VALUES, _MOST_VALUES)
    tensors, start = [], 0
    for entry in meta["tensors"]:
        shape, numbers = entry["shape"], entry["numbers"]
        if not all(type(size) is int and size >= 0 for size in (*shape, numbers)) or entry["dtype"] not in _FLOATS:
            raise ValueError(f"a tensor of shape {shape}, dtype {entry['dtype']}, with {numbers} numbers")
        whole = math.prod(shape) <= _WHOLE
        if not (
            math.isfinite(entry["tolerance"])
            and numbers == (math.prod(shape) if whole else min(numbers, 2 * _BLOCKS) // 2 * 2 or -1)
        ):
            raise ValueError(f"{numbers} numbers of a tensor of shape {shape}")
        dtype = entry["dtype"] if whole else "float32"
        end = start + numbers * _FLOATS[dtype]
        if end > len(data):
            raise ValueError(f"{_VALUES} ends after {len(data)} bytes")
        raw = torch.frombuffer(bytearray(data[start:end]), dtype=getattr(torch, dtype)) if numbers else torch.empty(0)
        tensors.append(raw.double())
        start = end
    if start != len(data):
        raise ValueError(f"{_VALUES} has {len(data) - start} bytes too many")
    return Artifact(folder.name, meta, tensors)


def _read(path, most):
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"{path.name} is larger than {most} bytes")
    return data
