"""python -m metalcore gguf info FILE: what a GGUF file holds, and whether metalcore can load it."""

from __future__ import annotations

import array
import json
import math
from typing import Any

from ..gguf import GGUFError, GGUFFile
from ..gguf._config import config_of, layout_of, unread
from ..gguf._load import check_types
from ..gguf._metadata import Metadata
from ..gguf._reader import WholeFile, whole
from ..gguf._tokenizer import TAKEN
from ..quant._types import KERNELS

_SHOWN = 70  # characters of a value


def add_parser(commands):
    parser = commands.add_parser("gguf", help="GGUF files", description="GGUF files.")
    actions = parser.add_subparsers(dest="action", metavar="action", required=True)
    info = actions.add_parser(
        "info",
        help="what a file holds",
        description="Metadata, layout and types of tensors of a GGUF file, whether their types have kernels, and "
        "whether the layout can be loaded; of a model in parts those of all. Exits with 2 if the file is damaged.",
    )
    info.add_argument("file", metavar="FILE")
    info.add_argument("--tensors", action="store_true", help="list every tensor")
    info.add_argument("--json", action="store_true", help="for programs; arrays are whole")
    info.set_defaults(run=run)


def run(arguments):
    summary = collect(*_opened(arguments.file))
    if not arguments.tensors:
        del summary["tensors"]
    if arguments.json:
        print(json.dumps(summary, indent=2))
    else:
        _print(summary)


def _opened(path):
    """Returns a file with its other parts, or a part by itself and why the others cannot be had."""
    try:
        return whole(path), None
    except GGUFError as error:
        return GGUFFile(path), error


def collect(file: GGUFFile, error: GGUFError | None = None) -> dict[str, Any]:
    """Returns what there is to say about a file, as JSON has it.

    Args:
        error: why its model is not whole.
    """
    weights = sum(math.prod(info.shape) for info in file.tensors.values())
    nbytes = sum(info.nbytes for info in file.tensors.values())
    loads = _loads(file) if error is None else str(error).removeprefix(f"{file.path}: ")
    parts = file.parts if isinstance(file, WholeFile) else ()
    return {
        "file": str(file.path),
        "bytes": file.size,
        "version": file.version,
        "parts": [{"file": str(part.path), "bytes": part.size, "tensors": len(part.tensors)} for part in parts],
        "layout": file.metadata.get("general.architecture"),
        "loads": loads,
        "weights": weights,
        "bits_per_weight": round(8 * nbytes / weights, 3) if weights else None,
        "metadata": {key: _plain(value) for key, value in file.metadata.items()},
        "not_read": unread(Metadata(file), TAKEN) if loads is True else [],
        "types": _types(file),
        "tensors": [
            {"name": info.name, "type": info.type.name, "shape": list(info.shape), "bytes": info.nbytes}
            for info in file.tensors.values()
        ],
    }


def _loads(file):
    """Returns True, or why the file does not load."""
    try:
        config_of(file, layout_of(file))
        check_types(file)
    except GGUFError as error:
        return str(error).removeprefix(f"{file.path}: ")
    return True


def _types(file):
    types: dict[str, dict[str, Any]] = {}
    for info in file.tensors.values():
        kernel = info.type.name in KERNELS
        of = types.setdefault(info.type.name, {"tensors": 0, "weights": 0, "bytes": 0, "kernel": kernel})
        of["tensors"] += 1
        of["weights"] += math.prod(info.shape)
        of["bytes"] += info.nbytes
    for of in types.values():
        of["bits_per_weight"] = round(8 * of["bytes"] / of["weights"], 3)
    return dict(sorted(types.items(), key=lambda item: -item[1]["bytes"]))


def _plain(value):
    if isinstance(value, array.array):
        value = value.tolist()
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value  # JSON has no NaN


def _print(summary):
    bits = summary["bits_per_weight"]
    print(f"file       {_printable(summary['file'])}: {summary['bytes']:,} bytes, GGUF version {summary['version']}")
    for number, part in enumerate(summary["parts"], 1):
        name = _printable(part["file"])
        print(f"part {number:<5} {name}: {part['bytes']:,} bytes, {part['tensors']:,} tensors")
    print(f"layout     {_printable(str(summary['layout']))}")
    print("loads      " + ("yes" if summary["loads"] is True else f"no: {_printable(summary['loads'])}"))
    print(f"weights    {summary['weights']:,}" + (f", {bits} bits each" if bits else ""))
    print("\nmetadata")
    for key, value in summary["metadata"].items():
        mark = "  (nothing reads it)" if key in summary["not_read"] else ""
        print(f"  {_printable(key)} = {_short(value)}{mark}")
    print(f"\n{'type':<10} {'tensors':>8} {'weights':>16} {'bytes':>16} {'bits':>8}  kernel")
    for name, of in summary["types"].items():
        kernel = "yes" if of["kernel"] else "PyTorch's" if name in ("F32", "F16", "BF16") else "no: becomes numbers"
        counts = f"{of['tensors']:>8,} {of['weights']:>16,} {of['bytes']:>16,} {of['bits_per_weight']:>8.3f}"
        print(f"{name:<10} {counts}  {kernel}")
    if "tensors" in summary:
        print()
        for one in summary["tensors"]:
            shape = " × ".join(map(str, one["shape"]))
            print(f"{_printable(one['name']):<48} {one['type']:<8} {shape:>24} {one['bytes']:>14,}")


def _short(value):
    if isinstance(value, list):
        few = ", ".join(_short(one) for one in value[:4])
        return f"[{few}{', …' if len(value) > 4 else ''}] ({len(value):,})"
    text = _printable(value if isinstance(value, str) else repr(value))
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… ({len(text):,} characters)"


def _printable(text):
    """Returns a text without what a terminal would take for commands, and without bytes that are not UTF-8."""
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)
