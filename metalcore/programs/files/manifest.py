"""The manifest of a program's file: read, checked without its tensors, and described in text without a device."""

from __future__ import annotations

import json
import keyword
import os
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from .container import Container, ProgramFileError, strict_json
from .recordings import read_recordings, told
from .writing import FORMAT, VERSION

__all__ = ["describe", "read_manifest"]

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,199}")
_FILE = re.compile(r"[^/\\\0:]{1,200}")
_MOST = 1_000_000  # of anything
_KINDS = {
    "metalcore": str,
    "torch": str,
    "target": str,
    "device": str,
    "memory": str,
    "generated": bool,
    "single": bool,
    "weights": (str, type(None)),
    "arguments": (dict, str),
    "results": (dict, str),
    "recipe": (dict, type(None)),
    "inputs": list,
    "parameters": list,
    "operations": list,
    "outputs": list,
    "fused": list,
    "kernels": dict,
}
_RECIPE = {"parameters": list, "operations": list, "constants": list}
_TENSOR = {"name": str, "dtype": str, "shape": list, "strides": list, "device": str}
_ENTRIES = {
    "inputs": (_TENSOR, ("strides",)),
    "parameters": ({**_TENSOR, "tensor": str, "names": list}, ("strides", "names")),
    "operations": ({"name": str, "operator": str, "arguments": list, "options": dict, "gives": list}, ()),
}
_NUMBER = {"name": str, "is": object}


def read_manifest(file: Container) -> dict[str, Any]:
    """Returns the manifest of an open file, whose digest fits.

    Raises:
        ProgramFileError: the file is no program, or of another version, or damaged.
    """
    if file.metadata.get("format") != FORMAT:
        raise ProgramFileError(f"{file.path} is no program")
    version = file.metadata.get("version", "")
    if version != VERSION:
        raise ProgramFileError(f"{file.path} is of version {version[:20]!r}; this metalcore reads version {VERSION}")
    file.check_digest()
    try:
        manifest = strict_json(file.metadata.get("program", ""))
    except ValueError as error:
        raise ProgramFileError(f"the manifest cannot be read: {error}") from None
    entry = _items(manifest, _KINDS, "the manifest")
    _check_entries(entry)
    if entry["recipe"] is not None:
        _check_entries(_items(entry["recipe"], _RECIPE, "the recipe"))
        _check_pairs(entry["recipe"]["constants"], "a constant of the recipe")
    if entry["weights"] is not None and (not _FILE.fullmatch(entry["weights"]) or entry["weights"] in (".", "..")):
        raise ProgramFileError(f"the weights' file is not named {entry['weights'][:60]!r}: it lies beside the program")
    if not all(isinstance(text, str) for text in entry["kernels"].values()):
        raise ProgramFileError("a kernel's source is no text")
    _check_pairs(entry["fused"], "a fused pattern")
    if not all(isinstance(pair[1], str) for pair in entry["fused"]):
        raise ProgramFileError("a fused pattern has no name")
    return entry


def _check_entries(section):
    for kind, (kinds, optional) in _ENTRIES.items():
        for entry in section.get(kind, ()):
            is_number = kind == "inputs" and isinstance(entry, dict) and "is" in entry
            _items(entry, _NUMBER if is_number else kinds, f"one of the {kind}", () if is_number else optional)
            _check_name(entry["name"])
            if not all(isinstance(name, str) for name in entry.get("names", ())):
                raise ProgramFileError("a parameter has names that are no texts")


def _check_pairs(pairs, what):
    if not all(isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) for pair in pairs):
        raise ProgramFileError(f"{what} is no pair of a name and something")


def _items(entry: Any, kinds: dict[str, Any], what: str, optional: Sequence[str] = ()) -> dict[str, Any]:
    """Returns an object with entries of these kinds, and no others."""
    if not isinstance(entry, dict):
        raise ProgramFileError(f"{what} is no object")
    if unknown := sorted(set(entry) - set(kinds)):
        raise ProgramFileError(f"{what} has the unknown entry {unknown[0][:60]!r}")
    for name, kind in kinds.items():
        if name not in entry:
            if name not in optional:
                raise ProgramFileError(f"{what} has no entry {name!r}")
            continue
        item = entry[name]
        if not isinstance(item, kind) or isinstance(item, bool) and kind not in (bool, object):
            raise ProgramFileError(f"{what}: {name!r} is of the wrong kind")
        if isinstance(item, (list, dict)) and len(item) > _MOST:
            raise ProgramFileError(f"{what}: {name!r} is too long")
    return entry


def _check_name(name):
    """Refuses a value's name that is no plain name, since torch.fx writes it into Python code."""
    if not _NAME.fullmatch(name) or keyword.iskeyword(name) or name.startswith("__") or name == "self":
        raise ProgramFileError(f"a value cannot have the name {name[:60]!r}")


def describe(path: str | os.PathLike, manifest: bool = False) -> str:
    """Returns what a file says of its program, in text; or its whole manifest, as JSON.

    Raises:
        ProgramFileError: the file is damaged, or no program.
    """
    with Container(path) as file:
        entries, recordings = read_manifest(file), read_recordings(file)
        if manifest:
            return json.dumps({**entries, "recordings": recordings}, indent=1)
        own = sum(entry.end - entry.begin for entry in file.entries.values())
        count = len(file.entries)
    lines = [
        f"a program of metalcore {entries['metalcore']} with PyTorch {entries['torch']}",
        f"compiled for {entries['target']}, on {entries['device']}",
        "arguments:",
        *(f"  {_input(entry)}" for entry in entries["inputs"]),
        f"results: {len(entries['outputs'])}",
        f"tensors in the file: {count}, {own} bytes",
    ]
    if entries["weights"] is not None:
        parameters = [entry for entry in _parameters(entries) if "names" in entry]
        lines.append(f"weights: {len(parameters)} parameters, apart, by default in {entries['weights']}")
        folded = len(entries["recipe"]["constants"]) if entries["recipe"] else 0
        if folded:
            lines.append(
                f"  {folded} constants are computed of them, by {len(entries['recipe']['operations'])} operations"
            )
    lines.append(f"operations: {len(entries['operations'])}")
    names = Counter(entry["operator"] for entry in entries["operations"])
    lines += [f"  {number} {name}" for name, number in names.most_common()]
    if entries["fused"]:
        fused = Counter(pattern for pattern, _ in entries["fused"])
        lines.append("fused: " + ", ".join(f"{name} {number}" for name, number in fused.items()))
    lines.append(f"generated kernels: {len(entries['kernels'])}")
    for kind, recording in recordings.items():
        lines += told(kind, recording)
    return "\n".join(lines)


def _parameters(entries):
    return [*entries["parameters"], *(entries["recipe"]["parameters"] if entries["recipe"] else [])]


def _input(entry):
    if "is" in entry:
        return f"{entry['name']} = {entry['is']!r}"
    return f"{entry['name']}: {entry['dtype']} {'×'.join(map(str, entry['shape'])) or 'scalar'}"
