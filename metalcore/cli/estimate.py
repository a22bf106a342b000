"""python -m metalcore estimate: how long an op or a kernel would take on one of Apple's GPUs."""

from __future__ import annotations

import json
import re
from pathlib import Path

from .explain import option_value, shape_words


def add_parser(commands):
    parser = commands.add_parser(
        "estimate",
        help="how long an op or a kernel may take on one of Apple's GPUs",
        description="Counts what an op's kernels do, or one kernel of a file, and estimates the time on a chip from "
        "that. An estimate is no measurement: it comes with the interval in which nine in ten measured kernels of its "
        "kind lie.",
        epilog="examples: python -m metalcore estimate qr 4096x32x32 --gpu m4-max; "
        "python -m metalcore estimate kernel.metal --kernel add --grid 1048576 --group 256 "
        "--argument float32:1048576 --argument float32:1048576 --argument 3 --gpu m1",
    )
    parser.add_argument("what", help="the op's name, as in metalcore.<op>, or a file of MSL")
    parser.add_argument("size", nargs="*", help="a shape for each tensor of the op, as 1024x128x128")
    parser.add_argument(
        "--gpu", default="m1", help="m1 to m5, with -pro, -max or -ultra, and the cores behind that (m1)"
    )
    parser.add_argument("--dtype", default="float32", choices=("float32", "float16", "bfloat16"))
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="another argument of the op"
    )
    parser.add_argument("--kernel", help="of a file: the kernel's name")
    parser.add_argument("--grid", help="of a file: threads, as 1024x1024")
    parser.add_argument("--group", help="of a file: threads of a threadgroup, as 32x8")
    parser.add_argument(
        "--argument",
        action="append",
        default=[],
        metavar="DTYPE:SHAPE|NUMBER",
        help="of a file: what is bound, from buffer 0 on: random numbers of a dtype and shape, or a number (int: 3, "
        "float: 3.0), which the kernel reads as int32 or float32",
    )
    parser.add_argument("--threadgroup-memory", type=int, default=0, help="of a file: bytes for [[threadgroup(0)]]")
    parser.add_argument("--include", action="append", default=[], metavar="DIR", help="of a file: where #include looks")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument("--svg", metavar="FILE", help="writes a picture of the times by resource and by line")
    parser.set_defaults(run=run)


def run(arguments):
    import metalcore.simulator  # noqa: F401

    estimate = _of_file(arguments) if arguments.what.endswith(".metal") else _of_op(arguments)
    if arguments.svg:
        Path(arguments.svg).write_text(estimate.svg(), encoding="utf-8")
    print(json.dumps(estimate.as_dict(), indent=1) if arguments.json else estimate)


def _random(shape, dtype):
    import torch

    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype, device="mps")
    return torch.randn(shape).to(dtype).to("mps")


def _of_op(arguments):
    import torch

    import metalcore

    from .._core.registry import OPS
    from .._explain import arguments_of, tensor_arguments

    if arguments.what not in OPS:
        raise ValueError(f"there is no op {arguments.what!r}; `op --list` prints all, and a file's name ends in .metal")
    entry = OPS[arguments.what]
    if isinstance(entry.function, type):
        raise ValueError(f"{arguments.what} is an optimizer: metalcore.estimate(optimizer.step) estimates it")
    options = dict(map(_option, arguments.option))
    shapes = shape_words(arguments.size)
    values = arguments_of(entry, shapes, shapes, getattr(torch, arguments.dtype), options, _random)
    # Some ops do not take all values: positive definite matrices, for example.
    prepare = next(iter(entry.samples())).prepare
    for name, function in zip(tensor_arguments(entry), prepare):
        if name in values and values[name].is_floating_point():
            values[name] = function(values[name].cpu().float()).to(values[name].dtype).to("mps")
    return metalcore.estimate(entry.function, gpu=arguments.gpu, **values, **options)


def _option(option):
    name, separator, value = option.partition("=")
    if not separator:
        raise ValueError(f"--option {option}: expected NAME=VALUE")
    return name, option_value(value)


def _sizes(text, what):
    if not text or not re.fullmatch(r"\d+(x\d+){0,2}", text):
        raise ValueError(f"{what} {text!r}: expected one to three sizes, such as 1024x8")
    return tuple(map(int, text.split("x")))


def _of_file(arguments):
    from ..estimates import CountedLibrary, Estimate, chips, counting

    chip, source = chips.find(arguments.gpu), Path(arguments.what)
    threads, group = _sizes(arguments.grid, "--grid"), _sizes(arguments.group, "--group")
    folders = [source.parent, *map(Path, arguments.include)]
    library = CountedLibrary(source.read_text(encoding="utf-8"), include_dirs=folders)
    names = list(library)
    if arguments.kernel not in names:
        raise ValueError(f"--kernel {arguments.kernel}: {source} has {', '.join(names[:8]) or 'no kernels'}")
    bound = [_bound(text) for text in arguments.argument]
    casts = {index: "int32" for index, value in enumerate(bound) if isinstance(value, int)}
    more = {"threadgroup_memory": arguments.threadgroup_memory} if arguments.threadgroup_memory else {}
    with counting(registers=True) as counted:
        getattr(library, arguments.kernel)(*bound, threads=threads, group_size=group, arg_casts=casts or None, **more)
    return Estimate(chip, [_in_file(each, source.name) for each in counted])


def _in_file(counted, name):
    """Returns what was counted with the name of the program's file."""
    lines = {(name if file == "program_source" else file, line): kinds for (file, line), kinds in counted.lines.items()}
    return counted._replace(lines=lines)


def _bound(text):
    import torch

    dtype, separator, shape = text.partition(":")
    if separator:
        kind = getattr(torch, dtype, None)
        if not isinstance(kind, torch.dtype):
            raise ValueError(f"--argument {text}: there is no dtype {dtype!r}")
        return _random(_sizes(shape, f"--argument {text}:"), kind)
    value = option_value(text)
    if not isinstance(value, (int, float)):
        raise ValueError(f"--argument {text}: expected DTYPE:SHAPE or a number")
    return value
