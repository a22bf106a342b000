"""What a program's file holds, without its weights being read and without a device."""

from __future__ import annotations

import json
import os
from collections import Counter

from .container import Container
from .manifest import read_manifest
from .recordings import read_recordings, told

__all__ = ["describe"]


def describe(path: str | os.PathLike, manifest: bool = False) -> str:
    """Returns what a file says of its program, in text; or its whole manifest, as JSON.

    Raises:
        ProgramFileError: the file is damaged, or no program.
    """
    with Container(path) as file:
        found, recordings = read_manifest(file), read_recordings(file)
        if manifest:
            return json.dumps({**found, "recordings": recordings}, indent=1)
        own = sum(entry.end - entry.begin for entry in file.entries.values())
        count = len(file.entries)
    lines = [
        f"a program of metalcore {found['metalcore']} with PyTorch {found['torch']}",
        f"compiled for {found['target']}, on {found['device']}",
        "arguments:",
        *(f"  {_input(entry)}" for entry in found["inputs"]),
        f"results: {len(found['outputs'])}",
        f"tensors in the file: {count}, {own} bytes",
    ]
    if found["weights"] is not None:
        parameters = [entry for entry in _parameters(found) if "names" in entry]
        lines.append(f"weights: {len(parameters)} parameters, apart, by default in {found['weights']}")
        folded = len(found["recipe"]["constants"]) if found["recipe"] else 0
        if folded:
            lines.append(
                f"  {folded} constants are computed of them, by {len(found['recipe']['operations'])} operations"
            )
    lines.append(f"operations: {len(found['operations'])}")
    names = Counter(entry["operator"] for entry in found["operations"])
    lines += [f"  {number} {name}" for name, number in names.most_common()]
    if found["fused"]:
        fused = Counter(pattern for pattern, _ in found["fused"])
        lines.append("fused: " + ", ".join(f"{name} {number}" for name, number in fused.items()))
    lines.append(f"generated kernels: {len(found['kernels'])}")
    for kind, recording in recordings.items():
        lines += told(kind, recording)
    return "\n".join(lines)


def _parameters(found):
    return [*found["parameters"], *(found["recipe"]["parameters"] if found["recipe"] else [])]


def _input(entry):
    if "is" in entry:
        return f"{entry['name']} = {entry['is']!r}"
    return f"{entry['name']}: {entry['dtype']} {'×'.join(map(str, entry['shape'])) or 'scalar'}"
