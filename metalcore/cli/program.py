"""python -m metalcore program: what is in a program's file, what it computes, and how long that takes."""

from __future__ import annotations

from pathlib import Path

from . import devices


def add_parser(commands):
    parser = commands.add_parser(
        "program",
        help="describe, run and time programs in files",
        description="Describes, runs and times programs that were compiled ahead of time, and saved to files.",
        epilog="example: python -m metalcore program run model.mcore --seed 1 -o results.safetensors",
    )
    actions = parser.add_subparsers(dest="action", metavar="action", required=True)
    describe = actions.add_parser("describe", help="print what is in a file; this needs no device and no weights")
    describe.add_argument("--manifest", action="store_true", help="all of it, as JSON")
    describe.set_defaults(run=run_describe)
    run = actions.add_parser("run", help="compute its results")
    run.add_argument("-o", "--out", metavar="FILE", help="write the results to this file of safetensors")
    run.set_defaults(run=run_run)
    prepare = actions.add_parser(
        "prepare", help="compile a file's generated kernels for this machine's CPU, for libmetalcore"
    )
    prepare.add_argument(
        "-o", "--out", metavar="FOLDER", required=True, help="gets them: METALCORE_GENERATED_DIR of the C program"
    )
    prepare.set_defaults(run=run_prepare)
    profile = actions.add_parser("profile", help="time its operations")
    profile.add_argument("--repeats", type=int, default=10, help="how often each is timed (10)")
    profile.add_argument("--json", action="store_true", help="for programs")
    profile.add_argument(
        "-o", "--out", metavar="FILE", help="also write a picture (….svg), a trace for Perfetto (….trace.json) or JSON"
    )
    profile.set_defaults(run=run_profile)
    for action in (describe, run, prepare, profile):
        action.add_argument("file", metavar="FILE")
    for action in (run, prepare, profile):
        action.add_argument("--weights", metavar="FILE", help="of safetensors; by default that beside the program")
    for action in (run, profile):
        action.add_argument("--inputs", metavar="FILE", help="of safetensors, by the inputs' names; others are random")
        action.add_argument("--seed", type=int, default=0, help="of random inputs (0)")
        devices.add_option(action)


def run_describe(arguments):
    from metalcore.programs.files import describe

    print(describe(arguments.file, arguments.manifest))


def run_run(arguments):
    from torch.utils._pytree import tree_leaves

    from metalcore.programs.files import container

    program, (args, kwargs) = _loaded(arguments)
    results = {f"result_{number}": leaf for number, leaf in enumerate(tree_leaves(program(*args, **kwargs)))}
    for name, result in results.items():
        print(f"{name}: {_described(result)}")
    if arguments.out:
        tensors = {name: result for name, result in results.items() if hasattr(result, "dtype")}
        container.write(Path(arguments.out), tensors, {"format": "pt"})


def run_prepare(arguments):
    import metalcore
    from metalcore.programs.files import prepare

    devices.use("simulator")
    kernels = prepare(metalcore.load(arguments.file, arguments.weights, "mps"), arguments.file, arguments.out)
    print(f"{len(kernels)} generated kernels in {arguments.out}")


def run_profile(arguments):
    program, (args, kwargs) = _loaded(arguments)
    profile = program.profile(*args, repeats=arguments.repeats, **kwargs)
    if arguments.out:
        profile.save(arguments.out)
    print(profile.to_json() if arguments.json else profile)


def _loaded(arguments):
    """Returns the program, and its arguments."""
    import metalcore
    from metalcore.programs.files.container import Container

    device = devices.use(arguments.device or devices.default())
    program = metalcore.load(arguments.file, arguments.weights, device)
    inputs = {}
    if arguments.inputs:
        with Container(arguments.inputs) as file:
            inputs = {name: file.read(name) for name in file.entries}
    return program, program.arguments(inputs, arguments.seed)


def _described(result):
    if not hasattr(result, "dtype"):
        return repr(result)
    head = f"{str(result.dtype).removeprefix('torch.')} {'×'.join(map(str, result.shape)) or 'scalar'}"
    if not result.numel() or result.is_complex():
        return head
    wide = result.cpu().double()
    return f"{head}, mean {wide.mean().item():.6g}, from {wide.min().item():.6g} to {wide.max().item():.6g}"
