"""python -m metalcore op: runs one op, checks it against float64, and times it."""

from __future__ import annotations

import inspect
import json

from . import devices


def add_parser(commands):
    parser = commands.add_parser(
        "op",
        help="run an op, check it against float64 on the CPU, and time it",
        description="Runs an op's cases, checks results and gradients against float64 on the CPU, and times them. "
        "Exits with 1 if one is wrong. Sizes of the case `production` are options: --list shows them.",
        epilog="example: python -m metalcore op softmax --case production --batch_size 2 --vocab_size 32000 "
        "--temperature 0.7 --dtype bfloat16",
    )
    parser.add_argument("op", nargs="?", help="a name, or `all`")
    parser.add_argument("--list", action="store_true", help="print the ops and the options of their production cases")
    parser.add_argument(
        "--case", help="unit, production or edge; the default is unit and edge, or production if sizes are given"
    )
    parser.add_argument("--dtype", help="float32, float16 or bfloat16; the default is every one that the op takes")
    parser.add_argument("--seed", type=int, default=0, help="the inputs' seed (0)")
    parser.add_argument("--json", action="store_true", help="for programs")
    devices.add_option(parser)
    parser.set_defaults(run=run, takes_more=True)


def run(arguments):
    from metalcore._core.registry import OPS

    if arguments.list:
        for name, op in OPS.items():
            print(f"{name:<22}{' '.join(f'--{size} {value}' for size, value in _sizes(op).items())}")
        return 0
    if arguments.op != "all" and arguments.op not in OPS:
        raise ValueError(
            f"there is no op {arguments.op!r}; `op --list` prints all" if arguments.op else "expected an op"
        )
    ops = list(OPS.values()) if arguments.op == "all" else [OPS[arguments.op]]
    cases = [case for op in ops for case in _cases(op, arguments)]
    device = devices.use(arguments.device or devices.default())
    rows, wrong = [], 0
    for case in cases:
        row = _try(case, device, arguments.seed)
        rows.append(row)
        wrong += row["status"] != "ok"
        if not arguments.json:
            print(_line(row), flush=True)
    summary = f"{len(rows) - wrong} of {len(rows)} cases are right"
    print(json.dumps({"cases": rows, "summary": summary}, indent=1) if arguments.json else summary)
    return 1 if wrong else 0


def _sizes(op):
    return {name: parameter.default for name, parameter in inspect.signature(op.production).parameters.items()}


def _cases(op, arguments):
    from metalcore import golden

    options = _sizes_of(op, arguments.more)
    kinds = (arguments.case,) if arguments.case else ("production",) if options else ("unit", "edge")
    if unknown := [kind for kind in kinds if kind not in golden.CASES]:
        raise ValueError(f"--case {unknown[0]!r}: expected {', '.join(golden.CASES)}")
    if options and kinds != ("production",):
        raise ValueError(f"--{next(iter(options))} is an option of --case production")
    cases = [case for case in golden.cases(op, kinds, options) if arguments.dtype in (None, case.dtype_name)]
    if not cases:
        raise ValueError(f"--dtype {arguments.dtype}: {op.name} takes {', '.join(sorted(map(str, op.dtypes)))}")
    return cases


def _sizes_of(op, words):
    """Returns {"batch_size": 2} of ["--batch_size", "2"], with the types of the defaults."""
    defaults, options = _sizes(op), {}
    if len(words) % 2:
        raise ValueError(f"{words[-1]}: expected --NAME VALUE")
    for name, value in zip(words[::2], words[1::2]):
        key = name.removeprefix("--").replace("-", "_")
        if not name.startswith("--") or key not in defaults:
            raise ValueError(f"{op.name} has no option {name}; it has {', '.join(f'--{size}' for size in defaults)}")
        kind = type(defaults[key])
        try:
            options[key] = kind(value)
        except ValueError:
            raise ValueError(
                f"{name}: expected {'a whole number' if kind is int else 'a number'}, not {value!r}"
            ) from None
        if not options[key] > 0:
            raise ValueError(f"{name}: expected more than 0, not {value}")
    return options


def _try(case, device, seed):
    import torch

    from metalcore._core import accuracy
    from metalcore.golden import values
    from metalcore.tuning.search import Clock

    inputs = values.inputs(case.sample, case.dtype, seed)
    tensors = [x.to(device) for x in inputs]
    row = {"case": case.name, "shapes": [list(shape) for shape in case.sample.shapes], "status": "ok"}
    try:
        row["shares"] = accuracy.shares_of(case.op, case.sample, inputs, device, case.dtype)
        with torch.no_grad():
            row["microseconds"] = (
                1e6 * Clock(device, 3, 0.01).time(lambda: case.op.compute(case.sample, tensors)).seconds
            )
    except Exception as error:  # what is wrong is what is asked for
        return {**row, "status": f"FAILED: {type(error).__name__}: {error}"}
    if not all(share <= 1 for share in row["shares"].values()):
        row["status"] = "WRONG"
    return row


def _line(row):
    shapes = ", ".join("x".join(map(str, shape)) for shape in row["shapes"])
    shares = ", ".join(f"{part} {share:.2f}" for part, share in row.get("shares", {}).items())
    time = f"; {row['microseconds']:.1f} µs" if "microseconds" in row else ""
    return f"{row['status']:<6} {row['case']} ({shapes}): {shares} of the bound{time}"
