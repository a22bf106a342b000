"""python -m metalcore explain: which kernels an op would run for a shape, and why."""

from __future__ import annotations


def add_parser(commands):
    parser = commands.add_parser(
        "explain", help="how an op would run for a shape, without running it",
        description="Prints the variant that an op takes for a shape, why, and the kernels it dispatches.",
        epilog="example: python -m metalcore explain qr 1024 128 128 --option mode=complete")
    parser.add_argument("op", help="the op's name, as in metalcore.<op>")
    parser.add_argument("size", nargs="+", help="the sizes of the first tensor; a comma starts the next tensor's")
    parser.add_argument("--dtype", default="float32", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE",
                        help="another argument of the op; may be given several times")
    parser.set_defaults(run=run)


def run(arguments):
    import torch

    import metalcore

    options = {}
    for option in arguments.option:
        name, separator, value = option.partition("=")
        if not separator:
            raise ValueError(f"--option {option}: expected NAME=VALUE")
        options[name] = _value(value)
    print(metalcore.explain(arguments.op, *_shapes(arguments.size), dtype=getattr(torch, arguments.dtype), **options))


def _shapes(words):
    """["8", "4,", "4"] and ["8", "4", ",", "4"] are (8, 4) and (4,)."""
    shapes = []
    for part in " ".join(words).split(","):
        try:
            shape = tuple(int(word) for word in part.split())
        except ValueError:
            raise ValueError(f"expected whole numbers for the sizes, not {part.strip()!r}") from None
        if any(size < 0 for size in shape):
            raise ValueError(f"a size is negative in {part.strip()!r}")
        shapes.append(shape)
    return shapes


def _value(word):
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word
