"""python -m metalcore golden: records results on one device, and compares another device with them."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path

from . import devices


def add_parser(commands):
    parser = commands.add_parser(
        "golden",
        help="record results on one device, and compare another with them",
        description="Records results and gradients of ops as files, and compares a device with such files.",
        epilog="example: python -m metalcore golden record softmax qr --device cuda -o golden; on another machine "
        "python -m metalcore golden compare golden --device mps",
    )
    actions = parser.add_subparsers(dest="action", metavar="action", required=True)
    record = actions.add_parser("record", help="compute cases of ops, and write their results to a folder")
    record.add_argument("op", nargs="*", help="names, as `python -m metalcore ops` has them; the default is every op")
    record.add_argument("--case", action="append", help="unit, production or edge; the default is all three")
    record.add_argument("--dtype", action="append", help="float32, float16 or bfloat16; the default is all three")
    record.add_argument("--seed", type=int, default=0, help="the inputs' seed (0)")
    record.add_argument("-o", "--out", required=True, metavar="DIR", help="a folder that is not there, or is empty")
    devices.add_option(record)
    record.set_defaults(run=run_record)
    compare = actions.add_parser("compare", help="compute recorded cases again; exits with 1 if one differs")
    compare.add_argument(
        "source",
        metavar="DIR",
        nargs="?",
        help="a folder, or a file that `golden pack` made; the default is what metalcore "
        "ships, which an NVIDIA GPU recorded",
    )
    compare.add_argument("--json", action="store_true", help="for programs")
    compare.add_argument("--picture", metavar="PNG", help="draw the errors by op; needs matplotlib")
    devices.add_option(compare)
    compare.set_defaults(run=run_compare)
    pack = actions.add_parser("pack", help="make one compressed file of a folder")
    pack.add_argument("source", metavar="DIR")
    pack.add_argument("out", metavar="FILE")
    pack.set_defaults(run=run_pack)
    unpack = actions.add_parser("unpack", help="make the folder of a file again")
    unpack.add_argument("source", metavar="FILE")
    unpack.add_argument("out", metavar="DIR")
    unpack.set_defaults(run=run_unpack)


def run_record(arguments):
    from metalcore import golden
    from metalcore._core.registry import OPS

    kinds = _chosen("--case", arguments.case, golden.CASES)
    dtypes = _chosen("--dtype", arguments.dtype, ("float32", "float16", "bfloat16"))
    ops = [OPS[name] for name in _chosen("op", arguments.op, tuple(OPS))]
    folder = Path(arguments.out)
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} has files already")
    device = devices.use(arguments.device or devices.default())
    count = 0
    for artifact in golden.record(ops, device, folder, kinds, dtypes, arguments.seed):
        count += 1
        print(f"[{count}] {artifact.name}")
    print(f"{count} artifacts in {folder}")


def _chosen(what, words, choices):
    if unknown := [word for word in words or () if word not in choices]:
        raise ValueError(f"{what} {unknown[0]!r}: expected {', '.join(choices)}")
    return tuple(dict.fromkeys(words)) if words else choices


def run_compare(arguments):
    from metalcore import golden
    from metalcore._core.registry import OPS
    from metalcore.golden.comparison import draw

    device = devices.use(arguments.device or devices.default())
    source = Path(arguments.source) if arguments.source else golden.REFERENCE
    with golden.unpacked(source) if source.is_file() else contextlib.nullcontext(source) as folder:
        comparisons = list(golden.compare(folder, device))
    wrong = [comparison for comparison in comparisons if not comparison.right]
    if arguments.picture and not draw(comparisons, Path(arguments.picture)):
        raise RuntimeError("--picture needs matplotlib: pip install matplotlib")
    summary = f"{len(comparisons) - len(wrong)} of {len(comparisons)} artifacts agree"
    missing = sorted(OPS.keys() - {row.op for row in comparisons})
    if arguments.json:
        rows = [
            {**row._asdict(), "error": row.error if math.isfinite(row.error) else None, "right": row.right}
            for row in comparisons
        ]
        print(json.dumps({"comparisons": rows, "without artifacts": missing, "summary": summary}, indent=1))
        return 1 if wrong else 0
    print(_table(comparisons))
    for row in wrong:
        print(f"DIFFERS {row.name}: {row.problem or f'{row.error:.3g} times the tolerance, {row.where}'}")
    if missing:
        print(f"not compared, for want of artifacts: {', '.join(missing)}")
    print(summary)
    return 1 if wrong else 0


def _table(comparisons):
    """Returns a line for each op: its cases, how many differ, and its largest error."""
    ops = {}
    for row in comparisons:
        ops.setdefault(row.op, []).append(row)
    width = max(map(len, ops))
    lines = [f"{'op':<{width}}  cases  differ  largest error / tolerance"]
    for op, rows in ops.items():
        worst = max(rows, key=lambda row: row.error)
        differ = sum(not row.right for row in rows)
        lines.append(f"{op:<{width}}  {len(rows):5}  {differ:6}  {worst.error:<8.3g} {worst.name}")
    return "\n".join(lines)


def run_pack(arguments):
    from metalcore import golden

    golden.pack(Path(arguments.source), Path(arguments.out))
    print(f"wrote {arguments.out}, {Path(arguments.out).stat().st_size / 1e6:.2f} MB")


def run_unpack(arguments):
    from metalcore import golden

    golden.unpack(Path(arguments.source), Path(arguments.out))
    print(f"wrote {arguments.out}")
