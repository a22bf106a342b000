"""python -m metalcore explain: which kernels an op would run for a shape, and why."""

from __future__ import annotations

import json

from . import devices


def add_parser(commands):
    parser = commands.add_parser(
        "explain",
        help="how an op would run for a shape, without running it",
        description="Prints the variant that an op takes for a shape, why, and the kernels it dispatches.",
        epilog="examples: python -m metalcore explain qr 1024x128x128 --option mode=complete; "
        "python -m metalcore explain solve 64x32x32 64x32x4",
    )
    parser.add_argument("op", help="the op's name, as in metalcore.<op>")
    parser.add_argument(
        "size",
        nargs="+",
        help="a shape for each tensor, as 1024x128x128; or its sizes as words, where a comma starts the next tensor's",
    )
    parser.add_argument("--dtype", default="float32", choices=("float32", "float16", "bfloat16", "complex64"))
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="another argument of the op; may be given several times",
    )
    devices.add_option(parser)
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.set_defaults(run=run)


def run(arguments):
    import torch

    import metalcore

    device = devices.use(arguments.device) if arguments.device else None
    options = {}
    for option in arguments.option:
        name, separator, value = option.partition("=")
        if not separator:
            raise ValueError(f"--option {option}: expected NAME=VALUE")
        if name in ("op", "dtype"):
            raise ValueError(f"--option {option}: the command has its own argument {name}")
        options[name] = option_value(value)
    shapes = shape_words(arguments.size)
    # A tensor says which device is planned for; an expanded one has no memory but for one element.
    inputs = shapes if device is None else [torch.empty((), device=device).expand(shape) for shape in shapes]
    explanation = metalcore.explain(arguments.op, *inputs, dtype=getattr(torch, arguments.dtype), **options)
    print(json.dumps(explanation.as_dict(), indent=2) if arguments.json else explanation)


def shape_words(words):
    """Returns ["8x4", "4"], ["8", "4,", "4"] and ["8", "4", ",", "4"] are (8, 4) and (4,)."""
    shapes = []
    for part in " ".join(words).split(","):
        if "x" in part:
            shapes += [_shape(word.split("x"), word) for word in part.split()]
        else:
            shapes.append(_shape(part.split(), part.strip()))
    return shapes


def _shape(sizes, text):
    try:
        shape = tuple(int(size) for size in sizes)
    except ValueError:
        raise ValueError(f"expected whole numbers for the sizes, not {text!r}") from None
    if any(size < 0 for size in shape):
        raise ValueError(f"a size is negative in {text!r}")
    if any(size >= 2**63 for size in shape):
        raise ValueError(f"a size is too large in {text!r}: PyTorch's are below 2^63")
    return shape


def option_value(word):
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word
